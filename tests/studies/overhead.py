"""What the measured loop costs: ours and a bare ``torch.distributed`` loop, alternated in the same processes.

python -m tests.studies.overhead [--rounds 60] prints, for each size, the median time of both and their ratio; the
bare loop writes its data anew before each barrier as ours does, or never (a large buffer is then still where the last
operation left it in the caches). A script, not a test: ratios on a busy machine scatter.
"""

import argparse
import time

import torch
import torch.distributed as dist

from parbench.bench.operations.collectives import all_reduce
from parbench.bench.operations.operation import Operation
from parbench.bench.plan.plan import Measure
from parbench.bench.rank.timing import DURATION, Progress, Timing, gather_stamps, sampler
from parbench.bench.results.stats import median
from parbench.bench.text import format_size
from parbench.bench.world.world import World
from tests.studies.on_two_ranks import on_two_ranks

SIZES = {1 << 10: 40, 64 << 10: 40, 1 << 20: 15, 16 << 20: 3, 64 << 20: 1}
LOOPS = ("ours", "fresh", "stale")


def bare(buffer: torch.Tensor, count: int, world: World, *, fresh: bool) -> torch.Tensor:
    """Return the ns of each of ``count`` bare all_reduces, each from a barrier, on ``fresh`` data or its own sums."""
    times = []
    for _ in range(count):
        if fresh:
            buffer.fill_(1)
        dist.barrier(group=world.control)
        start = time.perf_counter_ns()
        dist.all_reduce(buffer)
        times.append(time.perf_counter_ns() - start)
    return torch.tensor(times)


def measured(benchmark: Operation, count: int, world: World) -> list[float]:
    """Return the ns of each of ``count`` steps by parbench's loop, on rank 0."""
    ranks = range(world.size)
    timing = Timing(benchmark, world, Progress(), Measure(), ranks)
    stamps = gather_stamps(
        timing.take(sampler("blocking", benchmark, world, 1), count), world, ranks
    )
    return [] if stamps is None else stamps[DURATION].max(axis=0).tolist()


def slowest(times: torch.Tensor, world: World) -> list[float]:
    dist.all_reduce(times, op=dist.ReduceOp.MAX, group=world.control)
    return [float(time_ns) for time_ns in times]


def compare(world: World, size_bytes: int, count: int, rounds: int) -> None:
    """Print the median times, and the median over rounds of ABCCBA, BCAACB, CABBAC of the ratios to both bare loops."""
    benchmark = all_reduce(world, size_bytes=size_bytes, dtype="float32")
    buffer = torch.ones(size_bytes // 4)
    rows: list[tuple[float, float, float]] = []
    for number in range(rounds + 1):
        seen: dict[str, list[float]] = {"ours": [], "fresh": [], "stale": []}
        turned = LOOPS[number % 3 :] + LOOPS[: number % 3]
        for which in (*turned, *reversed(turned)):
            if which == "ours":
                seen[which] += measured(benchmark, count, world)
            else:
                seen[which] += slowest(
                    bare(buffer.fill_(1), count, world, fresh=which == "fresh"), world
                )
        if number and world.rank == 0:  # the first round warms up
            ours, fresh, stale = (median(times) / 1e3 for times in seen.values())
            rows.append((ours, fresh, stale))
    if world.rank == 0:
        ours, fresh, stale = (median(column) for column in zip(*rows, strict=True))
        to_fresh, to_stale = (
            median([a / b for a, b, _ in rows]),
            median([a / c for a, _, c in rows]),
        )
        print(
            f"{format_size(size_bytes):>6}  parbench {ours:9.1f} us   bare {fresh:9.1f} us, median ratio {to_fresh:.3f}"
            f"   bare, data never written again {stale:9.1f} us, median ratio {to_stale:.3f}",
            flush=True,
        )


def measure(world: World, options: argparse.Namespace) -> None:
    for size_bytes, count in SIZES.items():
        compare(world, size_bytes, count, options.rounds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    on_two_ranks(parser, measure)
