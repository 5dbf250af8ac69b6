"""Simulate histories and print false alarms and detections of ``parbench history check``.

    python -m tests.studies.history_study [--trials 20] [--seed 1] [--every 1]

A history has 40 series over 31 runs on one machine. The first table has the share of runs, from the
ninth on, in which any series has a verdict although nothing changed. PR is SLOWER for a run that is
compared with the history and not part of it. The second table has how soon a step is detected: in
the first runs after it, and for a step in one series, among 40 or as the only one, after five runs.
``tests/reports/history/test_levels.py`` tests a small part.
"""

import argparse
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import Pool

import numpy as np
from numpy.typing import NDArray

from parbench.reports.history.levels import StepRule, judge_series

NUM_RUNS = 31
FIRST_JUDGED_RUN = 9
STEP_RUN = 25
SPIKE_LOG = math.log(1.3)
RULE = StepRule()
VERDICTS = ("SLOWER", "FASTER", "DRIFT", "SUSPECT", "PR")
SLOWER, SUSPECT, PR = 0, 3, 4


@dataclass(frozen=True, kw_only=True)
class Model:
    """How runs vary, as fractions of a time."""

    cv: float  # standard deviation relative to the mean
    shared: float = 0.0  # share of the variance that all series have in common
    rho: float = 0.0  # correlation of consecutive runs
    spikes: float = 0.0  # share of runs that take 30 % longer
    drift: float = 0.0  # growth per run
    step: float = 0.0  # change at STEP_RUN
    num_changed: int = 40  # series with the step
    num_series: int = 40


UNCHANGED = {
    "independent 1%": Model(cv=0.01),
    "independent 3%": Model(cv=0.03),
    "independent 10%": Model(cv=0.1),
    "3%, 10 % of spikes of 30 %": Model(cv=0.03, spikes=0.1),
    "5%, half of it shared": Model(cv=0.05, shared=0.5),
    "autocorrelation 0.6, 3%": Model(cv=0.03, rho=0.6),
    "autocorrelation 0.6, 10%": Model(cv=0.1, rho=0.6),
    "drift of 0.3 % a run, 1%": Model(cv=0.01, drift=0.003),
    "drift of 0.3 % a run, 3%": Model(cv=0.03, drift=0.003),
}


def simulate(model: Model, random: np.random.Generator) -> NDArray[np.float64]:
    """Return logarithms of times of shape (series, runs)."""
    noise = random.normal(size=(model.num_series + 1, NUM_RUNS))
    for run in range(1, NUM_RUNS):
        noise[:, run] *= math.sqrt(1 - model.rho**2)
        noise[:, run] += model.rho * noise[:, run - 1]
    shared_noise = math.sqrt(model.shared) * noise[0]
    logs = model.cv * (math.sqrt(1 - model.shared) * noise[1:] + shared_noise)
    logs += (random.random(logs.shape) < model.spikes) * SPIKE_LOG
    logs += math.log1p(model.drift) * np.arange(NUM_RUNS)
    logs[: model.num_changed, STEP_RUN:] += math.log1p(model.step)
    return np.asarray(logs)


def find_verdicts(model: Model, seed: Sequence[int], runs: Iterable[int]) -> list[list[bool]]:
    """Return for each run which of the verdicts any series has."""
    logs = simulate(model, np.random.default_rng(seed))
    rules = [RULE] * model.num_series
    rows = []
    for run in runs:
        window = list(logs[:, max(0, run - RULE.window) : run])
        verdicts = set()
        for judgement in judge_series(window, rules):
            shift = judgement.shift
            if shift and judgement.is_significant:
                if shift.change < 0:
                    verdicts.add("FASTER")
                elif shift.slope is not None:
                    verdicts.add("DRIFT")
                else:
                    verdicts.add("SLOWER")
            elif judgement.rise is not None:
                verdicts.add("SUSPECT")
        candidates = judge_series(window, rules, newest_is_candidate=True)
        if any(judgement.rise is not None for judgement in candidates):
            verdicts.add("PR")
        rows.append([verdict in verdicts for verdict in VERDICTS])
    return rows


class Study:
    """Simulates histories in processes."""

    def __init__(self, seed: int, num_trials: int) -> None:
        self.seed = seed
        self.num_trials = num_trials
        self._pool = Pool(2)

    def compute_rates(
        self, model: Model, runs: Iterable[int], num_trials: int | None = None
    ) -> NDArray[np.float64]:
        """Return the share of histories with each verdict, of shape (runs, verdicts)."""
        trials = range(num_trials or self.num_trials)
        run_numbers = list(runs)
        arguments = [(model, (self.seed, trial), run_numbers) for trial in trials]
        verdicts = self._pool.starmap(find_verdicts, arguments)
        return np.asarray(np.array(verdicts, dtype=float).mean(axis=0))

    def print_false_alarms(self, name: str, model: Model, every: int) -> None:
        runs = range(FIRST_JUDGED_RUN, NUM_RUNS + 1, every)
        shares = self.compute_rates(model, runs).mean(axis=0)
        print(f"{name:30}" + "".join(f"{share:9.3f}" for share in shares), flush=True)

    def print_detections(self, model: Model) -> None:
        next_runs = range(STEP_RUN + 1, STEP_RUN + 6)
        cells = [
            f"{rates[SLOWER]:.2f} ({rates[SUSPECT]:.2f}, {rates[PR]:.2f})"
            for rates in self.compute_rates(model, next_runs)
        ]
        one_of_many = replace(model, num_changed=1)
        only_one = replace(model, num_changed=1, num_series=1)
        last_run = [STEP_RUN + 5]
        among = self.compute_rates(one_of_many, last_run, 4 * self.num_trials)[0, SLOWER]
        alone = self.compute_rates(only_one, last_run, 10 * self.num_trials)[0, SLOWER]
        name = f"{model.step:+.0%} in {model.num_changed} at {model.cv:.0%}"
        print(f"{name:30}  {' '.join(cells)}; {among:.2f}; {alone:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument(
        "--only", default="", help="a part of the name of a model without change"
    )
    options = parser.parse_args()
    study = Study(options.seed, options.trials)
    print(f"share of runs in which any series has the verdict, {options.trials} histories each")
    print(f"{'no change':30}" + "".join(f"{verdict:>9}" for verdict in VERDICTS))
    for name, model in UNCHANGED.items():
        if options.only in name:
            study.print_false_alarms(name, model, options.every)
    if options.only:
        return
    columns = (
        "SLOWER (SUSPECT, PR) in runs 1 to 5 after it; one series after 5: among 40; alone"
    )
    print(f"{'a step':30}  {columns}")
    for cv in (0.02, 0.05):
        for step, num_changed in ((0.05, 40), (0.1, 40), (1.0, 1)):
            study.print_detections(Model(cv=cv, step=step, num_changed=num_changed))


if __name__ == "__main__":
    main()
