"""The quantities on the axes of figures, with their ticks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parbench.bench.results.formatting import UNKNOWN, format_count, format_number, format_seconds
from parbench.bench.text import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

MAX_X_TICKS = 5
MAX_Y_TICKS = 7
_FACTORS_OF_TEN = ((1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0), (1.0, 2.0, 5.0), (1.0,))


@dataclass(frozen=True, kw_only=True)
class AxisQuantity:
    """The quantity of an axis: its title, the text of a value, and its scale.

    Ticks of ``base`` 2 are powers of two, as of bytes. A linear axis starts at zero.
    """

    title: str
    text: Callable[[float | None], str]
    is_log: bool = True
    base: int = 10

    def make_ticks(self, low: float, high: float, max_ticks: int) -> list[float]:
        """Return round values from ``low`` to ``high``."""
        ticks = _log_ticks(low, high, self.base, max_ticks) if self.is_log else []
        return ticks if len(ticks) > 1 else _linear_ticks(low, high, self.base, max_ticks)


def _format_bytes(value: float | None) -> str:
    return UNKNOWN if value is None else format_size(round(value))


def format_share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{100 * value:.0f} %"


BANDWIDTH = AxisQuantity(title="bus bandwidth (GB/s)", text=format_number)
TIME = AxisQuantity(title="time", text=format_seconds)
SIZE = AxisQuantity(title="message size (bytes, 1024-based)", text=_format_bytes, base=2)
EFFICIENCY = AxisQuantity(title="efficiency", text=format_share, is_log=False)
STEP_TIME = AxisQuantity(title="step time", text=format_seconds, is_log=False)
ITERATIONS = AxisQuantity(title="share of iterations", text=format_share, is_log=False)
TIME_SINCE_START = AxisQuantity(title="time since the start", text=format_seconds, is_log=False)


def count_of(title: str) -> AxisQuantity:
    """Return the quantity of a number of things, such as ranks, which mostly doubles."""
    return AxisQuantity(title=title, text=format_count, base=2)


def set_x_axis(axes: "Axes", quantity: AxisQuantity, low: float, high: float) -> None:
    """Scale the x axis from ``low`` to ``high``, and label it below."""
    axes.set_xscale("log" if quantity.is_log else "linear")
    axes.set_xlim(low, high)
    _set_ticks(axes.xaxis, quantity, quantity.make_ticks(low, high, MAX_X_TICKS))
    axes.set_xlabel(_full_title(quantity))


def set_y_axis(axes: "Axes", quantity: AxisQuantity, low: float, high: float) -> None:
    """Scale the y axis from ``low`` to ``high``, and label it above, where no text is rotated."""
    axes.set_yscale("log" if quantity.is_log else "linear")
    axes.set_ylim(low, high)
    _set_ticks(axes.yaxis, quantity, quantity.make_ticks(low, high, MAX_Y_TICKS))
    axes.set_title(_full_title(quantity))
    axes.grid(axis="y")


def _full_title(quantity: AxisQuantity) -> str:
    return f"{quantity.title}, log axis" if quantity.is_log else quantity.title


def _set_ticks(axis: "Axis", quantity: AxisQuantity, ticks: Sequence[float]) -> None:
    from matplotlib.ticker import NullLocator

    axis.set_ticks(ticks, [_shorten_number(quantity.text(tick)) for tick in ticks])
    axis.set_minor_locator(NullLocator())


def _linear_ticks(low: float, high: float, base: int, max_ticks: int) -> list[float]:
    if base == 2:
        step = 2.0 ** math.ceil(math.log2((high - low) / max_ticks))
        first = math.ceil(low / step)
        last = math.floor(high / step)
        return [i * step for i in range(first, last + 1)]

    from matplotlib.ticker import MaxNLocator

    ticks = MaxNLocator(max_ticks, steps=[1, 2, 5, 10]).tick_values(low, high)
    return [float(tick) for tick in ticks if low <= tick <= high]


def _log_ticks(low: float, high: float, base: int, max_ticks: int) -> list[float]:
    """Return powers of the base, and round values between powers of ten if they are few."""
    first = math.floor(math.log(low, base))
    last = math.ceil(math.log(high, base))
    ticks: list[float] = []
    for factors in _FACTORS_OF_TEN if base == 10 else [(1.0,)]:
        powers = [float(base) ** exponent for exponent in range(first, last + 1)]
        values = [factor * power for power in powers for factor in factors]
        ticks = [value for value in values if low <= value <= high]
        if len(ticks) <= max_ticks:
            return ticks
    return ticks[:: math.ceil(len(ticks) / max_ticks)]


def _shorten_number(text: str) -> str:
    """Return ``1 ms`` for ``1.00 ms``."""
    number, space, unit = text.partition(" ")
    try:
        value = float(number)
    except ValueError:
        return text
    return f"{value:.12g}{space}{unit}" if value else f"0{' %' if unit == '%' else ''}"
