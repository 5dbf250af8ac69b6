"""Tables and figures as data: rows with values, and columns that define how the values print.

A row is a mapping from the key of a column to its value, such as a record of a pandas frame. Every
renderer (terminal, page, Markdown, JSON, CSV) prints the same tables, so a table contains numbers
with units and never ready-made text where a number exists.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from parbench.bench.results.details import PipelineDetails
from parbench.bench.results.formatting import (
    UNKNOWN,
    format_bytes,
    format_case_size,
    format_count,
    format_gigabytes,
    format_measurement,
    format_number,
    format_percent,
    format_quantity,
    format_seconds,
)
from parbench.bench.results.metrics import Metric, MetricValue, find_metric
from parbench.bench.results.stats import WITHIN_REPETITION

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


_MEASURED_KINDS = ("s", "B", "B/s", "GB")


class SortedText(NamedTuple):
    """A cell that is sorted by another value than its text, such as ``4/5`` repetitions."""

    text: str
    sort_key: float | str | None
    """The value by which rows are sorted, None if it is unknown."""


Cell = str | float | SortedText | None
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A column of a table or an axis of a figure: the key of its values and how they print.

    The title is the key by default.
    With ``has_interval`` a row also has ``KEY_low`` and ``KEY_high``, the 95 % interval, and
    optionally ``is_within_repetition``, which is true if the interval is that of one repetition.
    """

    key: str
    title: str = ""
    _: KW_ONLY
    kind: ColumnKind = "text"
    help: str = ""
    number_format: str = ""
    """A format such as ``{:.3f}``. If it is empty, the kind decides about the format."""
    has_interval: bool = False
    is_result: bool = False
    """A result is never moved out of the table, even if all rows have the same value.

    Times, bytes and bandwidths are results in any case.
    """
    grade_key: str = ""
    """The key of the grade or the status by which renderers color the cell."""
    metric: Metric | None = None
    is_within_repetition: bool = False
    """True if all intervals are within one repetition, which the title then states."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_result", self.is_result or self.kind in _MEASURED_KINDS)
        object.__setattr__(self, "title", self.title or self.key)

    @property
    def is_number(self) -> bool:
        return self.kind != "text"

    def format_cell(self, row: Row) -> str:
        """Return the text of the row's cell, ``-`` if the value is unknown."""
        value = row.get(self.key)
        if isinstance(value, SortedText):
            return value.text or UNKNOWN
        bounds = (row.get(f"{self.key}_low"), row.get(f"{self.key}_high"))
        if self.has_interval and not any(map(is_missing, (value, *bounds))):
            return self._format_interval(row)
        return self.format_value(value)

    def format_value(self, value: Any) -> str:
        """Return the text of a value without its interval, ``-`` if it is unknown."""
        if is_missing(value) or value == "":
            return UNKNOWN
        if isinstance(value, str):
            return value
        if self.number_format:
            return self.number_format.format(value)
        return _FORMATTERS[self.kind](value)

    def sort_key(self, row: Row) -> float | str | None:
        """Return the value by which rows are sorted, None if it is unknown."""
        value: Any = row.get(self.key)
        if isinstance(value, SortedText):
            value = value.sort_key
        if is_missing(value):
            return None
        # JSON has no numbers of numpy.
        number: float | str = value.item() if hasattr(value, "item") else value
        return number

    def mark(self, row: Row) -> str:
        """Return the grade or status that decides the color of the cell, empty if there is none."""
        grade = row.get(self.grade_key) if self.grade_key else None
        return "" if is_missing(grade) else str(grade)

    def _format_interval(self, row: Row) -> str:
        """Return the value with its interval.

        The interval of one repetition is left out if other rows have intervals over repetitions.
        """
        if row.get("is_within_repetition") and not self.is_within_repetition:
            return f"{self.format_value(row[self.key])} (one repetition)"
        metric = MetricValue(
            value=row[self.key],
            unit=self.kind,
            low=row[f"{self.key}_low"],
            high=row[f"{self.key}_high"],
        )
        return format_measurement(metric, self.format_value)


def is_missing(value: object) -> bool:
    """Return True if a value of a row is unknown: None, NaN or pandas' NA."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float) and math.isnan(value)


def metric_column(
    name: str, *, key: str = "", title: str = "", has_interval: bool | None = None
) -> Column:
    """Return a column for a declared metric. Its key is the name of the metric by default.

    By default, only differences and factors are printed with their intervals.
    """
    metric = find_metric(name)
    if metric is None:
        raise LookupError(f"metric {name} is not declared")
    metric = metric.specialize(name) or metric
    if has_interval is None:
        has_interval = metric.kind in ("difference", "factor", "excess")
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


def keep_known_columns(columns: Iterable[Column], rows: Sequence[Row]) -> tuple[Column, ...]:
    """Return the columns in which at least one row has a value."""
    return tuple(
        column for column in columns if any(not is_missing(row.get(column.key)) for row in rows)
    )


@dataclass(frozen=True)
class Table:
    """Rows with a value for each column, notes below them, and figures of the same numbers.

    ``figures`` are drawn only when a renderer asks for them. ``where`` names the renderers that
    print the table. ``page`` includes Markdown.
    """

    id: str
    title: str
    _: KW_ONLY
    columns: Sequence[Column]
    rows: Sequence[Row]
    caption: str = ""
    notes: Sequence[str] = ()
    terms: Sequence[str] = ()
    """The glossary terms that its columns use."""
    figures: Callable[[], Iterable[Any]] = tuple
    where: Literal["everywhere", "page", "terminal"] = "everywhere"

    @property
    def varying(self) -> tuple[Column, ...]:
        """The columns to show, without columns that have the same text in every row."""
        return tuple(
            self._title_within_repetition(column)
            for column in self.columns
            if column not in self._constant_columns
        )

    @property
    def constant(self) -> str:
        """A sentence with the values that all rows share, empty if there are none."""
        texts = [
            f"{column.title} {column.format_cell(self.rows[0])}"
            for column in self._constant_columns
            if column.format_cell(self.rows[0]) != UNKNOWN
        ]
        return f"All rows: {', '.join(texts)}." if texts else ""

    @cached_property
    def _constant_columns(self) -> list[Column]:
        """The columns with the same text in all rows. The first column names the rows and stays."""
        if len(self.rows) < 2:
            return []
        return [
            column
            for column in self.columns[1:]
            if not column.is_result and len({column.format_cell(row) for row in self.rows}) == 1
        ]

    def _title_within_repetition(self, column: Column) -> Column:
        """Return the column with ``within this repetition`` in its title if all intervals are."""
        rows = [row for row in self.rows if not is_missing(row.get(f"{column.key}_low"))]
        if not column.has_interval or not rows:
            return column
        if not all(row.get("is_within_repetition") for row in rows):
            return column
        title = f"{column.title}, {WITHIN_REPETITION}"
        return replace(column, title=title, is_within_repetition=True)


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


@dataclass(frozen=True)
class Section:
    """A section of a document: its heading, its tables, and notes."""

    id: str
    title: str
    _: KW_ONLY
    tables: Sequence[Table]
    notes: Sequence[str] = ()

    @property
    def on_page(self) -> tuple[Table, ...]:
        """The tables that pages and Markdown show."""
        return tuple(table for table in self.tables if table.where != "terminal")


@dataclass(frozen=True, kw_only=True)
class Document:
    """The content of a page that no run measured, such as a plan."""

    name: str
    heading: str
    sections: Sequence[Section]
    tiles: Sequence[tuple[str, str]] = ()
    """The numbers to see first, with their titles."""
    problem: str = ""
    """The reason why the plan is impossible, empty if it is possible."""
    status: Literal["PREDICTED", "PUBLISHED", "VALIDATED"] = "PREDICTED"
    """The origin of the numbers: formulas, publications, or formulas next to measurements."""
