"""The quantities on the axes of figures: title, scale, ticks and the text of ticks."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parbench.bench.results.formatting import (
    format_case_size,
    format_count,
    format_number,
    format_quantity,
    format_seconds,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

MAX_X_TICKS = 5
MAX_Y_TICKS = 7
_TRAILING_ZEROS = re.compile(r"(\.\d*[1-9])0+(?= |$)|\.0+(?= |$)|(?<=^0) .*")
"""Matches the needless part of ``1.50 ms``, ``1.00 ms`` and ``0 us``, after its first group."""


@dataclass(frozen=True, kw_only=True)
class AxisQuantity:
    """The quantity of an axis, such as bus bandwidth."""

    title: str
    """The name of the quantity, with its unit if tick texts have none."""
    text: Callable[[float], str]
    """Returns the text of a tick, given its value."""
    is_log: bool = True
    """True for a logarithmic axis. A linear axis starts at zero."""
    base: int = 10
    """The base of round ticks: 2 for powers of two, as for bytes, otherwise 10."""

    @property
    def label(self) -> str:
        """The title, followed by ``log axis`` if the axis is logarithmic."""
        return f"{self.title}, log axis" if self.is_log else self.title


def format_share(value: float) -> str:
    """Return a fraction as a whole percentage: ``25 %``."""
    return f"{100 * value:.0f} %"


BANDWIDTH = AxisQuantity(title="bus bandwidth (GB/s)", text=format_number)
TIME = AxisQuantity(title="time", text=format_seconds)
SIZE = AxisQuantity(title="message size (bytes, 1024-based)", text=format_case_size, base=2)
EFFICIENCY = AxisQuantity(title="efficiency", text=format_share, is_log=False)
STEP_TIME = AxisQuantity(title="step time", text=format_seconds, is_log=False)
PLANNED_MEMORY = AxisQuantity(
    title="memory of a rank", text=lambda value: format_quantity(value, "GB"), is_log=False
)
ITERATIONS = AxisQuantity(title="share of iterations", text=format_share, is_log=False)
TIME_SINCE_START = AxisQuantity(title="time since the start", text=format_seconds, is_log=False)


def count_of(title: str) -> AxisQuantity:
    """Return the axis quantity of a count, such as ``ranks``, with powers of two as ticks.

    ``title`` is the name of the counted things.
    """
    return AxisQuantity(title=title, text=format_count, base=2)


def set_x_axis(axes: "Axes", quantity: AxisQuantity, low: float, high: float) -> None:
    """Set the scale, range, ticks and label of the x axis.

    ``low`` and ``high`` are the ends of the axis in units of the quantity.
    """
    axes.set_xscale("log" if quantity.is_log else "linear")
    axes.set_xlim(low, high)
    axes.set_xlabel(quantity.label)
    _set_ticks(axes.xaxis, quantity, low, high, MAX_X_TICKS)


def set_y_axis(axes: "Axes", quantity: AxisQuantity, low: float, high: float) -> None:
    """Set the scale, range, ticks and title of the y axis. The title is above the axes.

    ``low`` and ``high`` are the ends of the axis in units of the quantity.
    """
    if quantity.is_log:
        axes.set_yscale("log", nonpositive="mask")
    axes.set_ylim(low, high)
    axes.set_title(quantity.label)
    axes.grid(axis="y")
    _set_ticks(axes.yaxis, quantity, low, high, MAX_Y_TICKS)


def _set_ticks(
    axis: "Axis", quantity: AxisQuantity, low: float, high: float, max_ticks: int
) -> None:
    """Set round ticks with their texts on an axis from ``low`` to ``high``, without minor ticks."""
    from matplotlib import ticker

    locator: ticker.Locator = ticker.MaxNLocator(max_ticks, steps=[1, 2, 5, 10])
    if quantity.is_log and quantity.base == 2:
        locator = ticker.LogLocator(2, numticks=max_ticks)
    elif quantity.is_log and high > 10 * low:
        steps = (1, 2, 5) if high < 100 * low else (1,)
        locator = ticker.LogLocator(10, subs=steps, numticks=max_ticks)
    elif quantity.base == 2:
        locator = ticker.MultipleLocator(2.0 ** math.ceil(math.log2((high - low) / max_ticks)))
    axis.set_major_locator(locator)
    axis.set_minor_locator(ticker.NullLocator())
    axis.set_major_formatter(lambda value, _: _TRAILING_ZEROS.sub(r"\1", quantity.text(value)))
