"""What the regression gate finds and what it imagines, beside simpler rules, on simulated launches.

python tests/studies/gate_study.py [--trials 300] prints a table of noise models and rules: how often a curve of eight
sizes (or a single case) in which nothing changed is called slower, with the upper end of that rate's 95 % interval,
and how often one that became 5 % slower is. The last columns are what CI scripts usually do: a threshold on the
previous run's medians, and a t-test on the pooled iterations. A second table is of the nightly gate: a series of 30
nights in which nothing changed, and one that became 5 % slower five nights ago. Where nights resemble the nights
before, levels that last for days are real, and no rule tells them from steps. A script, not a test:
tests/reports/regression/test_compare_rule.py holds a small part.
"""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest  # type: ignore[import-untyped]

from bench.results.stats import t_quantile
from reports.regression.levels import StepRule, newest_shift
from reports.regression.rule import Rule, effect, judge

Times = NDArray[np.float64]
Gate = Callable[[Times, Times], bool]
STEP = math.log(1.05)
RULE = Rule()


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How launches scatter, in shares of a time.

    ``launch`` is between launches, half of its variance shared by all sizes; ``autocorrelation`` that of a launch with
    the next; ``drift`` what times grow by from the first launch of base to the last of new; ``spikes`` the share of
    launches, and of iterations, that take far longer; iterations scatter by 2 %, neighbours correlated by 0.6.
    """

    launch: float = 0.01
    autocorrelation: float = 0.0
    drift: float = 0.0
    spikes: float = 0.0
    launches: int = 10
    iterations: int = 200
    sizes: int = 8


NOISES: Mapping[str, Noise] = {
    "1 % a launch": Noise(),
    "1 %, a single case": Noise(sizes=1),
    "1 %, 5 launches a side": Noise(launches=5),
    "1 %, 5 launches, single": Noise(launches=5, sizes=1),
    "3 % a launch": Noise(launch=0.03),
    "10 % a launch": Noise(launch=0.10),
    "spikes in 10 % of launches": Noise(spikes=0.1),
    "drift of 1 %": Noise(drift=0.01),
    "drift of 5 %": Noise(drift=0.05),
    "drift of 10 %": Noise(drift=0.10),
    "autocorrelation 0.6": Noise(autocorrelation=0.6),
    "autocorrelation 0.6, 3 %": Noise(autocorrelation=0.6, launch=0.03),
    "autocorrelation 0.6, 10 %": Noise(autocorrelation=0.6, launch=0.10),
    "all three, 3 %": Noise(autocorrelation=0.6, launch=0.03, drift=0.01, spikes=0.1),
}


NIGHTS: Mapping[str, Noise] = {
    "1 % a night": Noise(),
    "2 % a night": Noise(launch=0.02),
    "10 % a night": Noise(launch=0.10),
    "spikes in 10 % of nights": Noise(spikes=0.1),
    "autocorrelation 0.6, 1 %": Noise(autocorrelation=0.6),
    "autocorrelation 0.3, 3 %": Noise(autocorrelation=0.3, launch=0.03),
    "autocorrelation 0.6, 3 %": Noise(autocorrelation=0.6, launch=0.03),
    "autocorrelation 0.6, 10 %": Noise(autocorrelation=0.6, launch=0.10),
}
NUM_NIGHTS, SINCE = 30, 25


def simulate(noise: Noise, step: float, random: np.random.Generator) -> tuple[Times, Times]:
    """Return the times of base and new, of shape (launches, sizes, iterations); ``step`` is new's log ratio."""
    total = 2 * noise.launches
    common = _autocorrelated(noise.autocorrelation, (total, 1), random)
    own = _autocorrelated(noise.autocorrelation, (total, noise.sizes), random)
    logs = noise.launch * (common + own) / math.sqrt(2)
    logs += noise.drift * np.linspace(0, 1, total)[:, None]
    logs += (random.random((total, 1)) < noise.spikes) * random.exponential(0.3, (total, 1))
    logs[noise.launches :] += step
    within = 0.02 * _autocorrelated(0.6, (noise.iterations, total, noise.sizes), random)
    within += (random.random(within.shape) < noise.spikes) * random.exponential(1.0, within.shape)
    times = np.exp(logs[:, :, None] + np.moveaxis(within, 0, -1))
    return times[: noise.launches], times[noise.launches :]


def _autocorrelated(rho: float, shape: tuple[int, ...], random: np.random.Generator) -> Times:
    """Return normal noise of variance one whose neighbours along the first axis correlate by ``rho`` (AR(1))."""
    values = random.normal(size=shape)
    for i in range(1, shape[0]):
        values[i] = rho * values[i - 1] + math.sqrt(1 - rho * rho) * values[i]
    return values


def parbench(base: Times, new: Times) -> bool:
    sides = (np.median(side, axis=2).T.tolist() for side in (base, new))
    family = [effect(before, after, RULE) for before, after in zip(*sides, strict=True)]
    return any(found.word == "SLOWER" for found in judge([family], RULE)[0])


def threshold(limit: float) -> Gate:
    def gate(base: Times, new: Times) -> bool:
        before, after = (np.median(side[0], axis=1) for side in (base, new))
        return bool((after / before > 1 + limit).any())

    return gate


def pooled(base: Times, new: Times) -> bool:
    """Say whether a t-test on all iterations as if they were independent finds any size slower (Bonferroni)."""
    logs = [np.log(side).transpose(1, 0, 2).reshape(side.shape[1], -1) for side in (base, new)]
    error = np.sqrt(sum(side.var(axis=1, ddof=1) / side.shape[1] for side in logs))
    t = (logs[1].mean(axis=1) - logs[0].mean(axis=1)) / error
    return bool(t.max() > t_quantile(1 - 0.025 / len(t), logs[0].shape[1]))


GATES: Mapping[str, Gate] = {
    "parbench": parbench,
    "previous run, 5 %": threshold(0.05),
    "previous run, 10 %": threshold(0.10),
    "pooled iterations, t": pooled,
}


def rates(noise: Noise, step: float, gates: Sequence[Gate], trials: int, seed: int) -> list[float]:
    random = np.random.default_rng(seed)
    called = np.zeros(len(gates))
    for _ in range(trials):
        base, new = simulate(noise, step, random)
        called += [gate(base, new) for gate in gates]
    return [float(rate) for rate in called / trials]


def nightly_rate(noise: Noise, step: float, trials: int, seed: int) -> float:
    random = np.random.default_rng(seed)
    called = 0
    for _ in range(trials):
        logs = noise.launch * _autocorrelated(noise.autocorrelation, (NUM_NIGHTS,), random)
        logs += (random.random(NUM_NIGHTS) < noise.spikes) * random.exponential(0.3, NUM_NIGHTS)
        logs[SINCE:] += step
        shift = newest_shift(np.exp(logs).tolist(), StepRule())
        called += shift is not None and shift.change > 0
    return called / trials


def upper(rate: float, trials: int) -> float:
    """Return the upper end of a rate's 95 % interval (Wilson)."""
    return float(binomtest(round(rate * trials), trials).proportion_ci(method="wilson").high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=300)
    trials = parser.parse_args().trials
    print(f"false alarms (at most) / detections of +5 %, {trials} families each")
    print(f"{'noise':28}" + "".join(f"{name:>24}" for name in GATES))
    gates = list(GATES.values())
    for name, noise in NOISES.items():
        alarms = rates(noise, 0.0, gates, trials, seed=1)
        found = rates(noise, STEP, gates, trials, seed=2)
        cells = [f"{a:.3f} (<{upper(a, trials):.3f}) / {f:.2f}" for a, f in zip(alarms, found, strict=True)]
        print(f"{name:28}" + "".join(f"{cell:>24}" for cell in cells), flush=True)
    print(f"the nightly gate, {trials} series each: false alarms (at most) / detections of +5 % after five nights")
    for name, noise in NIGHTS.items():
        quiet, moved = nightly_rate(noise, 0.0, trials, seed=1), nightly_rate(noise, STEP, trials, seed=2)
        print(f"{name:28}  {quiet:.3f} (<{upper(quiet, trials):.3f}) / {moved:.2f}", flush=True)


if __name__ == "__main__":
    main()
