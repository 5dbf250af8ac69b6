"""Numbers as text: three significant digits, ``-`` for what is unknown."""

import math
from collections.abc import Callable, Sequence

from parbench.bench.results.metrics import MetricValue
from parbench.bench.text import escape_unprintable, format_size

_ROUNDING_SECONDS = 1e-12
"""Below it a difference of sums is nothing but rounding."""
UNKNOWN = "-"
GIGA = 1e9
_SCALES = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")),
    "B": ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")),
}


def format_number(value: float | None) -> str:
    """Return ``value`` with three significant digits, never in scientific notation."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value == 0:
        return "0"
    rounded = float(f"{value:.2e}")
    return f"{rounded:.{max(0, 2 - math.floor(math.log10(abs(rounded))))}f}"


def format_quantity(value: float | None, unit: str) -> str:
    """Return a number with its unit: seconds and bytes in the unit that suits them, bandwidths in GB/s = 1e9 B/s."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    factor, shown = _scale(value, unit)
    return f"{format_number(value / factor)} {shown}".rstrip()


def format_seconds(seconds: float | None) -> str:
    return format_quantity(
        seconds if seconds is None or abs(seconds) > _ROUNDING_SECONDS else 0.0, "s"
    )


def format_gigabytes(bytes_per_second: float | None) -> str:
    """Return a bandwidth's number in GB/s = 1e9 B/s, without the unit."""
    return UNKNOWN if bytes_per_second is None else format_number(bytes_per_second / GIGA)


def format_percent(fraction: float | None) -> str:
    return (
        UNKNOWN
        if fraction is None or not math.isfinite(fraction)
        else f"{format_number(100 * fraction)} %"
    )


def format_bytes(value: float | None) -> str:
    return format_quantity(value, "B")


def make_formatter(spec: str) -> Callable[[float | None], str]:
    return lambda value: UNKNOWN if value is None else spec.format(value)


format_count = make_formatter("{:.0f}")


def format_case_size(value: object) -> str:
    """Return a case's size as people write it: ``64K``."""
    return format_size(value) if isinstance(value, int) and not isinstance(value, bool) else UNKNOWN


def format_measurement(metric: MetricValue | None) -> str:
    """Return a metric's value with its interval where it has one: ``12.3 us [11.9, 12.8]``."""
    if metric is None or metric.value is None:
        return UNKNOWN
    text = format_quantity(metric.value, metric.unit)
    return (
        text if metric.low is None or metric.high is None else f"{text} {format_interval(metric)}"
    )


def format_difference(metric: MetricValue | None, text: Callable[[float | None], str]) -> str:
    """Return a difference or factor by ``text``, with its interval where it has one, in the unit of its largest end."""
    if metric is None or metric.value is None or metric.low is None or metric.high is None:
        return text(metric.value if metric else None)
    ends = (metric.value, metric.low, metric.high)
    if metric.unit != "s":
        told, low, high = map(text, ends)
        return f"{told} [{low}, {high}]"
    factor, unit = _scale(max(map(abs, ends)), "s")
    told, low, high = (format_number(end / factor) for end in ends)
    return f"{told} {unit} [{low}, {high}]"


def format_interval(metric: MetricValue | None) -> str:
    if metric is None or metric.value is None or metric.low is None or metric.high is None:
        return UNKNOWN
    factor, _ = _scale(metric.value, metric.unit)
    return f"[{format_number(metric.low / factor)}, {format_number(metric.high / factor)}]"


def to_single_line(text: str) -> str:
    """Return ``text`` on one line that is safe to show: it may quote anything."""
    return escape_unprintable(" ".join(text.split()))


def format_word_counts(pairs: Sequence[tuple[str, int]]) -> str:
    """Return words with how often each occurred: ``precision x4, budget``."""
    return ", ".join(word if count == 1 else f"{word} x{count}" for word, count in pairs) or UNKNOWN


def _scale(value: float, unit: str) -> tuple[float, str]:
    if unit == "B/s":
        return GIGA, "GB/s"
    scales = _SCALES.get(unit, ((1.0, unit),))
    shown = max(
        abs(value), abs(float(f"{value:.2e}"))
    )  # 1,024 bytes are a KiB, as are 999.7 ms a second
    return next((scale for scale in scales if shown >= scale[0]), scales[-1])
