"""Measure parbench next to its peers: a bare torch loop, and MPI's ping-pong by NetPIPE.

    python -m tests.studies.peers [--rounds 5] [--no-commands]

All measure the same operations on two ranks of this host over TCP, alternately in each round, so
that a slow drift of the machine affects all alike. Printed are medians over the rounds. NetPIPE
(Debian's ``netpipe-openmpi``) is left out where it is not installed. The second table has the time
until common commands have answered. Nothing else may run meanwhile.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from parbench import load
from parbench.bench.results.runs import list_runs, load_run
from parbench.bench.world.torch_compat import all_gather_single
from tests.support.paths import ROOT, environment

SIZES = {"1K": 1 << 10, "64K": 1 << 16, "1M": 1 << 20, "16M": 1 << 24}
OPERATIONS = ("all_reduce", "all_gather", "all_to_all", "pingpong")
NUM_BLOCKS = 9
BLOCK_SECONDS = 0.1
COMMANDS = (
    "--help",
    "list",
    "doctor",
    "run all_reduce --sizes 1M",
    "run all_reduce --sizes 1K:64M:x4",
    "run ddp",
    "show RUN",
    "report RUN",
    "compare BASE RUN",
    "plan search --model llama3-70b --gpus 64",
)
"""The answered commands; RUN and BASE are runs of the smoke preset."""

PACKAGES = ("parbench", "bench", "workloads", "reports", "slurm")
ANSWERS = (0, 1, 3)
"""Exit codes of commands that answered."""
NETPIPE = "NPopenmpi"
MPIRUN = "mpirun --allow-run-as-root --oversubscribe --mca pml ob1 --mca btl tcp,self -np 2"
Times = dict[tuple[str, str], float]
"""Seconds of one step by operation and size."""


def exchange(sent: torch.Tensor, received: torch.Tensor) -> None:
    """Send a tensor from rank 0 to rank 1, and then one from rank 1 to rank 0."""
    if dist.get_rank() == 0:
        dist.send(sent, 1)
        dist.recv(received, 1)
    else:
        dist.recv(received, 0)
        dist.send(sent, 0)


def make_step(operation: str, size_bytes: int) -> Callable[[], object]:
    world = dist.group.WORLD
    assert world is not None
    # Ones, because zeros that were never written are all read from one page, which is in the cache.
    output = torch.ones(size_bytes // 4)
    shard = torch.ones(size_bytes // 4 // dist.get_world_size())
    source = torch.ones(size_bytes // 4)
    if operation == "all_reduce":
        return lambda: dist.all_reduce(output)
    if operation == "all_gather":
        return lambda: all_gather_single(output, shard, world)
    if operation == "all_to_all":
        return lambda: dist.all_to_all_single(output, source)
    return lambda: exchange(source, output)


def time_bare_step(step: Callable[[], object]) -> float:
    """Return the median seconds of a step over blocks, each as long as on its slowest rank."""
    for _ in range(5):
        step()
    began = time.perf_counter()
    step()
    seconds = torch.tensor([time.perf_counter() - began])
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    num_steps = max(3, min(2000, int(BLOCK_SECONDS / seconds.item())))
    blocks = []
    for _ in range(NUM_BLOCKS):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(num_steps):
            step()
        seconds = torch.tensor([(time.perf_counter() - began) / num_steps])
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        blocks.append(seconds.item())
    return median(blocks)


def run_bare_rank(rank: int, folder: str) -> None:
    """Print the operation, size and seconds of each step, on rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    for operation in OPERATIONS:
        for size, size_bytes in SIZES.items():
            seconds = time_bare_step(make_step(operation, size_bytes))
            if operation == "pingpong":
                seconds /= 2
            if rank == 0:
                print(operation, size, seconds, flush=True)
    dist.destroy_process_group()


def measure_bare_loop() -> Times:
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.studies.peers", "--bare-rank", str(rank), folder],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        lines = ranks[0].communicate()[0].splitlines()
        if any(rank.wait() for rank in ranks):
            raise RuntimeError("a rank of the bare loop failed")
    return {(operation, size): float(text) for operation, size, text in map(str.split, lines)}


def run_parbench(arguments: Sequence[str], folder: Path) -> float:
    """Run a command of parbench in a folder, and return the seconds until it has answered."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "parbench", *arguments]
    code = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True
    ).returncode
    seconds = time.perf_counter() - began
    if code not in ANSWERS:
        raise RuntimeError(f"parbench {' '.join(arguments)} ended with {code}")
    return seconds


def measure_parbench(mode: str) -> Times:
    with tempfile.TemporaryDirectory() as folder:
        options = ["--sizes", ",".join(SIZES), "--nproc", "2", "--set", f"mode={mode}"]
        run_parbench(["run", *OPERATIONS, *options], Path(folder))
        frame = load(Path(folder) / "runs")
    frame = frame[frame["metric"] == "time"]
    medians = frame.groupby(["name", "param_size_bytes"])["value"].median()
    return {
        (operation, size): float(medians[get_benchmark(operation), size_bytes])
        for operation in OPERATIONS
        for size, size_bytes in SIZES.items()
    }


def get_benchmark(operation: str) -> str:
    return f"p2p.{operation}" if operation == "pingpong" else f"collective.{operation}"


def measure_netpipe() -> Times:
    """Return half the round trip of MPI messages over TCP."""
    times = {}
    for size, size_bytes in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            bounds = ["-l", str(size_bytes), "-u", str(size_bytes), "-p", "0", "-o", "out"]
            subprocess.run(
                [*MPIRUN.split(), NETPIPE, *bounds], check=True, capture_output=True, cwd=folder
            )
            columns = re.split(r"\s+", (Path(folder) / "out").read_text().strip())
        times["pingpong", size] = float(columns[2])
    return times


def compare_times(num_rounds: int) -> None:
    measurements: dict[str, Callable[[], Times]] = {
        "bare loop": measure_bare_loop,
        "parbench pipelined": lambda: measure_parbench("pipelined"),
        "parbench blocking": lambda: measure_parbench("blocking"),
    }
    if shutil.which(NETPIPE):
        measurements["NetPIPE"] = measure_netpipe
    rounds: dict[str, list[Times]] = defaultdict(list)
    for _ in range(num_rounds):
        for name, measure in measurements.items():
            rounds[name].append(measure())
    print(f"| operation | size | {' | '.join(rounds)} | pipelined / bare |")
    print("| --- | --- | " + "--- | " * (len(rounds) + 1))
    for key in rounds["bare loop"][0]:
        cells = []
        for entries in rounds.values():
            known = [entry[key] for entry in entries if key in entry]
            cells.append(f"{1e6 * median(known):.1f} us" if known else "-")
        pairs = zip(rounds["parbench pipelined"], rounds["bare loop"], strict=True)
        ratios = sorted(ours[key] / bare[key] for ours, bare in pairs)
        spread = f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(f"| {' | '.join([*key, *cells, spread])} |", flush=True)


def time_commands(num_rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for _ in range(2):
            run_parbench(["run", "--preset", "smoke"], folder)
        base, run = map(str, list_runs(folder / "runs"))
        paths = {"BASE": base, "RUN": run}
        seconds: dict[str, list[float]] = defaultdict(list)
        for _ in range(num_rounds):
            for command in COMMANDS:
                arguments = [paths.get(word, word) for word in command.split()]
                seconds[command].append(run_parbench(arguments, folder))
        startups = []
        for path in list_runs(folder / "runs"):
            run_data = load_run(path)
            *_, last = run_data.info.repetitions
            case_seconds = sum(
                record.seconds
                for record in run_data.records
                if record.repetition == last.repetition
            )
            startups.append(last.seconds - case_seconds)
    print("| command | seconds |\n| --- | --- |")
    for command, values in seconds.items():
        print(f"| `parbench {command}` | {median(values):.2f} |")
    print(f"| start of the ranks, per repetition | {median(startups):.2f} |")
    num_bytes = 0
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                num_bytes += path.stat().st_size
    print(f"Size of the installed packages: {num_bytes / 1e6:.1f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-commands", action="store_true")
    parser.add_argument("--bare-rank", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare_rank:
        rank, folder = options.bare_rank
        run_bare_rank(int(rank), folder)
        return
    print(f"{os.cpu_count()} cores, torch {torch.__version__}, {options.rounds} rounds")
    compare_times(options.rounds)
    if not options.no_commands:
        time_commands(options.rounds)


if __name__ == "__main__":
    main()
