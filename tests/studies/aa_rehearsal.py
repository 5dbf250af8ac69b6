"""The gate rehearsed with real launches: the same code against itself, then against a slow-down made on purpose.

python tests/studies/aa_rehearsal.py FOLDER [--minutes 10] [--clean 20] [--late 8] launches one all_reduce of three
sizes on two ranks, keeps the runs in FOLDER (a second call goes on with what is there), and prints three tables: 20
A/A comparisons drawn from the clean launches and how many were called slower; 10 comparisons with launches in which
rank 1 comes late, by twice the smallest effect that the gate had printed or more, how many were called slower, and
how far the printed effect is from the one that was made; and four launches a side, which decide nothing. Draws from
one pool overlap: they tell how often this pool deceives, not how often all pools would. A script, not a test.
"""

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

from bench.results.runs import Run, load_run
from bench.results.stats import median
from reports.comparing.compare import Comparison, compare
from reports.comparing.compare_rule import Rule
from reports.comparing.history_select import pool

SIZES = "256K,1M,4M"
WORDS = ("--preset", "smoke", "--only", "collective.all_reduce", "--sizes", SIZES, "--set", "mode=blocking")
FIRST = 12
"""Clean launches before the slow-down is chosen."""
FEWEST = 5
AA_DRAWS, LATE_DRAWS = 20, 10


@dataclass(frozen=True, kw_only=True)
class Pool:
    """The launches of one folder in the order of time."""

    clean: tuple[Run, ...]
    late: tuple[Run, ...]


def launch(folder: Path, inject: str = "") -> None:
    """Measure one launch into a folder."""
    disturbed = ("--inject", inject) if inject else ()
    command = [sys.executable, "-P", "-m", "parbench", "run", *WORDS, "--nproc", "2", "--launches", "1"]
    command += ["--budget", "2m", "--out", str(folder), "--json", *disturbed]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"parbench run ended with {done.returncode}: {done.stderr.strip()}")


def read(folder: Path) -> Pool:
    """Return what a folder has, without launches that left a case out."""

    def runs(name: str) -> tuple[Run, ...]:
        found = [load_run(file.parent) for file in sorted((folder / name).glob("*/run.json"))]
        whole = [run for run in found if run.records and all(record.status == "ok" for record in run.records)]
        return tuple(sorted(whole, key=lambda run: run.info.started))

    return Pool(clean=runs("clean"), late=runs("late"))


def fill(folder: Path, clean: int, late: int, end: float) -> None:
    """Launch until both pools are full or the time is over: clean ones first, then both in turns (ABBA)."""
    while time.monotonic() < end:
        found = read(folder)
        if len(found.clean) >= clean and len(found.late) >= late:
            return
        pairs = len(found.late)
        behind = len(found.clean) - FIRST < pairs + (pairs % 2 == 1)
        if len(found.late) >= late or (behind and len(found.clean) < clean):
            launch(folder / "clean")
        else:
            launch(folder / "late", f"late:1:{1e3 * chosen(folder, found):.3f}ms")


def chosen(folder: Path, found: Pool) -> float:
    """Return by how many seconds to be late: twice the gate's smallest detectable effect of each size, or more.

    It is that of the first clean launches, dealt to two sides.
    """
    kept = folder / "late-seconds"
    if not kept.exists():
        series = compared(*turns(found.clean[:FIRST])).series
        needed = [2 * (one.effect.detectable or 0.0) * median(one.base_seconds) for one in series if one.effect]
        kept.write_text(f"{max(needed):.6f}")
    return float(kept.read_text())


def turns(runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """Deal runs to two sides as ABBA."""
    sides: tuple[list[Run], list[Run]] = ([], [])
    for i, run in enumerate(runs):
        sides[i % 4 in (1, 2)].append(run)
    return sides


def compared(base: Sequence[Run], new: Sequence[Run]) -> Comparison:
    """Compare two sides under the gate's own rule."""
    return compare(pool(base, "BASE"), pool(new, "NEW"), Rule())


def largest_detectable(found: Comparison) -> float:
    """Return the largest of the series' smallest detectable effects."""
    return max(one.effect.detectable or 0.0 for one in found.series if one.effect)


def draw(runs: Sequence[Run], count: int, rng: random.Random) -> list[Run]:
    """Return some of the runs, in their order."""
    return [runs[i] for i in sorted(rng.sample(range(len(runs)), count))]


def slower(found: Comparison) -> int:
    """Count the series that are called slower."""
    return sum(one.word == "SLOWER" for one in found.series)


def print_aa(found: Pool, rng: random.Random) -> None:
    """Print the A/A comparisons: none should be slower."""
    side = min(8, len(found.clean) // 2)
    drawn = [compared(*turns(draw(found.clean, 2 * side, rng))) for _ in range(AA_DRAWS)]
    words = [one.word for each in drawn for one in each.series]
    counts = ", ".join(f"{words.count(word)} {word}" for word in sorted(set(words)))
    false = sum(slower(each) > 0 for each in drawn)
    print(f"A/A, {side} launches a side: {false} of {AA_DRAWS} comparisons called a series SLOWER ({counts})")
    print(
        f"  detectable: {100 * median([largest_detectable(each) for each in drawn]):.0f} % (median of the comparisons)"
    )


def print_late(folder: Path, found: Pool, rng: random.Random) -> None:
    """Print the comparisons with a delay that was made: all should be slower, by what was made."""
    side, seconds = min(8, len(found.late), len(found.clean) - FIRST), chosen(folder, found)
    drawn = [compared(draw(found.clean[FIRST:], side, rng), draw(found.late, side, rng)) for _ in range(LATE_DRAWS)]
    print(f"late:1:{1e3 * seconds:.3f}ms, {side} launches a side:")
    print(f"  {'size':>8}  {'SLOWER':>8}  {'made':>8}  {'printed':>8}  {'error':>6}  {'made lies in the interval':>25}")
    for i, one in enumerate(drawn[0].series):
        series = [each.series[i] for each in drawn]
        known = [(each.effect, seconds / geometric_mean(each.base_seconds)) for each in series if each.effect]
        made, printed = median([made for _, made in known]), median([effect.change for effect, _ in known])
        error = median([(1 + effect.change) / (1 + made) - 1 for effect, made in known])
        inside = sum((effect.low or 0.0) <= made <= (effect.high or 0.0) for effect, made in known)
        called = sum(each.word == "SLOWER" for each in series)
        print(
            f"  {one.case.params['size_bytes']:>8}  {called:>5}/{LATE_DRAWS}  {100 * made:>+7.0f}%"
            f"  {100 * printed:>+7.0f}%  {100 * error:>+5.0f}%  {inside:>22}/{LATE_DRAWS}"
        )
    print(f"  {sum(slower(each) > 0 for each in drawn)} of {LATE_DRAWS} comparisons called a series SLOWER")


def print_few(found: Pool) -> None:
    """Print what four launches a side are called."""
    few = compared(found.clean[: FEWEST - 1], found.clean[FEWEST - 1 : 2 * (FEWEST - 1)])
    print(f"{FEWEST - 1} launches a side: {', '.join(sorted({one.word for one in few.series}))}")


def main() -> None:
    """Fill the pools and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clean", type=int, default=20)
    parser.add_argument("--late", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    fill(given.folder, given.clean, given.late, time.monotonic() + 60 * given.minutes)
    found, rng = read(given.folder), random.Random(given.seed)
    load = os.getloadavg()[0]
    print(f"{len(found.clean)} clean and {len(found.late)} late launches; load {load:.1f} on {os.cpu_count()} cores")
    if len(found.clean) < 2 * FEWEST:
        sys.exit(f"{2 * FEWEST} clean launches are needed: call again, they go on")
    print_aa(found, rng)
    if min(len(found.late), len(found.clean) - FIRST) >= FEWEST:
        print_late(given.folder, found, rng)
    print_few(found)


if __name__ == "__main__":
    main()
