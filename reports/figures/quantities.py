"""The quantities on the axes of figures: title, scale, ticks and the text of ticks."""

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
    """The quantity of an axis, such as bus bandwidth."""

    title: str
    """The name of the quantity, with its unit if tick texts have none."""
    text: Callable[[float | None], str]
    """Returns the text of a value at a tick."""
    is_log: bool = True
    """True for a logarithmic axis. A linear axis starts at zero."""
    base: int = 10
    """The base of the ticks: 2 for powers of two, as for bytes, otherwise 10."""

    def make_ticks(self, low: float, high: float, max_ticks: int) -> list[float]:
        """Return round values between ``low`` and ``high``, at most ``max_ticks`` if possible."""
        for locator in self._list_locators(high - low, max_ticks):
            ticks = [float(tick) for tick in locator.tick_values(low, high) if low <= tick <= high]
            if 1 < len(ticks) <= max_ticks:
                break
        return ticks

    def _list_locators(self, width: float, max_ticks: int) -> "Iterator[Locator]":
        """Yield matplotlib locators of ticks, from the finest to the coarsest.

        ``width`` is the length of the axis in units of the quantity.
        """
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
    """Return a number of bytes with a binary prefix: ``64K``. None becomes ``-``."""
    return UNKNOWN if value is None else format_size(round(value))


def format_share(value: float | None) -> str:
    """Return a fraction as a whole percentage: ``25 %``. None becomes ``-``."""
    return UNKNOWN if value is None else f"{100 * value:.0f} %"


BANDWIDTH = AxisQuantity(title="bus bandwidth (GB/s)", text=format_number)
TIME = AxisQuantity(title="time", text=format_seconds)
SIZE = AxisQuantity(title="message size (bytes, 1024-based)", text=_format_bytes, base=2)
EFFICIENCY = AxisQuantity(title="efficiency", text=format_share, is_log=False)
STEP_TIME = AxisQuantity(title="step time", text=format_seconds, is_log=False)
ITERATIONS = AxisQuantity(title="share of iterations", text=format_share, is_log=False)
TIME_SINCE_START = AxisQuantity(title="time since the start", text=format_seconds, is_log=False)


def count_of(title: str) -> AxisQuantity:
    """Return the axis quantity of a count, such as ``ranks``, with powers of two as ticks.

    ``title`` is the name of the counted things.
    """
    return AxisQuantity(title=title, text=format_count, base=2)


def set_x_axis(axes: "Axes", quantity: AxisQuantity, low: float, high: float) -> None:
    """Set the scale, range, ticks and label of the x axis.

    ``low`` and ``high`` are its ends in units of the quantity.
    """
    axes.set_xscale("log" if quantity.is_log else "linear")
    axes.set_xlim(low, high)
    _set_ticks(axes.xaxis, quantity, quantity.make_ticks(low, high, MAX_X_TICKS))
    axes.set_xlabel(_full_title(quantity))


def set_y_axis(axes: "Axes", quantity: AxisQuantity, low: float, high: float) -> None:
    """Set the scale, range, ticks and title of the y axis. The title is above the axes.

    ``low`` and ``high`` are its ends in units of the quantity.
    """
    axes.set_yscale("log" if quantity.is_log else "linear")
    axes.set_ylim(low, high)
    _set_ticks(axes.yaxis, quantity, quantity.make_ticks(low, high, MAX_Y_TICKS))
    axes.set_title(_full_title(quantity))
    axes.grid(axis="y")


def _full_title(quantity: AxisQuantity) -> str:
    """Return the title of a quantity, followed by ``log axis`` if its scale is logarithmic."""
    return f"{quantity.title}, log axis" if quantity.is_log else quantity.title


def _set_ticks(axis: "Axis", quantity: AxisQuantity, ticks: Sequence[float]) -> None:
    """Set the major ticks of an axis with their texts, and remove minor ticks."""
    from matplotlib.ticker import NullLocator

    axis.set_ticks(ticks, [_shorten_number(quantity.text(tick)) for tick in ticks])
    axis.set_minor_locator(NullLocator())


def _shorten_number(text: str) -> str:
    """Return a quantity without trailing zeros: ``1 ms`` for ``1.00 ms``.

    A text that does not begin with a number is returned unchanged.
    """
    number, space, unit = text.partition(" ")
    try:
        value = float(number)
    except ValueError:
        return text
    return f"{value:.12g}{space}{unit}" if value else f"0{' %' if unit == '%' else ''}"
