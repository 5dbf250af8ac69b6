"""Thresholds measured on a machine: the same code compared with itself (A/A).

The threshold of a series is the smallest one with which at most 1 % of the comparisons between its
repetitions find a change. A file keeps it under the fingerprint of the series. Noise that did not
occur while it was measured is not included.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import stdev

import msgspec

from parbench.bench.files import (
    convert_read_errors,
    convert_write_errors,
    decode_json,
    encode_json,
    read_file,
    replace_file,
)
from parbench.bench.results.formatting import format_percent
from parbench.bench.results.runs import Run
from parbench.bench.results.stats import quantile
from parbench.bench.text import UserError, format_table
from parbench.reports.compare.environment import collect_points
from parbench.reports.compare.rule import Rule
from parbench.reports.run_data import RunData
from parbench.reports.stats import (
    Effect,
    Repetitions,
    estimate_paired_effect,
    estimate_unpaired_effect,
)

THRESHOLDS_FILE = Path("runs/thresholds.json")
SCHEMA_VERSION = 2
Times = Sequence[float]
FALSE_ALARM_RATE = 0.01
MIN_REPETITIONS = 10  # Two sides of the fewest repetitions that a comparison accepts.


class Threshold(msgspec.Struct, frozen=True, kw_only=True):
    """The threshold of a series on the machine where it was measured."""

    series: str
    host: str
    measured: str
    """The time in UTC."""
    repetitions: int
    noise: float
    """The standard deviation of the logarithms of the times."""
    min_effect: float
    """Smaller changes of the time are ignored. A fraction."""


class _ThresholdFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a file of thresholds, keyed by fingerprint."""

    schema_version: int
    thresholds: dict[str, Threshold]


def measure_thresholds(runs: Sequence[Run], rule: Rule) -> dict[str, Threshold]:
    """Return the threshold of each series that at least ten of the runs measured, by fingerprint.

    The runs have one repetition each and are sorted by time.
    """
    times: dict[str, dict[int, float]] = {}
    labels: dict[str, str] = {}
    for number, run in enumerate(runs):
        for point in collect_points(run):
            if point.seconds is not None:
                fingerprint = point.series.fingerprint
                times.setdefault(fingerprint, {})[number] = point.seconds
                labels[fingerprint] = point.series.case.label
    return {
        fingerprint: Threshold(
            series=labels[fingerprint],
            host=runs[-1].info.host,
            measured=runs[-1].info.started,
            repetitions=len(repetitions),
            noise=stdev(map(math.log, repetitions.values())),
            min_effect=compute_threshold(repetitions, rule),
        )
        for fingerprint, repetitions in times.items()
        if len(repetitions) >= MIN_REPETITIONS
    }


def compute_threshold(repetitions: Repetitions, rule: Rule) -> float:
    """Return the threshold of a series as a fraction, at least the threshold of the rule.

    The comparisons are of earlier with later repetitions, as of two runs, and of interleaved ones
    in pairs. ``repetitions`` are in seconds. The result is rounded up to a tenth of a percent.
    """
    times = [repetitions[number] for number in sorted(repetitions)]
    required = []
    for size in sorted({rule.min_repetitions, len(times) // 2}):
        for estimate, sides in (
            (estimate_unpaired_effect, _split_into_runs(times, size)),
            (estimate_paired_effect, _split_into_pairs(times, size)),
        ):
            for base, new in sides:
                effect = estimate(dict(enumerate(base)), dict(enumerate(new)))
                required.append(_find_required_threshold(effect))
    threshold = quantile(required, 1 - FALSE_ALARM_RATE)
    return max(rule.min_effect, math.ceil(1000 * threshold - 1e-9) / 1000)


def _find_required_threshold(effect: Effect | None) -> float:
    """Return the smallest threshold that is not below the whole 95 % interval of the change."""
    if effect is None or effect.low is None or effect.high is None:
        return 0.0
    return max(effect.low, 1 / (1 + effect.high) - 1, 0.0)


def _split_into_runs(times: Times, size: int) -> Iterator[tuple[Times, Times]]:
    """Yield all pairs of disjoint parts of ``size`` consecutive repetitions, the earlier first."""
    for start in range(len(times) - 2 * size + 1):
        for other in range(start + size, len(times) - size + 1):
            yield times[start : start + size], times[other : other + size]


def _split_into_pairs(times: Times, size: int) -> Iterator[tuple[Times, Times]]:
    """Yield both sides of consecutive repetitions in the order A B B A."""
    for start in range(len(times) - 2 * size + 1):
        window = times[start : start + 2 * size]
        base = [seconds for i, seconds in enumerate(window) if i % 4 in (0, 3)]
        new = [seconds for i, seconds in enumerate(window) if i % 4 in (1, 2)]
        yield base, new


def find_fingerprints(data: RunData) -> dict[str, str]:
    """Return the fingerprints of series, keyed by the id of the case."""
    points = collect_points(data.run, data.results)
    return {point.series.case.id: point.series.fingerprint for point in points}


def parse_percentage(text: str) -> float:
    """Return a percentage as a fraction: ``3%`` is 0.03."""
    match = re.fullmatch(r"\s*(\d*\.?\d+)\s*%\s*", text, re.ASCII)
    if match is None or float(match[1]) > 100:
        raise UserError(
            f"--min-effect {text!r} is not a percentage: write a number from 0% to 100%, such as 3%"
        )
    return float(match[1]) / 100


def find_thresholds(text: str | None) -> tuple[float, dict[str, Threshold]]:
    """Return the minimum effect as a fraction, and measured thresholds keyed by fingerprint.

    ``text`` is a percentage that applies to all series, or a file with thresholds of its series.
    The default applies to other series. None stands for the default file, if it exists.
    """
    if text is None:
        file = THRESHOLDS_FILE
        return Rule().min_effect, read_thresholds(file) if file.exists() else {}
    if text.strip().endswith("%") or not Path(text).exists():
        return parse_percentage(text), {}
    return Rule().min_effect, read_thresholds(Path(text))


def read_thresholds(path: Path) -> dict[str, Threshold]:
    """Return the thresholds in a file by fingerprint. Raises ``UserError`` if it is not valid."""
    if not path.exists():
        raise UserError(f"no such file: {path}. Measure thresholds with parbench aa")
    with convert_read_errors(path, "does not contain thresholds as parbench aa writes them"):
        content = decode_json(read_file(path), _ThresholdFile)
    if content.schema_version > SCHEMA_VERSION:
        raise UserError(
            f"{path} has schema version {content.schema_version}. "
            f"This parbench reads up to {SCHEMA_VERSION}"
        )
    return content.thresholds


def save_thresholds(path: Path, thresholds: Mapping[str, Threshold]) -> None:
    """Write thresholds to a file. Those of other series in the file stay."""
    existing = read_thresholds(path) if path.exists() else {}
    content = _ThresholdFile(schema_version=SCHEMA_VERSION, thresholds={**existing, **thresholds})
    with convert_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, encode_json(content))


def format_thresholds(thresholds: Mapping[str, Threshold]) -> str:
    """Return a table, the noisiest series first."""
    rows = [("noise", "threshold", "series")]
    for threshold in sorted(thresholds.values(), key=lambda threshold: -threshold.min_effect):
        percentage = f"{100 * threshold.min_effect:.1f} %"
        rows.append((format_percent(threshold.noise), percentage, threshold.series))
    return format_table(rows, right_aligned=(0, 1)) + "\n"


def describe_thresholds(thresholds: Iterable[Threshold | None]) -> list[str]:
    """Return a sentence about the highest of the thresholds that are known, if there are any."""
    known = [threshold for threshold in thresholds if threshold is not None]
    if not known:
        return []
    highest = max(known, key=lambda threshold: threshold.min_effect)
    others = f", the highest of {len(known)} series" if len(known) > 1 else ""
    day = datetime.fromisoformat(highest.measured).date()
    return [
        f"Measured by parbench aa: threshold {100 * highest.min_effect:.1f} %, measured on "
        f"{highest.host} on {day} with {highest.repetitions} repetitions{others}."
    ]
