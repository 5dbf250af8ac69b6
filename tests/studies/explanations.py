"""What explanations say where there is nothing to explain, and whether they find what is there, on simulated ranks.

python tests/studies/explanations.py [--trials 200] prints a line for each scatter of ranks' steps, number of ranks and
of turns: the mean over launches in standard deviations of one launch (0 is unbiased), then how often the 95 % interval
holds the truth, within a launch and over five. ``ect`` and ``compute_slowdown`` are of steps that communication does
not slow, then, "+5 ms", of such as it slows by 5 ms on every rank; ``straggler_wait`` is of ranks that wait alike, its
excess over what any of them waits, then of one that waits 20 ms more in each turn. "max of differences" and "max of
means" are of maxima as they were once taken. Scatter is lognormal, ``spiky`` with one step in ten three times as long.
A script, not a test: tests/bench/results/test_turns.py holds a small part.
"""

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from parbench.bench.results.metrics import MetricValue, merge_metrics, values
from parbench.bench.results.turns import cross_fitted
from parbench.workloads.step.overlap import differences

STEP, SLOWED, LATE = 0.050, 0.005, 0.020
LAUNCHES = 5
SCATTERS = (0.05, 0.3, 0.6)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Lognormal ``sigma`` of a step on one rank, half of its variance the rank's own in all turns of a launch."""

    sigma: float
    ranks: int
    turns: int
    spiky: bool = False

    def draw(self, source: np.random.Generator, ranks_own: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return seconds by rank and turn."""
        size = (self.ranks, self.turns)
        seconds = STEP * ranks_own[:, None] * np.exp(source.normal(0, self.sigma * math.sqrt(0.5), size))
        return np.where(source.random(size) < 0.1, 3 * seconds, seconds) if self.spiky else seconds

    def own(self, source: np.random.Generator) -> NDArray[np.float64]:
        return np.exp(source.normal(0, self.sigma * math.sqrt(0.5), self.ranks))


@dataclass
class Tally:
    """What trials found of one metric whose truth is known."""

    truth: float
    found: list[float] = field(default_factory=list)
    held: list[bool] = field(default_factory=list)
    held_over_launches: list[bool] = field(default_factory=list)

    def add(self, metrics: list[MetricValue], name: str) -> None:
        merged = merge_metrics([{name: metric} for metric in metrics])[name]
        self.found += [metric.value for metric in metrics if metric.value is not None]
        self.held += [self.holds(metric) for metric in metrics]
        self.held_over_launches.append(self.holds(merged))

    def holds(self, metric: MetricValue) -> bool:
        return metric.low is not None and metric.high is not None and metric.low <= self.truth <= metric.high

    @property
    def words(self) -> str:
        off = (np.mean(self.found) - self.truth) / np.std(self.found)
        return f"{off:+6.2f} {np.mean(self.held):5.2f} {np.mean(self.held_over_launches):5.2f}"


def steps(source: np.random.Generator, place: Place, slowed: float) -> tuple[dict[str, MetricValue], float]:
    """Return what one launch says of steps, and what the former maximum over ranks of differences would say."""
    own = place.own(source)
    drawn = {kind: place.draw(source, own) for kind in ("plain", "traced", "watched", "silenced")}
    drawn["watched"] = drawn["watched"] + slowed
    told = [{kind: seconds[rank].tolist() for kind, seconds in drawn.items()} for rank in range(place.ranks)]
    former = np.median(drawn["watched"], axis=1) - np.median(drawn["silenced"], axis=1)
    return differences(told, told), float(former.max())


def waits(source: np.random.Generator, place: Place, late: float) -> tuple[MetricValue, float]:
    """Return what one launch says of ranks' waits, and a maximum over ranks of means."""
    seconds = place.draw(source, np.ones(place.ranks))
    seconds[place.ranks // 2] += late
    metric = values({"straggler_wait": cross_fitted(seconds.tolist())})["straggler_wait"]
    return metric, float(seconds.mean(axis=1).max())


def study(place: Place, trials: int, seed: int) -> Mapping[str, str]:
    source = np.random.default_rng(seed)
    mean = STEP * math.exp(place.sigma**2 / 4) * (1.2 if place.spiky else 1.0)
    names = ("ect", "compute_slowdown")
    tallies = {(name, slowed): Tally(slowed) for slowed in (0.0, SLOWED) for name in names}
    tallies |= {("straggler_wait", late): Tally(mean + late) for late in (0.0, LATE)}
    formers: list[float] = []
    former_waits: list[float] = []
    for _ in range(trials):
        for slowed in (0.0, SLOWED):
            launches = [steps(source, place, slowed) for _ in range(LAUNCHES)]
            for name in names:
                tallies[name, slowed].add([metrics[name] for metrics, _ in launches], name)
            formers += [former for _, former in launches] if not slowed else []
        for late in (0.0, LATE):
            waited = [waits(source, place, late) for _ in range(LAUNCHES)]
            tallies["straggler_wait", late].add([metric for metric, _ in waited], "straggler_wait")
            former_waits += [former for _, former in waited] if not late else []
    found = {
        f"{name}{f' +{1e3 * there:g} ms' if there else ''}": tally.words for (name, there), tally in tallies.items()
    }
    found["max of differences"] = f"{np.mean(formers) / np.std(formers):+6.2f}"
    found["max of means"] = f"{(np.mean(former_waits) - mean) / np.std(former_waits):+6.2f}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 64, 256])
    parser.add_argument("--turns", type=int, nargs="+", default=[3, 12])
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    places = [
        Place(sigma=sigma, ranks=ranks, turns=turns, spiky=spiky)
        for sigma, spiky in (*((sigma, False) for sigma in SCATTERS), (0.05, True))
        for ranks in options.ranks
        for turns in options.turns
    ]
    for i, place in enumerate(places):
        found = study(place, options.trials, options.seed)
        if i == 0:
            print("scatter   ranks turns", *(f"{name:>22}" for name in found), sep="  ")
        print(
            f"{place.sigma:4.2f} {'spiky' if place.spiky else '':5}{place.ranks:5} {place.turns:5}",
            *(f"{words:>22}" for words in found.values()),
            sep="  ",
            flush=True,
        )


if __name__ == "__main__":
    main()
