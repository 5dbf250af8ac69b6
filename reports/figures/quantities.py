"""The quantities on the axes of figures, with their ticks."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parbench.bench.results.formatting import UNKNOWN, format_count, format_number, format_seconds
from parbench.bench.text import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.ticker import Locator

MAX_X_TICKS = 5
MAX_Y_TICKS = 7


@dataclass(frozen=True, kw_only=True)
class AxisQuantity:
    """The quantity of an axis: its title, the text of a value, and its scale.

    Ticks of ``base`` 2 are powers of two, as for bytes. A linear axis starts at zero.
    """

    title: str
    text: Callable[[float | None], str]
    is_log: bool = True
    base: int = 10

    def make_ticks(self, low: float, high: float, max_ticks: int) -> list[float]:
        """Return round values from ``low`` to ``high``, at most ``max_ticks`` if possible."""
        for locator in self._list_locators(high - low, max_ticks):
            ticks = [float(tick) for tick in locator.tick_values(low, high) if low <= tick <= high]
            if 1 < len(ticks) <= max_ticks:
                break
        return ticks

    def _list_locators(self, width: float, max_ticks: int) -> "Iterator[Locator]":
        """Yield locators of ticks, the finest first. ``width`` is the length of the axis."""
        from matplotlib.ticker import LogLocator, MaxNLocator, MultipleLocator

        if self.is_log and self.base == 10:
            yield LogLocator(subs=(1.0, 2.0, 5.0), numticks=max_ticks)
        if self.is_log:
            yield LogLocator(base=self.base, numticks=max_ticks)
        if self.base == 10:
            yield MaxNLocator(max_ticks, steps=[1, 2, 5, 10])
        else:
            yield MultipleLocator(2.0 ** math.ceil(math.log2(width / max_ticks)))


def _format_bytes(value: float | None) -> str:
    """Return a number of bytes with a binary prefix, ``UNKNOWN`` for None."""
    return UNKNOWN if value is None else format_size(round(value))


def format_share(value: float | None) -> str:
    """Return a fraction as a whole percentage, ``UNKNOWN`` for None."""
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
    """Return the title of an axis, which names a logarithmic scale."""
    return f"{quantity.title}, log axis" if quantity.is_log else quantity.title


def _set_ticks(axis: "Axis", quantity: AxisQuantity, ticks: Sequence[float]) -> None:
    """Set the ticks of an axis with their texts, without minor ticks."""
    from matplotlib.ticker import NullLocator

    axis.set_ticks(ticks, [_shorten_number(quantity.text(tick)) for tick in ticks])
    axis.set_minor_locator(NullLocator())


def _shorten_number(text: str) -> str:
    """Return ``1 ms`` for ``1.00 ms``."""
    number, space, unit = text.partition(" ")
    try:
        value = float(number)
    except ValueError:
        return text
    return f"{value:.12g}{space}{unit}" if value else f"0{' %' if unit == '%' else ''}"
