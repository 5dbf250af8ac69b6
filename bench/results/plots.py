"""Figures of a plan as data. Workloads build them, reports draw them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from parbench.bench.results.details import PipelineDetails
from parbench.bench.results.tables import Column


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
class ScatterPlot:
    """A point for each name, on logarithmic axes."""

    title: str
    caption: str
    x: Column
    y: Column
    points: Mapping[str, tuple[float, float]]
    front: Sequence[str]
    """The names on the Pareto front."""


@dataclass(frozen=True, kw_only=True)
class GanttChart:
    """The ``predicted`` actions of a pipeline over time."""

    title: str
    caption: str
    details: PipelineDetails


Plot = StackedBars | ScatterPlot | GanttChart
