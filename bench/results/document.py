"""Tables and figures as numbers: what a plan shows. Workloads write it, reports print and draw it.

Nothing here was measured; cells are numbers in their column's unit, None where unknown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from parbench.bench.results.details import Pipeline

Unit = Literal["words", "number", "s", "GB", "share"]
Cell = str | float | None


@dataclass(frozen=True, kw_only=True)
class Column:
    """What a table's cells or a figure's axis are: GB are 1e9 bytes, a share is of 1."""

    title: str
    help: str = ""
    unit: Unit = "words"


@dataclass(frozen=True, kw_only=True)
class Stacks:
    """A bar for each name, of parts of a rank's memory or of a step's time; ``limit`` is a line across and its name."""

    title: str
    told: str
    of: Literal["memory", "step"]
    bars: Mapping[str, Mapping[str, float]]
    limit: tuple[float, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Points:
    """A point for each name, on log axes; ``front`` are those that no other beats in both."""

    title: str
    told: str
    x: Column
    y: Column
    points: Mapping[str, tuple[float, float]]
    front: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Gantt:
    """A pipeline's ``predicted`` actions over time."""

    title: str
    told: str
    facts: Pipeline


Figure = Stacks | Points | Gantt


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of as many cells as there are columns, and figures of the same numbers."""

    id: str
    title: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()
    figures: Sequence[Figure] = ()


@dataclass(frozen=True, kw_only=True)
class Part:
    """Tables under one heading, and sentences of their own."""

    id: str
    title: str
    tables: Sequence[Table]
    notes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Document:
    """What is printed, or written as a page, Markdown or JSON: ``tiles`` are the numbers to see first.

    ``problem`` says why what is shown cannot be, if it cannot.
    """

    name: str
    heading: str
    parts: Sequence[Part]
    tiles: Sequence[tuple[str, str]] = ()
    problem: str = ""
