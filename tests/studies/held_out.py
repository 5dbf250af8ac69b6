"""What a fit says of sizes it has not seen: every other size of a run's curves is held out and predicted.

python tests/studies/held_out.py RUN prints, for each operation, the median and the largest distance of the predicted
time from the measured one, relative to the measured, and the same over all. A script, not a test: it judges a machine
too.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from parbench.bench.results.fit import MIN_SIZES, Point, fit
from parbench.bench.results.runs import load_run
from parbench.bench.results.stats import median
from parbench.reports.analysis.fits import Curve, fit_curves, points_of
from parbench.reports.analysis.labels import operation
from parbench.reports.analysis.summary import summarize


def held_out_errors(points: Sequence[Point]) -> list[float]:
    """Return the relative errors of the times predicted for every other point; none if too few are left."""
    found = fit(points[::2])
    held_out = points[1:-1:2]  # what lies beyond all known sizes is another question
    return [] if found is None else [found.predict(point.size_bytes) / point.seconds - 1 for point in held_out]


def label(curve: Curve) -> str:
    case = curve.rows[0].case
    return f"{operation(case)}, {case.params['mode']}, {case.params['dtype']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    rows = summarize(load_run(parser.parse_args().run)).rows
    everything = []
    for curve in fit_curves(rows, None):
        points = points_of(curve.rows)
        if len(points) < 2 * MIN_SIZES:
            continue
        errors = [abs(error) for error in held_out_errors(points)]
        everything += errors
        print(f"{label(curve):44} {len(errors):3} held out  median {median(errors):6.1%}  largest {max(errors):6.1%}")
    if everything:
        print(f"{'all':44} {len(everything):3} held out  median {median(everything):6.1%}")


if __name__ == "__main__":
    main()
