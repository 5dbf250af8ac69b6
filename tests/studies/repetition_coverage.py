"""Simulate how often the 95 % interval of one repetition contains the true median.

    python -m tests.studies.repetition_coverage [--trials 400]

A repetition measures one case among others, in blocks, by parbench's own rule for the number of
samples and its own interval. Between two blocks the other cases take as long as 300 samples
(``--gap``). Noise is lognormal: independent, with correlated neighbors (AR(1)), or with a slow
mode. The slow mode takes half as long again, 15 or 40 % of the time, for 1, 20 or 100 samples on
average.
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

from parbench.bench.launch.blocks import BLOCKS
from parbench.bench.plan.plan import Measure
from parbench.bench.rank.progress import Progress
from parbench.bench.rank.timing import DURATION, CaseTimer, Sampler, Stopwatch
from parbench.bench.results.stats import Estimate, estimate_median
from parbench.bench.world.world import Subgroup

SLOW_FACTOR = 1.5
BURN_IN_SAMPLES = 100
Series = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Lognormal noise; neighbors are correlated, or a share of samples is in a slow mode."""

    name: str
    sigma: float  # standard deviation of the logarithm
    rho: float = 0.0  # correlation of neighbors
    slow_share: float = 0.0
    slow_samples: float = 1.0  # mean length of a slow phase

    def draw(self, count: int, random: np.random.Generator) -> Series:
        """Return a series of times whose fast mode has median 1."""
        normal = random.normal(size=count + BURN_IN_SAMPLES)
        filtered = lfilter([math.sqrt(1 - self.rho**2)], [1, -self.rho], normal)
        logs = self.sigma * filtered[BURN_IN_SAMPLES:]
        times: Series = np.exp(logs)
        times[self._draw_slow(count, random)] *= SLOW_FACTOR
        return times

    def _draw_slow(self, count: int, random: np.random.Generator) -> NDArray[np.bool_]:
        """Return a mask of the samples in the slow mode."""
        slow = np.zeros(count, dtype=bool)
        if self.slow_share == 0:
            return slow
        if self.slow_samples == 1:
            return random.random(count) < self.slow_share
        leave_slow = 1 / self.slow_samples
        enter_slow = leave_slow * self.slow_share / (1 - self.slow_share)
        start = 0
        is_slow = bool(random.random() < self.slow_share)
        while start < count:
            length = random.geometric(leave_slow if is_slow else enter_slow)
            slow[start : start + length] = is_slow
            start += length
            is_slow = not is_slow
        return slow

    def compute_median(self) -> float:
        def excess_probability(value: float) -> float:
            fast = ndtr(math.log(value) / self.sigma)
            slow = ndtr(math.log(value / SLOW_FACTOR) / self.sigma)
            return float((1 - self.slow_share) * fast + self.slow_share * slow - 0.5)

        return float(brentq(excess_probability, 0.5, 3.0))


def list_noises() -> Iterator[Noise]:
    for sigma in (0.02, 0.05, 0.1, 0.2, 0.3, 0.6):
        yield Noise(name="independent", sigma=sigma)
    for rho in (0.3, 0.6, 0.9):
        for sigma in (0.05, 0.1, 0.3):
            yield Noise(name=f"AR(1) {rho}", sigma=sigma, rho=rho)
    for share in (0.15, 0.4):
        for samples in (1, 20, 100):
            for sigma in (0.02, 0.05, 0.1):
                name = f"{100 * share:.0f} % slow for {samples}"
                yield Noise(
                    name=name,
                    sigma=sigma,
                    slow_share=share,
                    slow_samples=samples,
                )


class SingleRankWorld:
    """A world of one rank, without process groups."""

    global_rank = 0
    device = torch.device("cpu")

    def broadcast_from_rank_0(self, values: list[float]) -> list[float]:
        return values


class SimulatedTiming(CaseTimer):
    """Applies parbench's rule to a series of times in place of a clock."""

    def __init__(self, series: Series, gap: int, measure: Measure) -> None:
        world: Any = SingleRankWorld()
        subgroup = Subgroup(ranks=(0,), active=(0,), world=world)
        stopwatch = Stopwatch(benchmark=world, world=world, progress=Progress())
        super().__init__(stopwatch, measure, subgroup)
        self._series = series
        self._gap = gap
        self._position = 0

    def estimate(self) -> tuple[Estimate, int]:
        """Return the interval after all blocks, and the number of samples."""
        for remaining in reversed(range(BLOCKS)):
            self.measure_block(1e9, remaining)
            self._position += self._gap
        counts = self.samples.samples_per_block
        return estimate_median(self.samples.compute_durations(), counts), sum(counts)

    def _warm_up(self, seconds: float) -> Sampler:
        self._sample_seconds = 1e-9
        return lambda: None

    def _take_samples(self, sampler: Sampler, count: int) -> None:
        stamps = np.zeros((5, 1, count), dtype=np.int64)
        stamps[DURATION, 0] = 1e9 * self._series[self._position : self._position + count]
        self.samples.stamps = np.concatenate([self.samples.stamps, stamps], axis=2)
        self._position += count


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Results over many trials."""

    covered: float  # share of intervals that contain the median
    printed: float  # share of trials with an interval
    samples: float  # mean number of samples
    half_width: float  # median, relative to the median time


def summarize(estimates: list[tuple[Estimate, int]], true_median: float) -> Coverage:
    covered = []
    half_widths = []
    for estimate, _ in estimates:
        if estimate.low is not None and estimate.high is not None:
            covered.append(estimate.low <= true_median <= estimate.high)
            half_widths.append((estimate.high - estimate.low) / 2 / 1e9)
    return Coverage(
        covered=float(np.mean(covered)) if covered else math.nan,
        printed=len(covered) / len(estimates),
        samples=float(np.mean([count for _, count in estimates])),
        half_width=float(np.median(half_widths)) if half_widths else math.nan,
    )


def simulate(noise: Noise, trials: int, gap: int, seed: int) -> Coverage:
    """Return the coverage of parbench's intervals."""
    random = np.random.default_rng(seed)
    measure = Measure()
    num_samples = measure.max_iterations + BLOCKS * (gap + 3)
    estimates = []
    for _ in range(trials):
        series = noise.draw(num_samples, random)
        estimates.append(SimulatedTiming(series, gap, measure).estimate())
    return summarize(estimates, 1e9 * noise.compute_median())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=400)
    parser.add_argument("--gap", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(f"{options.trials} trials, {BLOCKS} blocks, gaps of {options.gap} samples")
    titles = ("covered", "printed", "+-", "samples")
    print(f"{'noise':24}" + "".join(f"{title:>10}" for title in titles))
    for noise in list_noises():
        coverage = simulate(noise, options.trials, options.gap, options.seed)
        cells = [
            f"{coverage.covered:.3f}",
            f"{coverage.printed:.2f}",
            f"{coverage.half_width:.3f}",
            f"{coverage.samples:.0f}",
        ]
        print(f"{noise.name:18}{noise.sigma:6.2f}" + "".join(f"{cell:>10}" for cell in cells))


if __name__ == "__main__":
    main()
