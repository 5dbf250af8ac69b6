"""Figures of a plan as data. Workloads build them, reports draw them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from parbench.bench.results.details import PipelineDetails


@dataclass(frozen=True, kw_only=True)
class StackedBars:
    """A stacked bar for each name, of the memory of a rank in GB or of the seconds of a step."""

    title: str
    caption: str
    quantity: Literal["memory", "step"]
    bars: Mapping[str, Mapping[str, float]]
    limit: tuple[float, str] | None = None
    """A line across the bars and its name."""


@dataclass(frozen=True, kw_only=True)
class GanttChart:
    """The ``predicted`` actions of a pipeline over time."""

    title: str
    caption: str
    details: PipelineDetails


Plot = StackedBars | GanttChart
