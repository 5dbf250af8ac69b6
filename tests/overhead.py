"""What the measured loop costs: ours and a bare ``torch.distributed`` loop, alternated in the same processes.

python tests/overhead.py [--rounds 30] prints, for each size, the median time of both and their ratio. A script, not a
test: ratios on a busy machine scatter.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from bench.collectives import all_reduce
from bench.gang import loopback_interface
from bench.modes import sampler
from bench.operation import Operation
from bench.plan import Measure
from bench.progress import Progress
from bench.stats import median
from bench.timing import DURATION, Timing, gather_stamps, take_samples
from bench.units import format_size
from bench.world import World, open_world

SIZES = {1 << 10: 100, 64 << 10: 50, 1 << 20: 20, 16 << 20: 5, 64 << 20: 3}


def bare(buffer: torch.Tensor, count: int, world: World) -> torch.Tensor:
    """Return the ns of each of ``count`` bare all_reduces, each from a barrier."""
    times = []
    for _ in range(count):
        dist.barrier(group=world.control)
        start = time.perf_counter_ns()
        dist.all_reduce(buffer)
        times.append(time.perf_counter_ns() - start)
    return torch.tensor(times)


def measured(subject: Operation, count: int, world: World) -> list[float]:
    """Return the ns of each of ``count`` steps by parbench's loop, on rank 0."""
    timing = Timing(measure=Measure(), ranks=range(world.size), budget_seconds=0.0)
    sample = sampler("blocking", subject, world, 1)
    stamps = gather_stamps(take_samples(subject, sample, world, timing, count, Progress()), world, timing.ranks)
    return [] if stamps is None else stamps[DURATION].max(axis=0).tolist()


def slowest(times: torch.Tensor, world: World) -> list[float]:
    """Return the maximum over ranks of each iteration."""
    dist.all_reduce(times, op=dist.ReduceOp.MAX, group=world.control)
    return [float(time_ns) for time_ns in times]


def compare(world: World, size_bytes: int, count: int, rounds: int) -> None:
    """Print the median time of both loops, and the median over rounds of ABBA of their ratio."""
    subject = all_reduce(world, size_bytes=size_bytes, dtype="float32")
    buffer = torch.ones(size_bytes // 4)
    pairs: list[tuple[float, float]] = []
    for number in range(rounds + 1):
        ours, theirs = [], []
        for is_ours in (True, False, False, True):
            if is_ours:
                ours += measured(subject, count, world)
            else:
                theirs += slowest(bare(buffer.fill_(1), count, world), world)
        if number and world.rank == 0:  # the first round warms up
            pairs.append((median(ours), median(theirs)))
    if world.rank == 0:
        a, b, ratio = (median(column) for column in zip(*((x, y, x / y) for x, y in pairs), strict=True))
        shown = f"parbench {a / 1e3:10.1f} us   bare {b / 1e3:10.1f} us   median ratio {ratio:.3f}"
        print(f"{format_size(size_bytes):>6}  {shown}", flush=True)


def main() -> None:
    """Start two ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.rank:
        command = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
        words = [str(Path(__file__)), "--rank", "--rounds", str(options.rounds)]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback_interface() or ""}
        sys.exit(subprocess.run([sys.executable, *command, *words], env=variables, check=False).returncode)
    with open_world("gloo", "cpu", seed=0, timeout_seconds=600) as world:
        for size_bytes, count in SIZES.items():
            compare(world, size_bytes, count, options.rounds)


if __name__ == "__main__":
    main()
