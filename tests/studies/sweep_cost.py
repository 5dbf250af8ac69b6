"""What a sweep costs when each row stops once it is known, beside the same count of iterations for every row.

python tests/studies/sweep_cost.py [--precision 0.05] measures all_reduce at 20 sizes on two ranks: by parbench's
rule, then with fixed counts, doubled until every row that parbench knew is known as well, then by parbench's rule
again. It prints every row's interval with the reason it stopped, and the wall times. A script, not a test: a busy
machine scatters.
"""

import argparse
import time
from dataclasses import dataclass

from on_two_ranks import on_two_ranks

from bench.operations.collectives import all_reduce
from bench.plan.plan import Measure
from bench.rank.timing import Progress, Timing, width_in_one_go
from bench.text import format_size
from bench.world.world import World

SIZES = [128 << i for i in range(20)]
FIRST_COUNT = 20
BUDGET_SECONDS = 20.0
_GIVE_UP = 3


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one row showed: iterations, the interval's half-width relative to the median, and why it stopped."""

    count: int
    width: float
    stop: str


@dataclass(frozen=True, kw_only=True)
class Sweep:
    rows: dict[int, Seen]
    seconds: float


def sweep(world: World, measure: Measure) -> Sweep | None:
    began, rows = time.perf_counter(), dict[int, Seen]()
    for size_bytes in SIZES:
        subject = all_reduce(world, size_bytes=size_bytes, dtype="float32")
        timed = Timing(subject, world, Progress(), measure, range(world.size)).run(BUDGET_SECONDS)
        if timed is not None:
            seconds = timed.samples()["seconds"]
            width = width_in_one_go(seconds)
            assert width is not None
            rows[size_bytes] = Seen(count=len(seconds), width=width, stop=timed.stop)
    return Sweep(rows=rows, seconds=time.perf_counter() - began) if rows else None


def fixed(count: int) -> Measure:
    return Measure(min_iterations=count, max_iterations=count, precision=0.0)


def compare(world: World, precision: float) -> None:
    adaptive = Measure(precision=precision, max_iterations=5000)
    first = sweep(world, adaptive)
    known = [] if first is None else [size for size, row in first.rows.items() if row.width <= precision]
    if first is not None:
        show(first, precision)
    count, enough = FIRST_COUNT, False
    while not enough:
        found = sweep(world, fixed(count))
        if found is not None and first is not None:
            unknown = [size for size in known if found.rows[size].width > precision]
            print(
                f"{count:5} iterations each: {found.seconds:6.1f} s, {len(unknown)} of {len(known)} not known",
                flush=True,
            )
            # when it costs this much and does not suffice, what suffices costs more
            code = float(not unknown or found.seconds > 2 * _GIVE_UP * first.seconds)
        enough = bool(world.decide([code if found is not None else 0.0])[0])
        count *= 2
    again = sweep(world, adaptive)
    if found is not None and first is not None and again is not None:
        share = (first.seconds + again.seconds) / 2 / found.seconds
        print(f"parbench {first.seconds:.1f} s and again {again.seconds:.1f} s: {share:.2f} of the last count's time")


def show(found: Sweep, precision: float) -> None:
    for size_bytes, row in found.rows.items():
        print(f"{format_size(size_bytes):>6} {row.count:5} iterations  +-{row.width:5.1%}  stopped: {row.stop}")
    reached = sum(row.width <= precision for row in found.rows.values())
    print(
        f"by parbench's rule: {found.seconds:.1f} s, {reached} of {len(found.rows)} within {precision:.0%}", flush=True
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", type=float, default=0.05)
    on_two_ranks(parser, lambda world, options: compare(world, options.precision))
