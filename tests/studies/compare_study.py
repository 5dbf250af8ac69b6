"""Simulate comparisons and print how often they detect a change or raise a false alarm.

    python -m tests.studies.compare_study [--trials 100] [--seed 1] [--processes 2]

The first table is about ``parbench ab``, through its public function with simulated measurements:
six series, up to 12 pairs. The machine slows down linearly by the drift over the session, and B is
slower by the effect. It has the share of series that are SLOWER, and the share of sessions that end
with exit code 1. Without an effect, or with one of the threshold of 3 %, both are false alarms. The
nominal rate of sessions is 5 %.

The second table is about ``parbench compare`` of two runs with five repetitions of 30 series: the
share of comparisons that end with exit code 1 if nothing changed, also with an autocorrelation of
repetitions of 0.3, and the share that detects one series of 30 % and all series of 10 % more time.
"""

import argparse
import itertools
import math
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from parbench.bench.results.runs import Run
from parbench.reports.compare.ab import PairedResult, Side, compare_interleaved
from parbench.reports.compare.rule import Rule, SeriesTimes, judge_series
from parbench.reports.compare.verdicts import Verdict
from tests.support.reports.compare_fixtures import run_from_records
from tests.support.reports.reports_fixtures import collective_case, ok_record

DRIFTS = (0.0, 0.05, 0.15, 0.3)
EFFECTS = (0.0, 0.03, 0.06, 0.2)
NOISES = (0.01, 0.05, 0.1)
MAX_PAIRS = 12
CASES = [collective_case(size_bytes=1024 * 4**i) for i in range(6)]
SIDES = (Side(name="a", variables={"X": "1"}), Side(name="b", variables={"X": "2"}))
REPETITIONS = 5
NUM_SERIES = 30


class SimulatedMachine:
    """A machine that slows down during a session, and on which side B is slower by the effect."""

    def __init__(
        self,
        drift: float,
        effect: float,
        noise: float,
        seed: Sequence[int],
    ) -> None:
        self._drift = drift
        self._effect = effect
        self._noise = noise
        self._random = np.random.default_rng(seed)
        self._num_measured = 0

    def measure(self, side: Side, seconds: float) -> Run:
        progress = self._num_measured / (2 * MAX_PAIRS - 1)
        self._num_measured += 1
        factor = 1 + self._drift * progress
        if side.name == "b":
            factor *= 1 + self._effect
        noise = np.exp(self._noise * self._random.normal(size=len(CASES)))
        records = [
            ok_record(case, 0, 1e-3 * factor * float(value))
            for case, value in zip(CASES, noise, strict=True)
        ]
        return run_from_records(records, {"variables": dict(side.variables)})


def simulate_session(
    drift: float, effect: float, noise: float, seed: Sequence[int]
) -> PairedResult:
    machine = SimulatedMachine(drift, effect, noise, seed)
    return compare_interleaved(
        SIDES,
        machine.measure,
        budget_seconds=1e9,
        min_effect=Rule().min_effect,
        max_pairs=MAX_PAIRS,
    )


@dataclass(frozen=True, kw_only=True)
class SessionRates:
    """Shares over simulated sessions, and the mean number of pairs."""

    slower_series: float
    exit_codes: float
    num_pairs: float


def compute_session_rates(
    setting: tuple[float, float, float], *, trials: int, seed: int
) -> SessionRates:
    slower = []
    failures = []
    num_pairs = []
    for trial in range(trials):
        result = simulate_session(*setting, seed=(seed, trial))
        verdicts = [series.verdict for series in result.comparison.series]
        slower.append(verdicts.count(Verdict.SLOWER) / len(verdicts))
        failures.append(result.comparison.get_exit_code() == 1)
        num_pairs.append(result.num_pairs)
    return SessionRates(
        slower_series=float(np.mean(slower)),
        exit_codes=float(np.mean(failures)),
        num_pairs=float(np.mean(num_pairs)),
    )


def print_sessions(executor: ProcessPoolExecutor, trials: int, seed: int) -> None:
    print(
        f"parbench ab: {len(CASES)} series, up to {MAX_PAIRS} pairs, {trials} sessions per row"
    )
    print_row(["drift", "effect", "noise", "SLOWER series", "exit code 1", "pairs"])
    settings = list(itertools.product(DRIFTS, EFFECTS, NOISES))
    compute = partial(compute_session_rates, trials=trials, seed=seed)
    for setting, rates in zip(settings, executor.map(compute, settings), strict=True):
        cells = [f"{value:.0%}" for value in setting]
        cells += [
            f"{rates.slower_series:.1%}",
            f"{rates.exit_codes:.1%}",
            f"{rates.num_pairs:.1f}",
        ]
        print_row(cells)


def print_row(cells: Sequence[str]) -> None:
    print("".join(f"{cell:>15}" for cell in cells), flush=True)


def simulate_times(
    noise: float, shared: float, autocorrelation: float, random: np.random.Generator
) -> NDArray[np.float64]:
    """Return logarithms of times of shape (repetitions of both runs, series)."""
    values = random.normal(size=(2 * REPETITIONS, NUM_SERIES + 1))
    for i in range(1, len(values)):
        independent = math.sqrt(1 - autocorrelation**2) * values[i]
        values[i] = autocorrelation * values[i - 1] + independent
    own = math.sqrt(1 - shared) * values[:, 1:]
    return np.asarray(noise * (own + math.sqrt(shared) * values[:, :1]))


def find_verdicts(logs: NDArray[np.float64]) -> list[str]:
    """Return the verdicts of all series."""
    base, new = np.split(np.exp(logs), 2)
    rule = Rule()
    series = [
        SeriesTimes(
            base=dict(enumerate(base[:, i].tolist())),
            new=dict(enumerate(new[:, i].tolist())),
            min_effect=rule.min_effect,
        )
        for i in range(logs.shape[1])
    ]
    return [judgement.verdict for judgement in judge_series(series, rule)]


def print_comparisons(trials: int, seed: int) -> None:
    print(f"parbench compare: {NUM_SERIES} series, {REPETITIONS} repetitions, {trials} trials")
    print_row(["noise", "shared", "no change", "autocorr. 0.3", "one +30 %", "all +10 %"])
    for noise, shared in itertools.product((0.01, 0.03, 0.1), (0.0, 0.5)):
        random = np.random.default_rng(seed)
        counts = np.zeros(4)
        for _ in range(trials):
            logs = simulate_times(noise, shared, 0.0, random)
            correlated = simulate_times(noise, shared, 0.3, random)
            one_slower = logs.copy()
            one_slower[REPETITIONS:, 0] += math.log(1.3)
            all_slower = logs.copy()
            all_slower[REPETITIONS:] += math.log(1.1)
            counts[0] += "SLOWER" in find_verdicts(logs)
            counts[1] += "SLOWER" in find_verdicts(correlated)
            counts[2] += find_verdicts(one_slower)[0] == "SLOWER"
            counts[3] += "SLOWER" in find_verdicts(all_slower)
        shares = [noise, shared, *(counts / trials)]
        print_row([f"{share:.1%}" for share in shares])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    with ProcessPoolExecutor(options.processes) as executor:
        print_sessions(executor, options.trials, options.seed)
    print()
    print_comparisons(options.trials, options.seed)


if __name__ == "__main__":
    main()
