"""The tables and figures of a plan as numbers. Workloads build them, reports print and draw them.

Nothing in them was measured here. Cells are numbers in the unit of their column, None if unknown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from parbench.bench.results.details import PipelineDetails

Unit = Literal["text", "number", "s", "GB", "share"]
Cell = str | float | None


@dataclass(frozen=True, kw_only=True)
class DocumentColumn:
    """A column of a table or an axis of a figure."""

    title: str
    help: str = ""
    unit: Unit = "text"
    """``GB`` are 1e9 bytes, ``share`` is a fraction."""


@dataclass(frozen=True, kw_only=True)
class StackedBars:
    """A stacked bar for each name, of the memory of a rank or the time of a step."""

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
    x: DocumentColumn
    y: DocumentColumn
    points: Mapping[str, tuple[float, float]]
    front: Sequence[str]
    """The names on the Pareto front."""


@dataclass(frozen=True, kw_only=True)
class GanttChart:
    """The ``predicted`` actions of a pipeline over time."""

    title: str
    caption: str
    facts: PipelineDetails


Figure = StackedBars | ScatterPlot | GanttChart


@dataclass(frozen=True, kw_only=True)
class DocumentTable:
    """Rows with a cell for each column, and figures of the same numbers."""

    id: str
    title: str
    caption: str
    columns: Sequence[DocumentColumn]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()
    figures: Sequence[Figure] = ()


@dataclass(frozen=True, kw_only=True)
class DocumentPart:
    """Tables and notes under one heading."""

    id: str
    title: str
    tables: Sequence[DocumentTable]
    notes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Document:
    """The content of a page, which is printed or written as HTML, Markdown or JSON."""

    name: str
    heading: str
    parts: Sequence[DocumentPart]
    tiles: Sequence[tuple[str, str]] = ()
    """The numbers to see first, with their titles."""
    problem: str = ""
    """Why the plan is impossible, if it is."""
    is_prediction: bool = True
    """False if the tables are quoted from publications."""
