"""Thresholds measured on a machine: the same code compared with itself (A/A).

The threshold of a series is the smallest change with which at most 1 % of the comparisons between
its repetitions are false alarms. A file keeps it under the fingerprint of the series. Noise that
did not occur while it was measured is not included.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from parbench.bench.files import (
    convert_read_errors,
    convert_write_errors,
    decode_json,
    encode_json,
    replace_file,
)
from parbench.bench.results.runs import Run
from parbench.bench.results.stats import quantile
from parbench.bench.text import UserError
from parbench.reports.compare.environment import collect_points
from parbench.reports.compare.rule import Rule
from parbench.reports.stats import estimate_unpaired_effect

THRESHOLDS_FILE = Path("runs/thresholds.json")
"""The default file of thresholds, relative to the current folder."""
FALSE_ALARM_RATE = 0.01
"""The accepted fraction of comparisons of equal code that report a change."""
MIN_REPETITIONS = 2 * Rule().min_repetitions
"""The least number of repetitions from which a threshold is computed: two sides of five."""


class Threshold(msgspec.Struct, frozen=True, kw_only=True):
    """The threshold for changes of one case's time that ``parbench aa`` measured on one machine."""

    series: str
    """The label of the case."""
    min_effect: float
    """The threshold as a fraction: smaller changes of the time are ignored."""


def measure_thresholds(runs: Sequence[Run]) -> dict[str, Threshold]:
    """Return the threshold of each case for changes of its time.

    The key is the fingerprint, a hash of the case with its ranks and its environment.

    Cases that fewer than ``MIN_REPETITIONS`` of the runs measured are left out. ``runs`` are of the
    same code with one repetition each, oldest first.
    """
    times: dict[str, list[float]] = {}
    labels: dict[str, str] = {}
    for run in runs:
        for point in collect_points(run):
            if point.seconds is not None:
                fingerprint = point.series.fingerprint
                times.setdefault(fingerprint, []).append(point.seconds)
                labels[fingerprint] = point.series.case.label
    return {
        fingerprint: Threshold(
            series=labels[fingerprint],
            min_effect=compute_threshold(repetitions),
        )
        for fingerprint, repetitions in times.items()
        if len(repetitions) >= MIN_REPETITIONS
    }


def compute_threshold(times: Sequence[float]) -> float:
    """Return the threshold of a case as a fraction: at least 3 %, rounded up to 0.1 %.

    All repetitions are of the same code, so each change is a false alarm. Each five consecutive
    repetitions are compared with each five later ones, as in two runs. At most 1 % of these
    comparisons find a change that is significantly larger than the threshold.

    ``times`` are in seconds, one for each repetition, in the order of time.
    """
    size = Rule().min_repetitions
    sides = [dict(enumerate(times[start : start + size])) for start in range(len(times) - size + 1)]
    required = []
    for i, base in enumerate(sides):
        for new in sides[i + size :]:
            effect = estimate_unpaired_effect(base, new)
            if effect is not None and effect.low is not None and effect.high is not None:
                # The end of the interval that is nearer to no change, 0 if it contains no change.
                required.append(max(effect.low, 1 / (1 + effect.high) - 1, 0.0))
    threshold = quantile(required, 1 - FALSE_ALARM_RATE)
    return max(Rule().min_effect, math.ceil(1000 * threshold - 1e-9) / 1000)


def parse_percentage(text: str, *, is_file_allowed: bool = False) -> float:
    """Return the fraction for a percentage as text: 0.03 for ``3%``.

    Raises ``UserError`` unless the text is a number from 0 to 100 with a percent sign. The error
    also names files of thresholds if ``is_file_allowed``.
    """
    match = re.fullmatch(r"\s*(\d*\.?\d+)\s*%\s*", text, re.ASCII)
    if match is None or float(match[1]) > 100:
        if is_file_allowed:
            problem = "is neither a percentage such as 3% nor an existing file of parbench aa"
        else:
            problem = "is not a percentage from 0% to 100%, such as 3%"
        raise UserError(f"--min-effect {text!r} {problem}")
    return float(match[1]) / 100


def find_thresholds(text: str | None) -> tuple[float, dict[str, Threshold]]:
    """Return (minimum effect for all cases, thresholds that were measured for some cases).

    The minimum effect is a fraction: smaller changes of the time are ignored. The thresholds are
    keyed by the fingerprint (hash) of the case in its environment. They are empty if ``text`` is a
    percentage. The minimum effect is 3 % if thresholds were measured.

    Args:
        text: the value of ``--min-effect``: a percentage for all cases, or a file of thresholds.
            None stands for the default file, if it exists.
    """
    file = THRESHOLDS_FILE if text is None else Path(text)
    if file.exists():
        return Rule().min_effect, read_thresholds(file)
    if text is None:
        return Rule().min_effect, {}
    return parse_percentage(text, is_file_allowed=True), {}


def read_thresholds(path: Path) -> dict[str, Threshold]:
    """Return the thresholds of cases in a file, keyed by the fingerprint (hash) of the case.

    Raises ``UserError`` if the file cannot be read or is not valid.
    """
    with convert_read_errors(path, "does not contain thresholds as parbench aa writes them"):
        return decode_json(path.read_bytes(), dict[str, Threshold])


def save_thresholds(path: Path, thresholds: Mapping[str, Threshold]) -> None:
    """Write thresholds to a file, and keep those of other cases that it contains already.

    ``thresholds`` are keyed by the fingerprint, a hash of a case in its environment.
    """
    existing = read_thresholds(path) if path.exists() else {}
    with convert_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, encode_json({**existing, **thresholds}))
