"""Thresholds measured on a machine: the same code compared with itself (A/A).

The threshold of a series is the smallest change with which at most 1 % of the comparisons between
its repetitions are false alarms. A file keeps it under the fingerprint of the series. Noise that
did not occur while it was measured is not included.
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
"""The default file, relative to the current folder."""
SCHEMA_VERSION = 2
"""The newest version of the file that can be read, and the version that is written."""
Times = Sequence[float]
"""The times of a series in seconds, one for each repetition, in the order of time."""
FALSE_ALARM_RATE = 0.01
"""The fraction of comparisons of equal code that may find a change."""
MIN_REPETITIONS = 10  # Two sides of the fewest repetitions that a comparison accepts.


class Threshold(msgspec.Struct, frozen=True, kw_only=True):
    """The threshold for changes of one case's time that ``parbench aa`` measured on one machine."""

    series: str
    """The label of the case."""
    host: str
    """The name of the host on which ``parbench aa`` measured."""
    measured: str
    """The time of the measurement in UTC, in ISO format."""
    repetitions: int
    """The number of repetitions from which the threshold was computed."""
    noise: float
    """The standard deviation of the natural logarithms of the times of repetitions."""
    min_effect: float
    """The threshold as a fraction: smaller changes of the time are ignored."""


class _ThresholdFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a file that ``parbench aa`` writes: the least relevant change for each case."""

    schema_version: int
    """The version of this format, at most 2."""
    thresholds: dict[str, Threshold]
    """The threshold for changes of each case's time, keyed by fingerprint.

    A fingerprint is a hash of the case, its ranks, nodes, backend and device, and its environment.
    """


def measure_thresholds(runs: Sequence[Run], rule: Rule) -> dict[str, Threshold]:
    """Return the threshold of each case, keyed by the fingerprint of the case in its environment.

    Cases that fewer than ``MIN_REPETITIONS`` of the runs measured are left out.

    Args:
        runs: runs of the same code with one repetition each, oldest first.
        rule: the least threshold, and the least number of repetitions of a comparison.
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
    """Return the threshold of a case as a fraction, rounded up to a tenth of a percent.

    All repetitions are of the same code, so each change is a false alarm. Earlier repetitions are
    compared with later ones, as in two runs, and interleaved repetitions in pairs. At most 1 % of
    these comparisons find a change that is significantly larger than the threshold.

    Args:
        repetitions: the times in seconds, keyed by the number of the repetition in the order of
            time.
        rule: the least threshold, and the least number of repetitions of a comparison.
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
    """Return the smallest threshold with which a comparison of equal code finds no change.

    It is the end of the 95 % interval of the change that is nearer to no change, as a fraction. 0
    if the interval contains no change, or if it is unknown. ``effect`` is the change with its
    interval.
    """
    if effect is None or effect.low is None or effect.high is None:
        return 0.0
    return max(effect.low, 1 / (1 + effect.high) - 1, 0.0)


def _split_into_runs(times: Times, size: int) -> Iterator[tuple[Times, Times]]:
    """Yield (earlier times, later times) of all pairs of disjoint parts of consecutive repetitions.

    Each part has the times of ``size`` repetitions in seconds.
    """
    for start in range(len(times) - 2 * size + 1):
        for other in range(start + size, len(times) - size + 1):
            yield times[start : start + size], times[other : other + size]


def _split_into_pairs(times: Times, size: int) -> Iterator[tuple[Times, Times]]:
    """Yield (times of A, times of B), where repetitions are taken in the order A B B A A B B A.

    Each side has ``size`` of ``2 * size`` consecutive repetitions, in seconds.
    """
    for start in range(len(times) - 2 * size + 1):
        window = times[start : start + 2 * size]
        base = [seconds for i, seconds in enumerate(window) if i % 4 in (0, 3)]
        new = [seconds for i, seconds in enumerate(window) if i % 4 in (1, 2)]
        yield base, new


def find_fingerprints(data: RunData) -> dict[str, str]:
    """Return a fingerprint for each case of a run, keyed by the id of the case.

    The fingerprint is a hash of the case, its ranks and its environment.
    """
    points = collect_points(data.run, data.results)
    return {point.series.case.id: point.series.fingerprint for point in points}


def parse_percentage(text: str) -> float:
    """Return the fraction for a percentage as text: 0.03 for ``3%``.

    Raises ``UserError`` unless it is a number from 0 to 100 with a percent sign.
    """
    match = re.fullmatch(r"\s*(\d*\.?\d+)\s*%\s*", text, re.ASCII)
    if match is None or float(match[1]) > 100:
        raise UserError(
            f"--min-effect {text!r} is not a percentage: write a number from 0% to 100%, such as 3%"
        )
    return float(match[1]) / 100


def find_thresholds(text: str | None) -> tuple[float, dict[str, Threshold]]:
    """Return (minimum effect for all cases, thresholds that were measured for some cases).

    The minimum effect is a fraction: smaller changes of the time are ignored. The thresholds are
    keyed by the fingerprint (hash) of the case in its environment. They are empty if ``text`` is a
    percentage.

    Args:
        text: the value of ``--min-effect``: a percentage for all cases, or a file of thresholds.
            None stands for the default file, if it exists.
    """
    if text is None:
        file = THRESHOLDS_FILE
        return Rule().min_effect, read_thresholds(file) if file.exists() else {}
    if text.strip().endswith("%") or not Path(text).exists():
        return parse_percentage(text), {}
    return Rule().min_effect, read_thresholds(Path(text))


def read_thresholds(path: Path) -> dict[str, Threshold]:
    """Return the thresholds in a file, keyed by the fingerprint of a case in its environment.

    Raises ``UserError`` if the file does not exist or is not valid.
    """
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
    """Write thresholds to a file, and keep those of other cases that it contains already.

    ``thresholds`` are keyed by the fingerprint of a case in its environment.
    """
    existing = read_thresholds(path) if path.exists() else {}
    content = _ThresholdFile(schema_version=SCHEMA_VERSION, thresholds={**existing, **thresholds})
    with convert_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, encode_json(content))


def format_thresholds(thresholds: Mapping[str, Threshold]) -> str:
    """Return a table of thresholds as text: noise, threshold and label of each case.

    The case with the highest threshold comes first.
    """
    rows = [("noise", "threshold", "series")]
    for threshold in sorted(thresholds.values(), key=lambda threshold: -threshold.min_effect):
        percentage = f"{100 * threshold.min_effect:.1f} %"
        rows.append((format_percent(threshold.noise), percentage, threshold.series))
    return format_table(rows, right_aligned=(0, 1)) + "\n"


def describe_thresholds(thresholds: Iterable[Threshold | None]) -> list[str]:
    """Return a sentence about the highest of the measured thresholds, empty if there are none.

    ``thresholds`` has an element for each compared case, None if its threshold was not measured.
    """
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
