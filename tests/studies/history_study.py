"""False alarms and detection of ``parbench history check``, on simulated histories.

python -m tests.studies.history_study [--trials 20] [--seed 1] [--every 1] simulates 40 series over 31 runs on one
machine. It prints the share of runs, from the ninth on, in which any series has a verdict. PR is SLOWER for a run that
is compared with the history and not part of it. Then it prints how soon steps are found: from the first run since the
step on, and for a step in one series, among 40 or as the only one, after five runs. Verdicts on runs where nothing
stepped are false alarms. A script, not a test: tests/reports/history/test_levels.py has a small part.
"""

import argparse
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from multiprocessing import Pool

import numpy as np
from numpy.typing import NDArray

from parbench.reports.history.levels import StepRule, judge_series

NUM_RUNS, FIRST, SINCE = 31, 9, 25
RULE = StepRule()
WORDS = ("SLOWER", "FASTER", "DRIFT", "SUSPECT", "PR")


@dataclass(frozen=True, kw_only=True)
class Model:
    """How runs vary, as fractions of a time; ``shared`` of the variance is common to all series.

    ``changed`` series have a step at run ``SINCE``.
    """

    cv: float
    shared: float = 0.0
    rho: float = 0.0
    spikes: float = 0.0
    drift: float = 0.0
    step: float = 0.0
    changed: int = 40
    series: int = 40


QUIET = {f"independent {cv:.0%}": Model(cv=cv) for cv in (0.01, 0.03, 0.1)}
QUIET |= {"3%, 10 % of spikes of 30 %": Model(cv=0.03, spikes=0.1)}
QUIET |= {"5%, half of it shared": Model(cv=0.05, shared=0.5)}
QUIET |= {f"autocorrelation 0.6, {cv:.0%}": Model(cv=cv, rho=0.6) for cv in (0.03, 0.1)}
QUIET |= {f"drift of 0.3 % a run, {cv:.0%}": Model(cv=cv, drift=0.003) for cv in (0.01, 0.03)}


def simulate(model: Model, random: np.random.Generator) -> NDArray[np.float64]:
    """Return logarithms of times of shape (series, runs)."""
    noise = random.normal(size=(model.series + 1, NUM_RUNS))
    for i in range(1, NUM_RUNS):
        noise[:, i] = model.rho * noise[:, i - 1] + math.sqrt(1 - model.rho**2) * noise[:, i]
    logs = model.cv * (math.sqrt(1 - model.shared) * noise[1:] + math.sqrt(model.shared) * noise[0])
    logs += (random.random(logs.shape) < model.spikes) * math.log(1.3)
    logs += math.log1p(model.drift) * np.arange(NUM_RUNS)
    logs[: model.changed, SINCE:] += math.log1p(model.step)
    return np.asarray(logs)


def find_verdicts(model: Model, seed: tuple[int, int], runs: Iterable[int]) -> list[list[bool]]:
    """Return for each run which of the verdicts any series has."""
    logs = simulate(model, np.random.default_rng(seed))
    rules = [RULE] * model.series
    verdicts = []
    for run in runs:
        window = list(logs[:, max(0, run - RULE.window) : run])
        words = set()
        for judgement in judge_series(window, rules):
            shift = judgement.shift
            if shift and judgement.is_significant:
                is_drift = shift.slope is not None
                words.add("FASTER" if shift.change < 0 else "DRIFT" if is_drift else "SLOWER")
            elif judgement.rise is not None:
                words.add("SUSPECT")
        candidates = judge_series(window, rules, newest_is_candidate=True)
        if any(judgement.rise is not None for judgement in candidates):
            words.add("PR")
        verdicts.append([word in words for word in WORDS])
    return verdicts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("trials", 20), ("seed", 1), ("every", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    with Pool(2) as pool:

        def rates(model: Model, runs: Iterable[int], trials: int) -> NDArray[np.float64]:
            arguments = [(model, (options.seed, i), [*runs]) for i in range(trials)]
            verdicts: NDArray[np.float64] = np.array(
                pool.starmap(find_verdicts, arguments), dtype=float
            )
            return np.asarray(verdicts.mean(axis=0))

        print(f"share of runs in which any series has the verdict, {options.trials} histories each")
        print(f"{'nothing steps':30}" + "".join(f"{word:>9}" for word in WORDS))
        for name, model in QUIET.items():
            if options.only in name:
                shares = rates(
                    model, range(FIRST, NUM_RUNS + 1, options.every), options.trials
                ).mean(axis=0)
                print(f"{name:30}" + "".join(f"{share:9.3f}" for share in shares), flush=True)
        if options.only:
            return
        print(
            f"{'a step':30}  SLOWER (SUSPECT, PR) in runs 1 to 5 since; of one series after 5, among 40; alone"
        )
        for cv in (0.02, 0.05):
            for step, changed in ((0.05, 40), (0.1, 40), (1.0, 1)):
                model = Model(cv=cv, step=step, changed=changed)
                soon = rates(model, range(SINCE + 1, SINCE + 6), options.trials)
                among = rates(replace(model, changed=1), [SINCE + 5], 4 * options.trials)[0, 0]
                alone = rates(
                    replace(model, changed=1, series=1), [SINCE + 5], 10 * options.trials
                )[0, 0]
                runs = " ".join(f"{rate[0]:.2f} ({rate[3]:.2f}, {rate[4]:.2f})" for rate in soon)
                name = f"{step:+.0%} in {changed} at {cv:.0%}"
                print(f"{name:30}  {runs}; {among:.2f}; {alone:.2f}", flush=True)


if __name__ == "__main__":
    main()
