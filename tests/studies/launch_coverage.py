"""How often a launch's 95 % interval holds the true median, under noise whose neighbours resemble each other.

python -m tests.studies.launch_coverage [--trials 400] simulates one case among others in a launch, by parbench's own
rule for how many samples a visit takes and its own interval. Between two visits the other cases take as long as 300
samples (--gap). Noise is lognormal: independent; neighbours correlated by .3, .6, .9 (AR(1)); or one of two modes, the
slower one half as slow again and there 15 or 40 % of the time, for 1, 20 or 100 samples on average. Beside it is what
takes all samples in one go and as independent: doubled until their order statistics are as narrow as asked. The last
column is how many samples parbench takes for each of that one's. A script, not a test:
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq  # type: ignore[import-untyped]
from scipy.signal import lfilter  # type: ignore[import-untyped]
from scipy.special import ndtr  # type: ignore[import-untyped]

from parbench.bench.launch.visits import VISITS
from parbench.bench.plan.plan import Measure
from parbench.bench.rank.timing import DURATION, Progress, Sample, Timing
from parbench.bench.results.stats import Estimate, within_launch

SLOWER = 1.5
Series = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Lognormal noise of ``sigma``; neighbours correlate by ``rho``, or a share of samples is in a slow mode."""

    name: str
    sigma: float
    rho: float = 0.0
    share: float = 0.0
    dwell: float = 1.0

    def draw(self, count: int, random: np.random.Generator) -> Series:
        normal = random.normal(size=count + 100)
        logs = self.sigma * lfilter([math.sqrt(1 - self.rho**2)], [1, -self.rho], normal)[100:]
        slow = np.zeros(count, dtype=bool)
        if self.share and self.dwell == 1:
            slow = random.random(count) < self.share
        elif self.share:
            place, is_slow = 0, random.random() < self.share
            while place < count:
                stay = random.geometric(
                    1 / self.dwell if is_slow else self.share / (1 - self.share) / self.dwell
                )
                slow[place : place + stay] = is_slow
                place, is_slow = place + stay, not is_slow
        found: Series = np.exp(logs) * np.where(slow, SLOWER, 1.0)
        return found

    @property
    def median(self) -> float:
        def below(value: float) -> float:
            usual, slow = (ndtr(math.log(value / mode) / self.sigma) for mode in (1.0, SLOWER))
            return float((1 - self.share) * usual + self.share * slow - 0.5)

        return float(brentq(below, 0.5, 3.0))


def noises() -> Iterator[Noise]:
    for sigma in (0.02, 0.05, 0.1, 0.2, 0.3, 0.6):
        yield Noise(name="independent", sigma=sigma)
    for rho in (0.3, 0.6, 0.9):
        for sigma in (0.05, 0.1, 0.3):
            yield Noise(name=f"AR(1) {rho}", sigma=sigma, rho=rho)
    for share in (0.15, 0.4):
        for dwell in (1, 20, 100):
            for sigma in (0.02, 0.05, 0.1):
                name = f"{100 * share:.0f} % slow for {dwell}"
                yield Noise(name=name, sigma=sigma, share=share, dwell=dwell)


class Alone:
    """A world of one rank."""

    global_rank, device = 0, torch.device("cpu")

    def decide(self, values: list[float]) -> list[float]:
        return values


class Simulated(Timing):
    """Parbench's rule on a series of times in place of a clock; between visits ``gap`` samples pass by."""

    def __init__(self, series: Series, gap: int, measure: Measure) -> None:
        alone: Any = Alone()
        super().__init__(alone, alone, Progress(), measure, [0])
        self._series, self._gap, self._place = series, gap, 0

    def visits(self) -> Estimate:
        for left in reversed(range(VISITS)):
            self.visit(1e9, left)
            self._place += self._gap
        return within_launch(self._durations(), self._visits)

    def _warm_up(self, seconds: float) -> Sample:
        self._each_seconds = 1e-9
        return lambda: None

    def _gather(self, sample: Sample, count: int) -> None:
        stamps = np.zeros((4, 1, count), dtype=np.int64)
        stamps[DURATION, 0] = 1e9 * self._series[self._place : self._place + count]
        self._stamps = np.concatenate([self._stamps, stamps], axis=2)
        self._place += count


def in_one_go(series: Series, measure: Measure) -> Estimate:
    """Return what doubling gives until the order statistics of all samples are as narrow as asked."""
    count = measure.min_iterations
    while True:
        found = within_launch(series[:count].tolist(), [1] * count)
        if count >= measure.max_iterations or (
            count >= 20 and (found.half_width or 1) <= measure.precision
        ):
            return found
        count = min(2 * count, measure.max_iterations)


@dataclass(frozen=True, kw_only=True)
class Tried:
    """The share of intervals that held the median, of those there were; the samples taken; half the width."""

    covered: float
    printed: float
    samples: float
    half_width: float


def tried(found: list[tuple[Estimate, int]], truth: float) -> Tried:
    known = [
        (one.low, one.high) for one, _ in found if one.low is not None and one.high is not None
    ]
    held = [low <= truth <= high for low, high in known]
    return Tried(
        covered=float(np.mean(held)) if held else math.nan,
        printed=len(known) / len(found),
        samples=float(np.mean([count for _, count in found])),
        half_width=float(np.median([(high - low) / 2 for low, high in known]))
        if known
        else math.nan,
    )


def both(noise: Noise, trials: int, gap: int, seed: int) -> tuple[Tried, Tried]:
    """Return what parbench's visits give, and all samples in one go taken as independent."""
    random, measure, truth = np.random.default_rng(seed), Measure(), 1e9 * noise.median
    ours, theirs = list[tuple[Estimate, int]](), list[tuple[Estimate, int]]()
    for _ in range(trials):
        series = noise.draw(measure.max_iterations + VISITS * (gap + 3), random)
        simulated = Simulated(series, gap, measure)
        ours.append((simulated.visits(), sum(simulated._visits)))
        one = in_one_go(1e9 * series, measure)
        theirs.append((one, int(one.method.split()[2])))
    return tried(ours, truth), tried(theirs, truth)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=400)
    parser.add_argument("--gap", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    print(
        f"coverage of the 95 % interval of one launch, {asked.trials} trials, {VISITS} visits, gaps of {asked.gap}"
    )
    print(
        f"{'':24}{'in visits':>11}{'printed':>9}{'+-':>7}{'samples':>9}{'in one go':>11}{'samples':>9}{'ratio':>7}"
    )
    for noise in noises():
        ours, theirs = both(noise, asked.trials, asked.gap, asked.seed)
        cells = f"{ours.covered:11.3f}{ours.printed:9.2f}{ours.half_width / 1e9:7.3f}{ours.samples:9.0f}"
        cells += f"{theirs.covered:11.3f}{theirs.samples:9.0f}{ours.samples / theirs.samples:7.2f}"
        print(f"{noise.name:18}{noise.sigma:6.2f}{cells}", flush=True)


if __name__ == "__main__":
    main()
