"""Figures of a plan as data. Workloads build them, reports draw them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from parbench.bench.results.details import PipelineDetails


@dataclass(frozen=True, kw_only=True)
class StackedBars:
    """A chart with a stacked bar for each name, of the memory of a rank or the time of a step."""

    title: str
    caption: str
    quantity: Literal["memory", "step"]
    bars: Mapping[str, Mapping[str, float]]
    """The lengths of the parts by name of the bar and name of the part, in GB or seconds."""
    limit: tuple[float, str] | None = None
    """The position of a line across the bars and the name of the line, None for no line."""


@dataclass(frozen=True, kw_only=True)
class GanttChart:
    """The ``predicted`` actions of a pipeline over time."""

    title: str
    caption: str
    details: PipelineDetails


Plot = StackedBars | GanttChart
