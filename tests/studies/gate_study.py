"""What the regression gate finds and what it imagines, on simulated launches of a run like the node preset's.

python -m tests.studies.gate_study [--trials 200] prints a row for each kind of noise: how often parbench compare ends
with 1 where nothing changed, where nothing did and launches correlate with the next by 0.6 (with the upper ends of
these rates' 95 % intervals), how often it calls the one series that doubled, and a run of which every series takes
30 % longer; then what it prints as detectable for a single series, and how often that is called. Base is before new in
time. A script, not a test: tests/reports/regression/test_rule.py holds a small part.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest  # type: ignore[import-untyped]

from parbench.reports.regression.rule import Effect, Pair, Rule, effects, judge

Logs = NDArray[np.float64]
NODE = (
    *(8, 2) * 6,
    8,
    *(1,) * 7,
)  # 75 series by families: curves blocking and pipelined, and single cases
RULE = Rule()


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How launches scatter, in shares of a time.

    ``launch`` is between launches, the share ``shared`` of its variance that of all series at once;
    ``autocorrelation`` that of a launch with the next, of the shared part and of the others; ``drift`` what times grow
    by from the first launch to the last; ``spikes`` the share of launches that take far longer in one series.
    """

    launch: float = 0.1
    shared: float = 0.5
    autocorrelation: float = 0.0
    drift: float = 0.0
    spikes: float = 0.0
    uneven: float = 0.0
    launches: int = 5
    families: Sequence[int] = NODE


NOISES: Mapping[str, Noise] = {
    "2 %, half shared": Noise(launch=0.02),
    "5 %, half shared": Noise(launch=0.05),
    "10 %, half shared": Noise(),
    "10 %, independent": Noise(shared=0.0),
    "20 %, half shared": Noise(launch=0.2),
    "20 %, independent": Noise(launch=0.2, shared=0.0),
    "40 %, half shared": Noise(launch=0.4),
    "10 % in the median, uneven": Noise(uneven=1.0),
    "3 %, spikes in 10 %": Noise(launch=0.03, spikes=0.1),
    "1 %, drift of 5 %": Noise(launch=0.01, drift=0.05),
    "1 %, drift of 10 %": Noise(launch=0.01, drift=0.1),
    "1 %, drift of 10 %, 10 v 10": Noise(launch=0.01, drift=0.1, launches=10),
    "10 %, 10 v 10": Noise(launches=10),
    "10 %, a curve of eight": Noise(families=(8,)),
    "10 %, a single case": Noise(families=(1,)),
    "1 %, a single case": Noise(launch=0.01, families=(1,)),
}


def simulate(noise: Noise, random: np.random.Generator) -> Logs:
    """Return logarithms of times, of shape (launches of both sides, series)."""
    total, series = 2 * noise.launches, sum(noise.families)
    common, own = (_autocorrelated(noise.autocorrelation, (total, n), random) for n in (1, series))
    sizes = noise.launch * np.exp(noise.uneven * random.normal(size=series))
    logs = sizes * (math.sqrt(noise.shared) * common + math.sqrt(1 - noise.shared) * own)
    logs += noise.drift * np.linspace(0, 1, total)[:, None]
    return logs + (random.random((total, series)) < noise.spikes) * random.exponential(
        0.5, (total, series)
    )


def _autocorrelated(rho: float, shape: tuple[int, ...], random: np.random.Generator) -> Logs:
    """Return normal noise of variance one whose neighbours along the first axis correlate by ``rho`` (AR(1))."""
    values = random.normal(size=shape)
    for i in range(1, shape[0]):
        values[i] = rho * values[i - 1] + math.sqrt(1 - rho * rho) * values[i]
    return values


def called(logs: Logs, families: Sequence[int]) -> tuple[str, Sequence[str], Sequence[Effect]]:
    """Return the words for the whole run and for each series, and the effects, of equally many launches a side."""
    sides = [
        dict(enumerate(values)) for side in np.split(np.exp(logs), 2) for values in side.T.tolist()
    ]
    pairs = [
        Pair(base=base, new=new) for base, new in zip(sides, sides[len(sides) // 2 :], strict=False)
    ]
    ends = np.cumsum(families)
    whole, found = effects(
        [pairs[end - count : end] for end, count in zip(ends, families, strict=True)], RULE
    )
    words = [one.word for family in judge(found, RULE) for one in family]
    return whole.word if whole else words[0], words, [one for family in found for one in family]


def alarm(logs: Logs, families: Sequence[int]) -> bool:
    """Whether parbench compare would end with 1."""
    whole, words, _ = called(logs, families)
    return "SLOWER" in (whole, *words)


def slower(logs: Logs, change: float, series: int | slice = slice(None)) -> Logs:
    longer = logs.copy()
    longer[len(logs) // 2 :, series] += math.log1p(change)
    return longer


def rates(noise: Noise, trials: int, seed: int) -> dict[str, float]:
    random = np.random.default_rng(seed)
    found = {"alarms": 0.0, "correlated": 0.0, "doubled": 0.0, "all": 0.0}
    seen = []
    for _ in range(trials):
        logs, one = simulate(noise, random), int(random.integers(sum(noise.families)))
        _, words, each = called(slower(logs, 1.0, one), noise.families)
        found["alarms"] += alarm(logs, noise.families) / trials
        found["correlated"] += (
            alarm(simulate(replace(noise, autocorrelation=0.6), random), noise.families) / trials
        )
        found["doubled"] += (words[one] == "SLOWER") / trials
        found["all"] += alarm(slower(logs, 0.3), noise.families) / trials
        seen.append(each[one].detectable or 0.0)
    return {**found, "detectable": float(np.median(seen))}


def power(noise: Noise, change: float, trials: int, seed: int) -> float:
    """Return how often one series that became slower by ``change`` is called."""
    random = np.random.default_rng(seed)
    count = 0
    for _ in range(trials):
        one = int(random.integers(sum(noise.families)))
        count += (
            called(slower(simulate(noise, random), change, one), noise.families)[1][one] == "SLOWER"
        )
    return count / trials


def upper(rate: float, trials: int) -> float:
    """Return the upper end of a rate's 95 % interval (Wilson)."""
    return float(binomtest(round(rate * trials), trials).proportion_ci(method="wilson").high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    trials = asked.trials
    print(
        f"75 series in {len(NODE)} families, 5 launches a side where nothing else is said; {trials} runs each"
    )
    titles = (
        "nothing changed",
        "autocorrelation .6",
        "one doubled",
        "all +30 %",
        "detectable",
        "called at that",
    )
    print(f"{'noise of a launch':30}" + "".join(f"{title:>20}" for title in titles))
    for name, noise in NOISES.items():
        found = rates(noise, trials, asked.seed)
        at_that = power(noise, found["detectable"], trials, asked.seed + 1)
        cells = [
            f"{rate:.3f} (<{upper(rate, trials):.3f})"
            for rate in (found["alarms"], found["correlated"])
        ]
        cells += [
            f"{found['doubled']:.2f}",
            f"{found['all']:.2f}",
            f"+{100 * found['detectable']:.0f} %",
        ]
        print(
            f"{name:30}" + "".join(f"{cell:>20}" for cell in [*cells, f"{at_that:.2f}"]), flush=True
        )


if __name__ == "__main__":
    main()
