"""What rows and fits say under noise that is known: grades, whether a launch was steady, and intervals of fits.

python -m tests.studies.fits_and_rows [--trials 300] prints three tables. Grades: how a row is graded at 2, 3 and 5
launches of 200 iterations each, under noise within launches, between them, and modes that a launch keeps. Steadiness:
how often noise alone is called anything but flat, and how often a late warm-up, a drift and a slow half are found.
Fits: how often the printed intervals of latency and bandwidth hold the truth at 2 to 10 launches, and how wide they
are, where launches scatter by 3 to 20 % and half of that variance is shared by all sizes of a launch. A script, not a
test: test_stats.py and test_fit.py in tests/bench/results and tests/reports/analysis/test_summary.py hold a part.
"""

import argparse
import math
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from parbench.bench.results.fit import Point, fit
from parbench.bench.results.stats import grade, median, scatter, steadiness

Series = NDArray[np.float64]
SIZES = [1024 * 4**i for i in range(8)]
LATENCY, BANDWIDTH = 20e-6, 3e9


def autocorrelated(random: np.random.Generator, n: int, rho: float) -> Series:
    """Return normal noise of variance one whose neighbours correlate by ``rho`` (AR(1))."""
    values = random.normal(size=n)
    for i in range(1, n):
        values[i] = rho * values[i - 1] + math.sqrt(1 - rho * rho) * values[i]
    return values


def modes(
    random: np.random.Generator, n: int, dwell: int, share: float = 0.4, factor: float = 1.5
) -> Series:
    """Return factors of a slow mode that is left and entered every ``dwell`` iterations or so."""
    levels: list[float] = []
    while len(levels) < n:
        levels += [factor if random.random() < share else 1.0] * int(random.geometric(1 / dwell))
    return np.array(levels[:n])


def launches(
    random: np.random.Generator, n: int, within: float, between: float, mode: float, share: float
) -> Series:
    """Return times of launches, a row each; a launch is slower by the factor ``mode`` in that ``share`` of them."""
    level = between * random.normal(size=(n, 1)) + math.log(mode) * (random.random((n, 1)) < share)
    return np.exp(level + within * random.normal(size=(n, 200)))


# sigma within and between launches, factor of a slow mode that a launch keeps, and its share
GRADED: Mapping[str, tuple[float, float, float, float]] = {
    "within .02": (0.02, 0.0, 1.0, 0.0),
    "within .6, known to 5 %": (0.6, 0.0, 1.0, 0.0),
    "between .03": (0.05, 0.03, 1.0, 0.0),
    "between .10": (0.05, 0.10, 1.0, 0.0),
    "between .25": (0.05, 0.25, 1.0, 0.0),
    "between .60": (0.05, 0.60, 1.0, 0.0),
    "mode x1.5 kept by 40 %": (0.02, 0.0, 1.5, 0.4),
    "mode x3 kept by 40 %": (0.02, 0.0, 3.0, 0.4),
}


def print_grades(trials: int) -> None:
    print(f"grades of rows, {trials} rows each: stable / fair / noisy / very noisy")
    random = np.random.default_rng(1)
    for name, noise in GRADED.items():
        told = []
        for n in (2, 3, 5):
            times = [launches(random, n, *noise) for _ in range(trials)]
            graded = Counter(grade(scatter([median(one) for one in row.tolist()])) for row in times)
            shares = (graded[word] / trials for word in ("stable", "fair", "noisy", "very noisy"))
            told.append(f"{n} launches {' / '.join(f'{share:.2f}' for share in shares)}")
        print(f"{name:26} {'   '.join(told)}", flush=True)


def made(
    n: int, shape: str, sigma: float, rho: float = 0.0
) -> Callable[[np.random.Generator], Series]:
    place = np.arange(n) / n
    shapes = {
        "noise": np.ones(n),
        "warm-up, a quarter": np.where(place < 0.25, 1.5, 1.0),
        "drift to x1.5": 1 + 0.5 * place,
        "slow half": np.where(place < 0.5, 1.0, 1.5),
    }

    def series(random: np.random.Generator) -> Series:
        level = modes(random, n, int(shape[6:])) if shape.startswith("dwell") else shapes[shape]
        return level * np.exp(sigma * autocorrelated(random, n, rho))

    return series


STEADY: Mapping[str, tuple[str, float, float]] = {
    **{f"noise {sigma}": ("noise", sigma, 0.0) for sigma in (0.02, 0.1, 0.3, 0.6)},
    **{
        f"AR(1) {rho}, {sigma}": ("noise", sigma, rho) for rho in (0.3, 0.6) for sigma in (0.1, 0.6)
    },
    **{
        f"{shape}, {sigma}": (shape, sigma, 0.0)
        for shape in ("warm-up, a quarter", "drift to x1.5", "slow half")
        for sigma in (0.1, 0.3)
    },
    **{f"slow mode, dwell {dwell}": (f"dwell {dwell}", 0.05, 0.0) for dwell in (20, 100)},
}


def print_steadiness(trials: int) -> None:
    counts = (20, 40, 100, 300, 1000)
    print(f"\nshare of launches that are not called flat, {trials} launches each")
    print(f"{'iterations':26}" + "".join(f"{n:>8}" for n in counts))
    for name, (shape, sigma, rho) in STEADY.items():
        told = ""
        for n in counts:
            random, series = np.random.default_rng(n), made(n, shape, sigma, rho)
            told += f"{sum(steadiness(series(random).tolist()) != 'flat' for _ in range(trials)) / trials:8.3f}"
        print(f"{name:26}{told}", flush=True)


def curve(random: np.random.Generator, seconds: Series, launches: int, noise: float) -> list[Point]:
    logs = random.normal(size=(launches, 1)) + random.normal(size=(launches, len(SIZES)))
    times = seconds * np.exp(noise * math.sqrt(0.5) * logs)
    merged = np.exp(np.log(times).mean(axis=0))
    return [
        Point(
            size_bytes=size,
            seconds=float(merged[i]),
            launches=dict(enumerate(times[:, i].tolist())),
        )
        for i, size in enumerate(SIZES)
    ]


def print_fits(trials: int) -> None:
    print(
        f"\nfits, {trials} each: coverage of latency, of bandwidth (their median half-widths), and false knees"
    )
    seconds = LATENCY + np.array(SIZES) / BANDWIDTH
    for noise in (0.03, 0.1, 0.2):
        told = []
        for n in (2, 3, 5, 10):
            random, held, widths, knees = np.random.default_rng(n), np.zeros(2), [], 0
            for _ in range(trials):
                found = fit(curve(random, seconds, n, noise))
                assert found is not None
                first, last = found.segments[0], found.segments[-1]
                low, high = last.bytes_per_second_low or 0.0, last.bytes_per_second_high or math.inf
                held += (
                    first.latency_low <= LATENCY <= first.latency_high,
                    low <= BANDWIDTH <= high,
                )
                ends = (first.latency_high - first.latency_low, high - low)
                widths.append((ends[0] / 2 / LATENCY, ends[1] / 2 / BANDWIDTH))
                knees += len(found.segments) > 1
            latency, bandwidth = np.median(widths, axis=0)
            shares = held / trials
            told.append(
                f"{n}: {shares[0]:.3f} {shares[1]:.3f} ({latency:.2f} {bandwidth:.2f}) {knees / trials:.3f}"
            )
        print(f"noise {noise:<5} launches {'   '.join(told)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=300)
    trials = parser.parse_args().trials
    print_grades(trials)
    print_steadiness(trials)
    print_fits(trials)


if __name__ == "__main__":
    main()
