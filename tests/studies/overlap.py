"""Measure how much communication a step hides: DDP and FSDP2 with simulated compute.

    python -m tests.studies.overlap [--rounds 7]

Two ranks take steps whose forward and backward are waits, three times as long as the
communication of the step without compute. A step that hides all communication takes as long as
its compute, so the script prints the ratio of both, the median of interleaved rounds. A loop
written by hand shows what is reachable with the buckets of DDP.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from parbench.bench.machine.environment import find_interface
from parbench.bench.results.stats import median
from parbench.bench.world.torch_compat import all_gather_single, reduce_scatter_single
from parbench.bench.world.world import World, open_world
from parbench.workloads.probes.sent_bytes import SentCall, record_calls
from parbench.workloads.step.train_step import TrainStep
from tests.support.workloads.training_steps import build_small_step

NUM_COMMUNICATION_ROUNDS = 7
NUM_WARMUP_STEPS = 3
MANUAL_LOOP = "manual loop with DDP's buckets"
MODEL = {
    "shape": "small",
    "layers": 4,
    "hidden": 768,
    "heads": 8,
    "sequence": 16,
    "vocabulary": 64,
    "microbatch": 1,
}
STEPS: dict[str, tuple[str, dict[str, object]]] = {
    "ddp, buckets of 2 MiB": ("ddp", {"bucket_mb": 2.0}),
    "ddp, one bucket": ("ddp", {"bucket_mb": 1000.0}),
    "fsdp, torch's defaults": ("fsdp", {}),
    "fsdp, explicit prefetch": ("fsdp", {"prefetch": "explicit"}),
}
# Freed memory is kept. Otherwise every large buffer is paged in again, which takes as long as
# sending it.
ALLOCATOR_SETTINGS = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}


def build_step(name: str, world: World, seconds: float) -> TrainStep:
    workload, params = STEPS[name]
    compute = f"simulated:{1e3 * seconds:.3f}ms"
    return build_small_step(world, workload, {**MODEL, **params, "compute": compute})


def replay_calls(calls: Sequence[SentCall], world: World) -> None:
    """Communicate like a step, without compute."""
    for call in calls:
        full = torch.ones(call.num_bytes // 4)
        shard = full[: len(full) // call.ranks]
        if call.op == "all_reduce":
            dist.all_reduce(full, group=world.group)
        elif call.op == "all_gather":
            all_gather_single(torch.empty_like(full), shard, world.group)
        else:
            assert call.op == "reduce_scatter", call.op
            reduce_scatter_single(torch.empty_like(shard), full, world.group)


def run_manual_loop(calls: Sequence[SentCall], seconds: float, world: World) -> None:
    """Wait as long as a step computes, and start each bucket when its share of backward is done."""
    time.sleep(seconds)
    works = []
    for call in calls:
        time.sleep(2 * seconds / len(calls))
        bucket = torch.empty(call.num_bytes // 4)
        works.append(dist.all_reduce(bucket, group=world.group, async_op=True))
    for work in works:
        assert work is not None
        work.wait()


def measure_seconds(step: Callable[[], object], world: World) -> float:
    """Return the seconds of the slowest rank."""
    world.barrier()
    start = time.perf_counter()
    step()
    return max(world.gather(time.perf_counter() - start))


def measure_communication(name: str, world: World) -> tuple[tuple[SentCall, ...], float]:
    """Return the calls of a step, and the seconds that they take without compute."""
    step = build_step(name, world, 1e-3)
    for _ in range(NUM_WARMUP_STEPS):
        step.step()
    calls = record_calls(step.step, step.mesh.groups)
    rounds = [
        measure_seconds(lambda: replay_calls(calls, world), world)
        for _ in range(NUM_COMMUNICATION_ROUNDS)
    ]
    step.close()
    seconds = world.broadcast_from_rank_0([median(rounds)])[0]
    return calls, seconds


def compare_steps(world: World, num_rounds: int) -> None:
    """Print the time of every step relative to its compute."""
    communication = {name: measure_communication(name, world) for name in STEPS}
    ddp_calls, ddp_seconds = next(iter(communication.values()))
    steps: dict[str, Callable[[], object]] = {
        MANUAL_LOOP: lambda: run_manual_loop(ddp_calls, ddp_seconds, world)
    }
    compute_seconds = {MANUAL_LOOP: 3 * ddp_seconds}
    for name, (_, seconds) in communication.items():
        steps[name] = build_step(name, world, seconds).step
        compute_seconds[name] = 3 * seconds
    rounds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(num_rounds):
        for name, step in steps.items():
            rounds[name].append(measure_seconds(step, world))
    if world.rank != 0:
        return
    for name, values in rounds.items():
        step_ms = 1e3 * median(values)
        compute_ms = 1e3 * compute_seconds[name]
        print(
            f"{name:32} step {step_ms:6.1f} ms  compute {compute_ms:6.1f} ms  "
            f"ratio {step_ms / compute_ms:.3f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        with open_world("gloo", "cpu", seed=0, timeout_seconds=600) as world:
            compare_steps(world, options.rounds)
        return
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    module = ["-m", "tests.studies.overlap", "--rank", "--rounds", str(options.rounds)]
    variables = {
        **ALLOCATOR_SETTINGS,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": find_interface("127.0.0.1") or "",
    }
    completed = subprocess.run(
        [*torchrun, *module], env={**variables, **os.environ}, check=False
    )
    sys.exit(completed.returncode)


if __name__ == "__main__":
    main()
