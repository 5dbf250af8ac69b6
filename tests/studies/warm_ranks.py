"""Whether launches whose ranks are forked from one process scatter less than those of fresh processes, in turns.

python tests/studies/warm_ranks.py [--turns 4] [--launches 6] [--seconds 7] runs parbench with forked ranks and with
ranks that start Python anew (PARBENCH_FRESH_RANKS), turn by turn, the budget of the latter longer by what they take to
start. It prints for each case the standard deviation of the logarithms of a run's launch medians, over all cases the
median ratio of forked to fresh with an interval from turns drawn again (bootstrap), and the ratio of start-up times.
Independent launches have a ratio of 1; what forked ones share would make it smaller. A script, not a test: it takes
eight minutes.
"""

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import fmean, median, variance

import numpy as np

from parbench.bench.rank.fork_server import FRESH_VARIABLE
from parbench.bench.results.runs import Run, load_run

SIDES = ("fresh", "forked")
ONLY = ("all_reduce", "all_gather", "broadcast", "sendrecv", "memory.*", "compute.*")
Variances = dict[str, float]  # of each case, between the launches of one run


def measure(side: str, launches: int, budget_seconds: float) -> Run:
    environ = {name: value for name, value in os.environ.items() if name != FRESH_VARIABLE}
    environ |= {FRESH_VARIABLE: "1"} if side == "fresh" else {}
    words = [word for name in ONLY for word in ("--only", name)]
    words += ["--preset", "smoke", "--launches", str(launches), "--budget", f"{budget_seconds:.0f}s", "--json"]
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "parbench", "run", "--out", out, *words]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        found = [load_run(path.parent) for path in Path(out).glob("*/run.json")]
    if not found or {record.status for record in found[0].records} - {"ok", "skipped"}:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    if len(found[0].info.launches) < 2:
        sys.exit(f"{budget_seconds:.0f} s held one launch: this machine is too busy, or --seconds too short")
    return found[0]


def started(run: Run) -> list[float]:
    """Return each launch's time (s) beside its measurements; the first has a process to make, too."""
    spent = defaultdict[int, float](float)
    for record in run.records:
        spent[record.launch] += record.seconds
    return [one.seconds - spent[one.launch] for one in run.info.launches]


def variances(run: Run) -> Variances:
    logs = defaultdict[str, list[float]](list)
    for record in run.records:
        if record.status == "ok":
            logs[record.case.label].append(math.log(median(record.samples.values)))
    return {case: variance(values) for case, values in logs.items() if len(values) > 1}


def scatter(turns: list[Variances], drawn: np.ndarray) -> Variances:
    """Return each case's standard deviation, pooled over the turns that are drawn."""
    cases = set.intersection(*map(set, turns))
    return {case: math.sqrt(fmean(turns[turn][case] for turn in drawn)) for case in sorted(cases)}


def ratio(fresh: Variances, forked: Variances) -> float:
    return median(forked[case] / fresh[case] for case in fresh.keys() & forked.keys() if fresh[case])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--launches", type=int, default=6, help="in each turn of a side")
    parser.add_argument("--seconds", type=float, default=7.0, help="that a launch measures")
    asked = parser.parse_args()
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import parbench.bench.rank.worker"], check=True)
    importing = time.monotonic() - began
    start = {"fresh": (importing, importing), "forked": (importing, 0.0)}  # of the first launch and of the next
    seen: dict[str, list[Variances]] = {side: [] for side in SIDES}
    starts: dict[str, list[float]] = {side: [] for side in SIDES}
    measured: dict[str, list[float]] = {side: [] for side in SIDES}
    for turn in range(asked.turns):
        for side in SIDES if turn % 2 == 0 else SIDES[::-1]:
            first, later = start[side]
            run = measure(side, asked.launches, first + (asked.launches - 1) * later + asked.launches * asked.seconds)
            seen[side].append(variances(run))
            took = started(run)
            starts[side] += took[1:]
            start[side] = took[0], fmean(took[1:])
            measured[side].append(sum(record.seconds for record in run.records) / asked.launches)
            print(f"turn {turn + 1} of {asked.turns}, {side}: {len(seen[side][-1])} cases", file=sys.stderr, flush=True)
    every = np.arange(asked.turns)
    whole = {side: scatter(turns, every) for side, turns in seen.items()}
    print(f"{'sd of launches':52}" + "".join(f"{side:>10}" for side in SIDES))
    for case in sorted(whole["fresh"].keys() & whole["forked"].keys()):
        print(f"{case[:51]:52}" + "".join(f"{whole[side][case]:10.4f}" for side in SIDES))
    random, draws = np.random.default_rng(1), []
    for _ in range(2000):
        fresh, forked = (scatter(seen[side], random.integers(0, asked.turns, asked.turns)) for side in SIDES)
        draws.append(ratio(fresh, forked))
    low, high = np.quantile(draws, (0.025, 0.975))
    middle = ratio(whole["fresh"], whole["forked"])
    print(f"scatter, forked over fresh: {middle:.2f} [{low:.2f}, {high:.2f}], median over cases, 95 % by bootstrap")
    print("forked launches scatter less" if high < 1 else "forked launches do not scatter less")
    told = {side: f"{median(starts[side]):.2f} s" for side in SIDES}
    share = median(starts["forked"]) / median(starts["fresh"])
    print(f"start-up of a launch after the first: {told}, forked over fresh {share:.2f}")
    print("measured a launch:", {side: f"{fmean(measured[side]):.1f} s" for side in SIDES})


if __name__ == "__main__":
    main()
