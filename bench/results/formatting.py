"""Numbers as text: three significant digits, ``-`` if unknown."""

import math
from collections.abc import Callable, Sequence
from numbers import Real

from parbench.bench.text import escape_unprintable, format_size

_ROUNDING_ERROR = 1e-6
"""The magnitude below which a number prints as 0. The difference of two sums has such errors."""
UNKNOWN = "-"
"""The text of an unknown value."""
GIGA = 1e9
"""The number of B/s in one GB/s."""
_SCALES = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")),
    "B": ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")),
}
"""Pairs of the size and the name of larger and smaller units, from the largest, by unit."""


def format_number(value: float | None) -> str:
    """Return ``value`` with three significant digits, never in scientific notation.

    Returns ``-`` for None, NaN and infinity.
    """
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if abs(value) <= _ROUNDING_ERROR:
        return "0"
    rounded = float(f"{value:.2e}")
    decimals = 2 - math.floor(math.log10(abs(rounded)))
    return f"{rounded:.{max(0, decimals)}f}"


def format_quantity(value: float | None, unit: str) -> str:
    """Return a number with its unit as text, such as ``12.3 us``.

    ``unit`` is the unit of ``value``. Seconds and bytes are converted to a unit that suits the
    number, such as us or MiB, and B/s to GB/s = 1e9 B/s. Returns ``-`` for None, NaN and infinity.
    """
    if value is None or not math.isfinite(value):
        return UNKNOWN
    factor, scaled_unit = _choose_scale(value, unit)
    return f"{format_number(value / factor)} {scaled_unit}".rstrip()


def format_seconds(seconds: float | None) -> str:
    """Return a duration as text in s, ms or us, ``-`` if it is unknown."""
    return format_quantity(seconds, "s")


def format_gigabytes(bytes_per_second: float | None) -> str:
    """Return a bandwidth as text in GB/s = 1e9 B/s without the unit, ``-`` if it is unknown."""
    if bytes_per_second is None:
        return UNKNOWN
    return format_number(bytes_per_second / GIGA)


def format_percent(fraction: float | None) -> str:
    """Return a fraction as text in per cent: ``12.3 %`` for 0.123, ``-`` if it is unknown."""
    if fraction is None or not math.isfinite(fraction):
        return UNKNOWN
    return f"{format_number(100 * fraction)} %"


def format_bytes(value: float | None) -> str:
    """Return a number of bytes as text in B, KiB, MiB, GiB or TiB, ``-`` if it is unknown."""
    return format_quantity(value, "B")


def format_count(value: float | None) -> str:
    """Return a number as text without decimals, ``-`` if it is unknown."""
    return UNKNOWN if value is None else f"{value:.0f}"


def format_case_size(value: object) -> str:
    """Return a number of bytes as ``--set size_bytes`` takes it, such as ``64K`` for 65536.

    The units K, M, G and T are powers of 1024. Returns ``-`` if ``value`` is not a number.
    """
    if not isinstance(value, Real):
        return UNKNOWN
    return format_size(round(float(value)))


def format_with_interval(
    numbers: Sequence[float], unit: str, format_value: Callable[[float], str]
) -> str:
    """Return a value with its 95 % interval as text, such as ``12.3 us [11.9, 12.8]``.

    ``numbers`` holds the value and the bounds of the interval. If ``unit`` is ``s`` or ``B``, all
    numbers print in the unit that suits the largest. Otherwise ``format_value`` returns a number as
    text.
    """
    if unit not in _SCALES:
        value, low, high = map(format_value, numbers)
        return f"{value} [{low}, {high}]"
    factor, scaled_unit = _choose_scale(max(map(abs, numbers)), unit)
    value, low, high = (format_number(number / factor) for number in numbers)
    return f"{value} {scaled_unit} [{low}, {high}]"


def to_single_line(text: str) -> str:
    """Return ``text`` on one line: white space becomes blanks, control characters are escaped."""
    return escape_unprintable(" ".join(text.split()))


def _choose_scale(value: float, unit: str) -> tuple[float, str]:
    """Return the unit in which a value is printed, as a pair of its size in ``unit`` and its name.

    ``unit`` is the unit of the value. The result is the largest related unit of which the value,
    rounded to three digits, is at least 1. For example, 0.005 s gives (1e-3, ``ms``).
    """
    if unit == "B/s":
        return GIGA, "GB/s"
    scales = _SCALES.get(unit, ((1.0, unit),))
    # 999.7 ms print as 1.00 s, so the rounded value counts too.
    magnitude = max(abs(value), abs(float(f"{value:.2e}")))
    return next((scale for scale in scales if magnitude >= scale[0]), scales[-1])
