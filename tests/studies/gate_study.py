"""False alarms and power of the regression check, on simulated runs like those of the node preset.

python -m tests.studies.gate_study [--trials 200] prints a row for each kind of noise:

- how often parbench compare exits with 1 if nothing changed, without and with an autocorrelation
  of repetitions of 0.6, each with the upper bound of the rate's 95 % interval,
- how often it reports a single series that takes twice as long,
- how often it exits with 1 if all series take 30 % longer,
- the change that it reports as detectable for a single series, and how often it reports that.

All repetitions of BASE are before those of NEW. tests/reports/compare/test_rule.py holds a part.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest  # type: ignore[import-untyped]

from parbench.reports.compare.rule import Effect, Pair, Rule, effects, judge

Logs = NDArray[np.float64]
# 75 series by families: curves, blocking and pipelined, and single cases.
NODE_FAMILIES = [8, 2] * 6 + [8] + [1] * 7
RULE = Rule()
COLUMNS = [
    "nothing changed",
    "autocorrelation .6",
    "one doubled",
    "all +30 %",
    "detectable",
    "called at that",
]


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How the times of repetitions vary."""

    sigma: float = 0.1  # between repetitions, as a share of the time
    shared: float = 0.5  # share of the variance that all series have in common
    autocorrelation: float = 0.0  # of a repetition with the next
    drift: float = 0.0  # growth from the first repetition to the last, as a share of the time
    spikes: float = 0.0  # share of repetitions that take far longer
    uneven: float = 0.0  # sigma of the logarithms of the sigmas of series
    repetitions: int = 5
    families: Sequence[int] = tuple(NODE_FAMILIES)

    @property
    def num_series(self) -> int:
        return sum(self.families)


NOISES: Mapping[str, Noise] = {
    "2 %, half shared": Noise(sigma=0.02),
    "5 %, half shared": Noise(sigma=0.05),
    "10 %, half shared": Noise(),
    "10 %, independent": Noise(shared=0.0),
    "20 %, half shared": Noise(sigma=0.2),
    "20 %, independent": Noise(sigma=0.2, shared=0.0),
    "40 %, half shared": Noise(sigma=0.4),
    "10 % in the median, uneven": Noise(uneven=1.0),
    "3 %, spikes in 10 %": Noise(sigma=0.03, spikes=0.1),
    "1 %, drift of 5 %": Noise(sigma=0.01, drift=0.05),
    "1 %, drift of 10 %": Noise(sigma=0.01, drift=0.1),
    "1 %, drift of 10 %, 10 v 10": Noise(sigma=0.01, drift=0.1, repetitions=10),
    "10 %, 10 v 10": Noise(repetitions=10),
    "10 %, a curve of eight": Noise(families=(8,)),
    "10 %, a single case": Noise(families=(1,)),
    "1 %, a single case": Noise(sigma=0.01, families=(1,)),
}


@dataclass(frozen=True, kw_only=True)
class Verdicts:
    """The verdicts of a comparison: of the whole run, and of each series with its effect."""

    run: str
    series: Sequence[str]
    effects: Sequence[Effect]

    @property
    def is_alarm(self) -> bool:
        """True if parbench compare would exit with 1."""
        return "SLOWER" in (self.run, *self.series)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Shares of trials, and the median of the detectable change."""

    alarms: float
    correlated_alarms: float
    doubled: float
    all_slower: float
    detectable: float


def simulate(noise: Noise, random: np.random.Generator) -> Logs:
    """Return logarithms of times, of shape (repetitions of BASE and NEW, series)."""
    shape = (2 * noise.repetitions, noise.num_series)
    common = simulate_ar1(noise.autocorrelation, (shape[0], 1), random)
    separate = simulate_ar1(noise.autocorrelation, shape, random)
    sigmas = noise.sigma * np.exp(noise.uneven * random.normal(size=noise.num_series))
    logs = sigmas * (math.sqrt(noise.shared) * common + math.sqrt(1 - noise.shared) * separate)
    logs += noise.drift * np.linspace(0, 1, shape[0])[:, None]
    is_spike = random.random(shape) < noise.spikes
    return logs + is_spike * random.exponential(0.5, shape)


def simulate_ar1(rho: float, shape: tuple[int, int], random: np.random.Generator) -> Logs:
    """Return normal noise of variance 1 whose neighbors along the first axis correlate by rho."""
    values = random.normal(size=shape)
    for i in range(1, shape[0]):
        values[i] = rho * values[i - 1] + math.sqrt(1 - rho * rho) * values[i]
    return values


def add_change(logs: Logs, change: float, series: int | slice = slice(None)) -> Logs:
    """Return the logarithms with series of NEW, or all, that take longer by a share."""
    slower = logs.copy()
    slower[len(logs) // 2 :, series] += math.log1p(change)
    return slower


def compare_logs(logs: Logs, families: Sequence[int]) -> Verdicts:
    """Compare the second half of the repetitions with the first, by families of so many series."""
    base, new = np.split(np.exp(logs), 2)
    pairs = []
    for base_times, new_times in zip(base.T.tolist(), new.T.tolist(), strict=True):
        pairs.append(Pair(base=dict(enumerate(base_times)), new=dict(enumerate(new_times))))
    grouped_pairs = []
    for size in families:
        grouped_pairs.append(pairs[:size])
        pairs = pairs[size:]
    run, grouped_effects = effects(grouped_pairs, RULE)
    words = []
    for judgements in judge(grouped_effects, RULE):
        words += [judgement.word for judgement in judgements]
    return Verdicts(
        run=run.word if run else words[0],
        series=words,
        effects=[effect for family in grouped_effects for effect in family],
    )


def compute_rates(noise: Noise, trials: int, seed: int) -> Rates:
    random = np.random.default_rng(seed)
    correlated = replace(noise, autocorrelation=0.6)
    num_alarms = num_correlated = num_doubled = num_slower = 0
    detectable = []
    for _ in range(trials):
        logs = simulate(noise, random)
        series = int(random.integers(noise.num_series))
        doubled = compare_logs(add_change(logs, 1.0, series), noise.families)
        slower = compare_logs(add_change(logs, 0.3), noise.families)
        num_alarms += compare_logs(logs, noise.families).is_alarm
        num_correlated += compare_logs(simulate(correlated, random), noise.families).is_alarm
        num_doubled += doubled.series[series] == "SLOWER"
        num_slower += slower.is_alarm
        detectable.append(doubled.effects[series].detectable or 0.0)
    return Rates(
        alarms=num_alarms / trials,
        correlated_alarms=num_correlated / trials,
        doubled=num_doubled / trials,
        all_slower=num_slower / trials,
        detectable=float(np.median(detectable)),
    )


def compute_power(noise: Noise, change: float, trials: int, seed: int) -> float:
    """Return the share of trials in which a single series, slower by a change, is reported."""
    random = np.random.default_rng(seed)
    count = 0
    for _ in range(trials):
        series = int(random.integers(noise.num_series))
        logs = add_change(simulate(noise, random), change, series)
        count += compare_logs(logs, noise.families).series[series] == "SLOWER"
    return count / trials


def compute_upper_bound(rate: float, trials: int) -> float:
    """Return the upper bound of a rate's 95 % interval (Wilson)."""
    interval = binomtest(round(rate * trials), trials).proportion_ci(method="wilson")
    return float(interval.high)


def format_row(noise: Noise, trials: int, seed: int) -> list[str]:
    rates = compute_rates(noise, trials, seed)
    power = compute_power(noise, rates.detectable, trials, seed + 1)
    cells = []
    for rate in (rates.alarms, rates.correlated_alarms):
        cells.append(f"{rate:.3f} (<{compute_upper_bound(rate, trials):.3f})")
    cells += [f"{rates.doubled:.2f}", f"{rates.all_slower:.2f}"]
    return [*cells, f"+{100 * rates.detectable:.0f} %", f"{power:.2f}"]


def print_row(title: str, cells: Sequence[str]) -> None:
    print(f"{title:30}" + "".join(f"{cell:>20}" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    num_series = sum(NODE_FAMILIES)
    print(f"{num_series} series in {len(NODE_FAMILIES)} families and 5 repetitions per run")
    print(f"unless the name says otherwise; {options.trials} trials per row")
    print_row("noise of repetitions", COLUMNS)
    for name, noise in NOISES.items():
        print_row(name, format_row(noise, options.trials, options.seed))


if __name__ == "__main__":
    main()
