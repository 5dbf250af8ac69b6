"""Tables and figures as data: rows with values, and columns that define how the values print.

A row is a mapping from the key of a column to its value, such as a record of a pandas frame. Every
renderer (terminal, page, Markdown, JSON, CSV) prints the same tables, so a table contains numbers
with units and never ready-made text where a number exists.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from parbench.bench.results.details import PipelineDetails
from parbench.bench.results.formatting import (
    UNKNOWN,
    format_bytes,
    format_case_size,
    format_count,
    format_gigabytes,
    format_number,
    format_percent,
    format_quantity,
    format_seconds,
    format_with_interval,
)
from parbench.bench.results.metrics import Metric, find_metric

ColumnKind = Literal["text", "number", "count", "size", "s", "B", "B/s", "GB", "percent"]
"""The form in which the values of a column print.

``size`` is the size of a case in bytes, printed as ``64K``. ``B/s`` is a bandwidth, printed in GB/s
without the unit, which is in the title. ``GB`` is a number of units of 1e9 bytes. ``percent`` is a
fraction, printed in per cent.
"""

_FORMATTERS: Mapping[ColumnKind, Callable[[Any], str]] = {
    "text": str,
    "number": format_number,
    "count": format_count,
    "size": format_case_size,
    "s": format_seconds,
    "B": format_bytes,
    "B/s": format_gigabytes,
    "GB": lambda value: format_quantity(value, "GB"),
    "percent": format_percent,
}

_KIND_OF_UNIT: Mapping[str, ColumnKind] = {"s": "s", "B": "B", "B/s": "B/s", "": "percent"}
"""The form in which a metric prints, by the unit of the metric."""


_MEASURED_KINDS = ("s", "B", "B/s", "GB")
"""The kinds of columns that always hold results."""


class SortedText(NamedTuple):
    """A cell of a table that prints as ``text`` but is sorted by ``sort_key``.

    For example, the text ``4/5`` for four of five repetitions is sorted by the number 4.
    """

    text: str
    """The text of the cell."""
    sort_key: float | str | None
    """The value by which rows are sorted, None if it is unknown."""


Row = Mapping[str, Any]
"""The values of one row of a table, by the key of the column."""


@dataclass(frozen=True)
class Column:
    """A column of a table or an axis of a figure: the key of its values and their format."""

    key: str
    """The key of the column's values in the rows."""
    title: str = ""
    """The heading of the column, by default the key."""
    _: KW_ONLY
    kind: ColumnKind = "text"
    """The form in which the values print."""
    help: str = ""
    """A phrase that defines the values, for the HTML page."""
    number_format: str = ""
    """A format such as ``{:.3f}``. If it is empty, the kind decides about the format."""
    has_interval: bool = False
    """True if values print with their 95 % intervals.

    A row has the bounds of the interval under the keys ``KEY_low`` and ``KEY_high``.
    """
    is_result: bool = False
    """True if the column stays in the table even if all rows have the same value.

    Columns of times, bytes and bandwidths always stay.
    """
    grade_key: str = ""
    """The key of the grade or status in a row that colors the cell, empty for no color."""
    metric: Metric | None = None
    """The declaration of the metric in the column, None for other columns."""

    def __post_init__(self) -> None:
        """Set ``is_result`` for columns of measured kinds, and the title to the key if empty."""
        object.__setattr__(self, "is_result", self.is_result or self.kind in _MEASURED_KINDS)
        object.__setattr__(self, "title", self.title or self.key)

    @property
    def is_number(self) -> bool:
        """True for a column of numbers, which renderers align to the right."""
        return self.kind != "text"

    def format_cell(self, row: Row) -> str:
        """Return the text of this column's cell in a row, ``-`` if the value is unknown.

        The text contains the 95 % interval if the column has intervals and the row has one.
        """
        value = row.get(self.key)
        if isinstance(value, SortedText):
            return value.text or UNKNOWN
        numbers: list[Any] = [value, row.get(f"{self.key}_low"), row.get(f"{self.key}_high")]
        if self.has_interval and not any(map(is_missing, numbers)):
            return format_with_interval(numbers, self.kind, self.format_value)
        return self.format_value(value)

    def format_value(self, value: Any) -> str:
        """Return a value as text in the format of the column, ``-`` if the value is unknown."""
        if is_missing(value) or value == "":
            return UNKNOWN
        if isinstance(value, str):
            return value
        if self.number_format:
            return self.number_format.format(value)
        return _FORMATTERS[self.kind](value)

    def sort_key(self, row: Row) -> float | str | None:
        """Return the value by which this column sorts a row, None if the value is unknown."""
        value: Any = row.get(self.key)
        if isinstance(value, SortedText):
            value = value.sort_key
        if is_missing(value):
            return None
        # JSON has no numbers of numpy.
        number: float | str = value.item() if hasattr(value, "item") else value
        return number

    def mark(self, row: Row) -> str:
        """Return the grade or status in the row that colors this column's cell, such as ``noisy``.

        The result is empty if the cell has no color.
        """
        grade = row.get(self.grade_key) if self.grade_key else None
        return "" if is_missing(grade) else str(grade)


def is_missing(value: object) -> bool:
    """Return True if a value of a row is None, NaN, or pandas' NA or NaT."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float) and math.isnan(value)


def metric_column(
    name: str, *, key: str = "", title: str = "", has_interval: bool | None = None
) -> Column:
    """Return a column for the declared metric ``name``, with its title, help and format.

    ``key`` is the key of the values in rows, by default ``name``. ``title`` replaces the title of
    the metric. ``has_interval`` decides if values print with their intervals, by default only if
    the metric is a difference. Raises ``LookupError`` for an unknown metric.
    """
    metric = find_metric(name)
    if metric is None:
        raise LookupError(f"metric {name} is not declared")
    metric = metric.specialize(name) or metric
    if has_interval is None:
        has_interval = metric.kind == "difference"
    return Column(
        key=key or name,
        title=title or metric.title,
        kind=_KIND_OF_UNIT.get(metric.unit, "number"),
        help=metric.help,
        number_format=metric.number_format,
        has_interval=has_interval,
        is_result=True,
        metric=metric,
    )


@dataclass(frozen=True)
class Table:
    """A table of a report: columns, rows, notes, and figures of the same numbers."""

    id: str
    """A name that is unique in the report, for links and file names."""
    title: str
    """The heading of the table."""
    _: KW_ONLY
    columns: Sequence[Column]
    """The columns in their order, of which the first names the rows.

    The constructor leaves out the columns without a known value.
    """
    rows: Sequence[Row]
    """The values of each row, by the key of the column."""
    caption: str = ""
    """Sentences that say what the table shows."""
    notes: Sequence[str] = ()
    """Sentences below the table."""
    terms: Sequence[str] = ()
    """The glossary terms that its columns use."""
    figures: Callable[[], Iterable[Any]] = tuple
    """A function that returns the figures. A renderer calls it only if it draws figures."""

    def __post_init__(self) -> None:
        """Leave out the columns without a known value, unless the table has no rows."""
        known_columns = [
            column
            for column in self.columns
            if any(not is_missing(row.get(column.key)) for row in self.rows)
        ]
        if self.rows:
            object.__setattr__(self, "columns", known_columns)

    @property
    def varying(self) -> tuple[Column, ...]:
        """The columns to print: all except those with the same text in every row.

        The first column and columns of results are always printed.
        """
        return tuple(column for column in self.columns if column not in self._constant_columns)

    @property
    def constant(self) -> str:
        """A sentence with the columns that are not printed and their only value.

        An example is ``All rows: dtype float32.`` The text is empty if there are no such columns.
        """
        texts = [
            f"{column.title} {column.format_cell(self.rows[0])}"
            for column in self._constant_columns
            if column.format_cell(self.rows[0]) != UNKNOWN
        ]
        return f"All rows: {', '.join(texts)}." if texts else ""

    @cached_property
    def _constant_columns(self) -> list[Column]:
        """The columns that are not printed because they have the same text in all rows.

        The first column, which names the rows, and columns of results are never among them.
        """
        if len(self.rows) < 2:
            return []
        return [
            column
            for column in self.columns[1:]
            if not column.is_result and len({column.format_cell(row) for row in self.rows}) == 1
        ]


@dataclass(frozen=True, kw_only=True)
class StackedBars:
    """A chart of stacked bars, which shows the memory of a rank or the time of a step in parts."""

    title: str
    """The heading of the chart."""
    caption: str
    """Sentences that say what the chart shows."""
    quantity: Literal["memory", "step"]
    """``memory`` for the bytes of a rank in GB, ``step`` for the time of a step in seconds."""
    bars: Mapping[str, Mapping[str, float]]
    """The length of each part of a bar in GB or seconds, by the bar's and then the part's name."""
    limit: tuple[float, str] | None = None
    """A line across the bars: its position in GB or seconds, and its label. None for no line."""


@dataclass(frozen=True, kw_only=True)
class GanttChart:
    """A Gantt chart of a pipeline schedule: the actions of each rank over time."""

    title: str
    """The heading of the chart."""
    caption: str
    """Sentences that say what the chart shows."""
    details: PipelineDetails
    """The pipeline, whose ``predicted`` actions are drawn."""


@dataclass(frozen=True, kw_only=True)
class ParetoChart:
    """A chart of predicted steps as points, with the fastest step for each memory as a line."""

    title: str
    """The heading of the chart."""
    caption: str
    """Sentences that say what the chart shows."""
    points: Sequence[tuple[float, float, str]]
    """The steps: (memory of a rank in GB, time of a step in seconds, label)."""


Plot = StackedBars | GanttChart | ParetoChart
"""A figure that is drawn from data of its own instead of the rows of a table."""


@dataclass(frozen=True)
class Section:
    """A section of a document: its heading, its tables, and notes."""

    id: str
    """A name that is unique in the document, for links."""
    title: str
    """The heading of the section."""
    _: KW_ONLY
    tables: Sequence[Table]
    """The tables in the order in which they print."""
    notes: Sequence[str] = ()
    """Sentences about all tables of the section."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """The content of a report that does not belong to a run, such as a plan of a training step."""

    name: str
    """A short title, such as ``plan llama3-8b on 64 GPUs``."""
    heading: str
    """A longer title, with the settings that the numbers apply to."""
    sections: Sequence[Section]
    """The sections in the order in which they print."""
    tiles: Sequence[tuple[str, str]] = ()
    """The most important numbers, which are printed first: pairs (number, title) of texts."""
    problem: str = ""
    """The reason why the planned step is impossible, empty if it is possible."""
    status: Literal["PREDICTED", "PUBLISHED", "COMPARED"] = "PREDICTED"
    """The origin of the numbers: formulas, publications, or formulas compared with measurements."""
