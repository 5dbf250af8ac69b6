"""A figure of a report with its texts, drawn only when a renderer needs it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure of a report that has not been drawn yet."""

    name: str
    """The id on the page, the key in ``parbench.figures``, and the stem of the figure's file."""
    title: str
    """The heading of the figure."""
    caption: str
    """Plain text below the title."""
    draw: "Callable[[], Figure]"
    """Draws and returns a new matplotlib figure."""
    is_wide: bool = False
    """True for a figure that takes the full width of the page."""


def number_name(name: str, number: int) -> str:
    """Return the name of a chart with a number from 1: ``pairs``, then ``pairs_2``."""
    return name if number == 1 else f"{name}_{number}"


def list_charts(*charts: Chart | None) -> list[Chart]:
    """Return the given charts in order, without None, which stands for a chart without data."""
    return [chart for chart in charts if chart is not None]
