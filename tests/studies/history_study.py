"""Simulate histories and print false alarms and detections of ``parbench history check``.

    python -m tests.studies.history_study [--trials 20] [--seed 1] [--only TEXT]

A history has 40 series over 31 runs of each host class. The first table has the share of checks,
from the ninth run on, in which any series or their median has a verdict although nothing changed.
PR is SLOWER for a run that is compared with the history and not part of it.

The second table has the share of steps that are detected: the series is SLOWER in the fifth run
after the step, if the step is in all series or in one of 40, and PR is SLOWER for the first run
after the step. ``tests/reports/history/test_levels.py`` tests a small part.
"""

import argparse
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import Pool

import numpy as np
from numpy.typing import NDArray

from parbench.reports.history.changes import LevelChange, judge_histories
from parbench.reports.history.check import MAX_RUNS, judge_median

NUM_RUNS = 31
FIRST_CHECKED_RUN = 9
STEP_RUN = 25
RUNS_AFTER_STEP = 5
SPIKE_LOG = math.log(1.3)
VERDICTS = ("SLOWER", "FASTER", "DRIFT", "UNDECIDED", "PR")
MIN_EFFECT = 0.03
SLOWER, PR = 0, 4
VERDICT_BY_KIND = {"step": "SLOWER", "drift": "DRIFT", "rise": "UNDECIDED"}
STEPS = (0.03, 0.05, 0.1, 0.2)


@dataclass(frozen=True, kw_only=True)
class Model:
    """The variation of times from run to run, as fractions of a time."""

    cv: float  # standard deviation relative to the mean
    shared: float = 0.0  # share of the variance that all series have in common
    rho: float = 0.0  # correlation of consecutive runs
    spikes: float = 0.0  # share of times that are 30 % longer
    drift: float = 0.0  # growth per run
    missing: float = 0.0  # share of nights without a run
    num_host_classes: int = 1  # the class of a night is random, and each has its own series
    step: float = 0.0  # change at STEP_RUN
    num_changed: int = 40  # series with the step
    num_series: int = 40


UNCHANGED = {
    "independent 1 %": Model(cv=0.01),
    "independent 3 %": Model(cv=0.03),
    "independent 10 %": Model(cv=0.1),
    "spikes of 30 % in 10 %, 3 %": Model(cv=0.03, spikes=0.1),
    "half of it shared, 5 %": Model(cv=0.05, shared=0.5),
    "autocorrelation 0.6, 3 %": Model(cv=0.03, rho=0.6),
    "autocorrelation 0.6, 10 %": Model(cv=0.1, rho=0.6),
    "two host classes, 3 %": Model(cv=0.03, num_host_classes=2),
    "a fifth of nights missing, 3 %": Model(cv=0.03, missing=0.2),
    "drift of 3 % a month, 1 %": Model(cv=0.01, drift=0.001),
    "drift of 3 % a month, 3 %": Model(cv=0.03, drift=0.001),
    "drift of 9 % a month, 1 %": Model(cv=0.01, drift=0.003),
    "drift of 9 % a month, 3 %": Model(cv=0.03, drift=0.003),
}
CHANGED = {
    "independent, 1 %": Model(cv=0.01),
    "independent, 2 %": Model(cv=0.02),
    "independent, 5 %": Model(cv=0.05),
    "autocorrelation 0.6, 2 %": Model(cv=0.02, rho=0.6),
    "two host classes, 2 %": Model(cv=0.02, num_host_classes=2),
    "a fifth of nights missing, 2 %": Model(cv=0.02, missing=0.2),
    "drift of 3 % a month, 2 %": Model(cv=0.02, drift=0.001),
}


def simulate(model: Model, random: np.random.Generator) -> NDArray[np.float64]:
    """Return the logarithms of the times of one host class, of shape (series, runs)."""
    num_nights = math.ceil(NUM_RUNS * model.num_host_classes / (1 - model.missing)) + 20
    noise = random.normal(size=(model.num_series + 1, num_nights))
    for night in range(1, num_nights):
        noise[:, night] *= math.sqrt(1 - model.rho**2)
        noise[:, night] += model.rho * noise[:, night - 1]
    shared_noise = math.sqrt(model.shared) * noise[0]
    logs = model.cv * (math.sqrt(1 - model.shared) * noise[1:] + shared_noise)
    logs += (random.random(logs.shape) < model.spikes) * SPIKE_LOG
    logs += math.log1p(model.drift) * np.arange(num_nights)
    is_measured = random.random(num_nights) >= model.missing
    is_first_class = random.integers(model.num_host_classes, size=num_nights) == 0
    logs = logs[:, is_measured & is_first_class][:, :NUM_RUNS]
    logs[: model.num_changed, STEP_RUN:] += math.log1p(model.step)
    return np.asarray(logs)


def find_verdict(change: LevelChange) -> str:
    """Return the verdict on a significant change."""
    return "FASTER" if change.change < 0 else VERDICT_BY_KIND[change.kind]


def find_verdicts(model: Model, seed: Sequence[int], runs: Iterable[int]) -> list[list[bool]]:
    """Return for each run which of the verdicts any series has."""
    logs = simulate(model, np.random.default_rng(seed))
    min_effects = [MIN_EFFECT] * model.num_series
    rows = []
    for run in runs:
        window = logs[:, max(0, run - MAX_RUNS) : run]
        changes = [
            *judge_histories(list(window), min_effects),
            judge_median(window, MIN_EFFECT),
        ]
        verdicts = set(map(find_verdict, filter(None, changes)))
        candidates = judge_histories(list(window), min_effects, newest_is_candidate=True)
        if any(candidates) or judge_median(window, MIN_EFFECT, newest_is_candidate=True):
            verdicts.add("PR")
        rows.append([verdict in verdicts for verdict in VERDICTS])
    return rows


class Study:
    """Simulates histories in two processes."""

    def __init__(self, seed: int, num_trials: int) -> None:
        self.seed = seed
        self.num_trials = num_trials
        self._pool = Pool(2)

    def compute_rates(self, model: Model, runs: Iterable[int]) -> NDArray[np.float64]:
        """Return the share of histories with each verdict, of shape (runs, verdicts)."""
        run_numbers = list(runs)
        arguments = [(model, (self.seed, i), run_numbers) for i in range(self.num_trials)]
        verdicts = self._pool.starmap(find_verdicts, arguments)
        return np.asarray(np.array(verdicts, dtype=float).mean(axis=0))

    def print_false_alarms(self, name: str, model: Model) -> None:
        runs = range(FIRST_CHECKED_RUN, NUM_RUNS + 1, 3)
        shares = self.compute_rates(model, runs).mean(axis=0)
        print(f"{name:32}" + "".join(f"{share:13.3f}" for share in shares), flush=True)

    def print_detections(self, name: str, model: Model) -> None:
        cells = []
        for step in STEPS:
            changed = replace(model, step=step)
            first, last = self.compute_rates(
                changed, [STEP_RUN + 1, STEP_RUN + RUNS_AFTER_STEP]
            )
            one_changed = replace(changed, num_changed=1)
            [last_of_one] = self.compute_rates(one_changed, [STEP_RUN + RUNS_AFTER_STEP])
            cells.append(f"{last[SLOWER]:.2f} {last_of_one[SLOWER]:.2f} {first[PR]:.2f}")
        print(f"{name:32}" + "".join(f"{cell:>18}" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="a part of the names of models")
    options = parser.parse_args()
    study = Study(options.seed, options.trials)
    print(
        f"{'no change, share of checks':32}" + "".join(f"{verdict:>13}" for verdict in VERDICTS)
    )
    for name, model in UNCHANGED.items():
        if options.only in name:
            study.print_false_alarms(name, model)
    print(f"\n{'step (all, one of 40, PR)':32}" + "".join(f"{step:>18.0%}" for step in STEPS))
    for name, model in CHANGED.items():
        if options.only in name:
            study.print_detections(name, model)


if __name__ == "__main__":
    main()
