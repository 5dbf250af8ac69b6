"""A named figure that is drawn when it is needed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure of a report that has not been drawn yet.

    ``name`` is its id on the page, its key in ``parbench.figures`` and the stem of its file. The
    caption is plain text below the title. A wide chart takes the full width of the page.
    """

    name: str
    title: str
    caption: str
    draw: "Callable[[], Figure]"
    is_wide: bool = False


def number_name(name: str, number: int) -> str:
    """Return the name of a chart with a number from 1. The first chart has no suffix."""
    return name if number == 1 else f"{name}_{number}"


def list_charts(*charts: Chart | None) -> list[Chart]:
    """Return the charts for which there is enough data."""
    return [chart for chart in charts if chart is not None]
