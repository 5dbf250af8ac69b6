"""How much communication a step hides: DDP and FSDP2 with timed compute, beside a loop written by hand.

python -m tests.studies.overlap [--rounds 7] takes steps on two ranks whose forward and backward are waits, three
times as long as the step's communication alone (its own calls, one after another). For each it prints the step over
the longer of compute and communication, the median of rounds in turns. A script, not a test: a busy machine scatters.
"""

import argparse
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from parbench.bench.results.stats import median
from parbench.bench.world.torch_compat import all_gather_single, reduce_scatter_single
from parbench.bench.world.world import World
from parbench.workloads.step.sent_bytes import SentCall, counted
from parbench.workloads.step.training_step import TrainingStep
from tests.studies.on_two_ranks import on_two_ranks
from tests.support.training_steps import build_small_step

MODEL = {
    "shape": "small",
    "layers": 4,
    "hidden": 768,
    "heads": 8,
    "sequence": 16,
    "vocabulary": 64,
    "microbatch": 1,
}
# freed memory is kept: else every large buffer is paged in anew, which takes as long as to send it
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
STEPS: dict[str, tuple[str, dict[str, object]]] = {
    "ddp, buckets of 2 MiB": ("ddp", {"bucket_mb": 2.0}),
    "ddp, one bucket": ("ddp", {"bucket_mb": 1000.0}),
    "fsdp, torch's defaults": ("fsdp", {}),
    "fsdp, explicit prefetch": ("fsdp", {"prefetch": "explicit"}),
}


def make(name: str, world: World, seconds: float) -> TrainingStep:
    workload, params = STEPS[name]
    return build_small_step(
        world, workload, {**MODEL, **params, "compute": f"timed:{1e3 * seconds:.3f}ms"}
    )


def replay(calls: Sequence[SentCall], world: World) -> None:
    for call in calls:
        whole = torch.ones(call.num_bytes // 4)
        part = whole[: len(whole) // call.ranks]
        if call.op == "all_reduce":
            dist.all_reduce(whole, group=world.group)
        elif call.op == "all_gather":
            all_gather_single(torch.empty_like(whole), part, world.group)
        else:
            assert call.op == "reduce_scatter", call.op
            reduce_scatter_single(torch.empty_like(part), whole, world.group)


def ideal(calls: Sequence[SentCall], seconds: float, world: World) -> None:
    """Wait as long as a step computes; issue each call of DDP's when its share of backward is done."""
    time.sleep(seconds)
    works = []
    for call in calls:
        time.sleep(2 * seconds / len(calls))
        works.append(
            dist.all_reduce(torch.empty(call.num_bytes // 4), group=world.group, async_op=True)
        )
    for work in works:
        assert work is not None
        work.wait()


def timed(step: Callable[[], object], world: World) -> float:
    world.barrier()
    began = time.perf_counter()
    step()
    return max(world.gather(time.perf_counter() - began))


def alone(name: str, world: World) -> tuple[tuple[SentCall, ...], float]:
    """Return the calls of a step, and how long they take by themselves."""
    benchmark = make(name, world, 1e-3)
    for _ in range(3):  # DDP rearranges its buckets, once, after the first
        benchmark.step()
    calls = counted(benchmark.step, benchmark.layout.axes)
    seconds = median([timed(lambda: replay(calls, world), world) for _ in range(7)])
    benchmark.close()
    return calls, seconds


def compare(world: World, rounds: int) -> None:
    """Print every step's time over the longer of its compute and its communication."""
    communication = {name: alone(name, world) for name in STEPS}
    waits = {name: world.decide([seconds])[0] for name, (_, seconds) in communication.items()}
    benchmarks = {name: make(name, world, seconds) for name, seconds in waits.items()}
    first = next(iter(STEPS))
    steps: dict[str, Callable[[], object]] = {
        name: benchmark.step for name, benchmark in benchmarks.items()
    }
    steps = {
        "by hand, ddp's buckets": lambda: ideal(communication[first][0], waits[first], world),
        **steps,
    }
    waits["by hand, ddp's buckets"] = waits[first]
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            found[name].append(timed(step, world))
    for name, seconds in found.items():
        compute = 3 * waits[name]
        if world.rank == 0:
            ratio = median(seconds) / compute
            print(
                f"{name:26} step {1e3 * median(seconds):6.1f} ms  compute {1e3 * compute:6.1f} ms  "
                f"communication alone {1e3 * waits[name]:6.1f} ms  step / longer {ratio:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    on_two_ranks(parser, lambda world, options: compare(world, options.rounds), MALLOC)
