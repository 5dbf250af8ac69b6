"""How far launches of the same code scatter, one way of measuring against another, in turns.

python tests/studies/launch_scatter.py --side before=/old/bin/python --side after=/new/bin/python [--rounds 10] launches
each side once a round, in another order each time: a Python that has parbench, and NAME=VALUE words after it for its
environment, as --side "after=/new/bin/python OMP_NUM_THREADS=1"; QUANTILE=0.1 is another than the median. It prints for
each case the standard deviation of the logarithms of launches' medians, and over all cases the median ratio of each
side's to the first's, with an interval from rounds drawn again (bootstrap). Options of parbench run come after --. A
script, not a test: it takes rounds x sides x half a minute.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from statistics import median, stdev

import numpy as np

Times = dict[str, list[float]]  # of each case, by round


def launch(words: list[str], options: list[str]) -> dict[str, float]:
    """Return the logarithm of each case's median or other quantile (s) in one launch."""
    python, *variables = words
    given = dict(pair.split("=", 1) for pair in variables)
    part = float(given.pop("QUANTILE", "0.5"))
    with tempfile.TemporaryDirectory() as out:
        command = [python, "-m", "parbench", "run", "--launches", "1", "--json", "--out", out, *options]
        done = subprocess.run(command, env={**os.environ, **given}, capture_output=True, text=True, check=False)
    found = {}
    for line in done.stdout.splitlines():
        record = json.loads(line)
        if record["status"] == "ok":
            case = record["case"]
            name = " ".join([case["name"], *map(str, case["params"].values())])
            found[name] = math.log(np.quantile(record["samples"]["values"], part))
    if not found:
        sys.exit(f"{' '.join(command)} measured nothing:\n{done.stderr}")
    return found


def scatter(times: Times, rounds: np.ndarray) -> dict[str, float]:
    return {case: float(np.std(np.array(values)[rounds], ddof=1)) for case, values in times.items()}


def ratio(one: dict[str, float], other: dict[str, float]) -> float:
    return median(other[case] / one[case] for case in one if one[case] and other[case])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", action="append", required=True, metavar="NAME=PYTHON [VARIABLE=VALUE...]")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("options", nargs="*", help="of parbench run, after --")
    asked = parser.parse_args()
    sides = {name: words.split() for name, words in (side.split("=", 1) for side in asked.side)}
    seen: dict[str, Times] = {name: defaultdict(list) for name in sides}
    order = list(sides)
    for number in range(asked.rounds):
        found = {name: launch(sides[name], asked.options) for name in order}
        shared = set.intersection(*map(set, found.values()))
        for name, logs in found.items():
            for case in shared:
                seen[name][case].append(logs[case])
        order = [*order[1:], order[0]]
        print(f"round {number + 1} of {asked.rounds}: {len(shared)} cases", file=sys.stderr, flush=True)
    whole = {name: {c: v for c, v in times.items() if len(v) == asked.rounds} for name, times in seen.items()}
    print(f"{'sd of launches':52}" + "".join(f"{name:>12}" for name in sides))
    for case in sorted(whole[next(iter(sides))]):
        print(f"{case[:51]:52}" + "".join(f"{stdev(whole[name][case]):12.3f}" for name in sides))
    print(f"{'median':52}" + "".join(f"{median(map(stdev, times.values())):12.3f}" for times in whole.values()))
    first, random = next(iter(sides)), np.random.default_rng(1)
    for name in list(sides)[1:]:
        every = np.arange(asked.rounds)
        draws = []
        for _ in range(1000):
            rounds = random.integers(0, asked.rounds, asked.rounds)
            draws.append(ratio(scatter(whole[first], rounds), scatter(whole[name], rounds)))
        low, high = np.quantile(draws, (0.025, 0.975))
        middle = ratio(scatter(whole[first], every), scatter(whole[name], every))
        print(
            f"{name} over {first}: {middle:.2f} [{low:.2f}, {high:.2f}], median over cases, 95 % by bootstrap of rounds"
        )


if __name__ == "__main__":
    main()
