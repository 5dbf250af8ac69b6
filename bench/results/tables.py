"""Tables as data: columns that say how numbers print, and rows that hold the numbers.

A row is a mapping from the key of a column to its value, such as a record of a pandas frame. Every
renderer (terminal, page, Markdown, JSON, CSV) prints the same tables, so a table contains numbers
and units and never ready-made text where a number exists.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from parbench.bench.results.formatting import (
    UNKNOWN,
    format_bytes,
    format_case_size,
    format_count,
    format_difference,
    format_gigabytes,
    format_number,
    format_percent,
    format_quantity,
    format_seconds,
)
from parbench.bench.results.metrics import Metric, MetricValue, find_metric
from parbench.bench.results.stats import WITHIN_REPETITION

ColumnKind = Literal["text", "number", "count", "size", "s", "B", "B/s", "GB", "percent"]
"""How the values of a column print.

``size`` is a case's size in bytes (``64K``), ``B/s`` prints GB/s without the unit (the title has
it), ``GB`` are 1e9 bytes, ``percent`` is a fraction.
"""

_FORMATTERS: Mapping[str, Callable[[Any], str]] = {
    "text": lambda value: UNKNOWN if value is None or value == "" else str(value),
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


class SortedText(NamedTuple):
    """A cell whose text is not its number, such as ``4/5`` repetitions."""

    text: str
    sort_key: float | str | None


Cell = str | float | SortedText | None
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table: the key of its values and how they print.

    With ``has_interval`` a row also has ``KEY_low`` and ``KEY_high``, the 95 % interval, and
    optionally ``is_within_repetition``, which is true if the interval is that of one repetition.
    """

    key: str
    title: str
    kind: ColumnKind = "text"
    help: str = ""
    number_format: str = ""
    """A format such as ``{:.3f}`` that replaces that of the kind."""
    has_interval: bool = False
    is_result: bool = False
    """A result is never moved out of the table, even if all rows have the same value."""
    is_graded: bool = False
    """The text of the cell is a grade or a status, which renderers color."""
    metric: Metric | None = None

    @property
    def is_number(self) -> bool:
        return self.kind != "text"

    def format_cell(self, row: Row) -> str:
        """Return the text of the row's cell, ``-`` if the value is unknown."""
        value = row.get(self.key)
        if isinstance(value, SortedText):
            return value.text or UNKNOWN
        if is_missing(value):
            return UNKNOWN
        if self.has_interval and not isinstance(value, str):
            return self._format_interval(row)
        return self._format_value(value)

    def sort_key(self, row: Row) -> float | str | None:
        """Return the value by which rows are sorted, None if it is unknown."""
        value = row.get(self.key)
        if isinstance(value, SortedText):
            return value.sort_key
        return None if is_missing(value) else value

    def mark(self, row: Row) -> str:
        """Return the grade or status by which the cell is colored, empty if it has none."""
        return self.format_cell(row) if self.is_graded else ""

    def _format_value(self, value: Any) -> str:
        if isinstance(value, str):
            return value or UNKNOWN
        if self.number_format:
            return self.number_format.format(value)
        return _FORMATTERS[self.kind](value)

    def _format_interval(self, row: Row) -> str:
        low, high = row.get(f"{self.key}_low"), row.get(f"{self.key}_high")
        text = self._format_value(row[self.key])
        if is_missing(low) or is_missing(high):
            return text
        metric = MetricValue(
            value=row[self.key],
            unit=self.kind if self.kind in ("s", "B", "B/s") else "",
            low=low,
            high=high,
        )
        interval = format_difference(metric, self._format_value)
        return f"{interval} {WITHIN_REPETITION}" if row.get("is_within_repetition") else interval


def is_missing(value: object) -> bool:
    """Return whether a value of a row is unknown: None, NaN or pandas' NA."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float) and math.isnan(value)


def metric_column(
    name: str, *, key: str = "", title: str = "", has_interval: bool | None = None
) -> Column:
    """Return the column of a declared metric; its key is the metric's name unless given.

    Metrics that are differences or factors print their intervals.
    """
    metric = find_metric(name)
    assert metric is not None, f"the metric {name} is not declared"
    own = metric.specialize(name) or metric
    if has_interval is None:
        has_interval = own.kind in ("difference", "factor", "excess")
    return Column(
        key=key or name,
        title=title or own.title,
        kind=_KIND_OF_UNIT.get(own.unit, "number"),
        help=own.help,
        number_format=own.number_format,
        has_interval=has_interval,
        is_result=True,
        metric=None if title else metric,
    )


def keep_known_columns(columns: Iterable[Column], rows: Sequence[Row]) -> tuple[Column, ...]:
    """Return the columns in which at least one row has a value."""
    return tuple(
        column for column in columns if any(not is_missing(row.get(column.key)) for row in rows)
    )


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows with a value for each column, notes below them, and figures of the same numbers.

    ``figures`` are drawn only when a renderer asks for them. ``where`` names the renderers that
    print the table; ``page`` includes Markdown.
    """

    id: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    caption: str = ""
    notes: Sequence[str] = ()
    figures: Callable[[], Iterable[Any]] = tuple
    where: Literal["everywhere", "page", "terminal"] = "everywhere"
    _constant: Sequence[Column] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_constant", self._find_constant_columns())

    @property
    def varying(self) -> tuple[Column, ...]:
        """The columns that a table shows: all but those with the same text in every row."""
        columns = (column for column in self.columns if column not in self._constant)
        return tuple(map(self._hoist_within_repetition, columns))

    @property
    def constant(self) -> str:
        """A sentence with the values that all rows share, empty if there are none."""
        texts = (
            f"{column.title} {column.format_cell(self.rows[0])}"
            for column in self._constant
            if column.format_cell(self.rows[0]) != UNKNOWN
        )
        sentence = "; ".join(texts)
        return f"All rows: {sentence}." if sentence else ""

    def _find_constant_columns(self) -> list[Column]:
        """Return the columns whose text is the same in all rows; the first column names the rows."""
        if len(self.rows) < 2:
            return []
        return [
            column
            for column in self.columns[1:]
            if not column.is_result and len({column.format_cell(row) for row in self.rows}) == 1
        ]

    def _hoist_within_repetition(self, column: Column) -> Column:
        """Move ``(one repetition)`` into the title where it holds for all intervals."""
        if not column.has_interval:
            return column
        with_interval = [row for row in self.rows if not is_missing(row.get(f"{column.key}_low"))]
        if not with_interval or not all(row.get("is_within_repetition") for row in with_interval):
            return column
        return _ColumnWithinRepetition(
            **{
                **{name: getattr(column, name) for name in Column.__dataclass_fields__},
                "title": f"{column.title}, {WITHIN_REPETITION}",
            }
        )


class _ColumnWithinRepetition(Column):
    """A column whose title says that all intervals are those of one repetition."""

    def _format_interval(self, row: Row) -> str:
        return super()._format_interval({**row, "is_within_repetition": False})


@dataclass(frozen=True, kw_only=True)
class Section:
    """Tables under one heading, the glossary terms that their columns use, and notes."""

    id: str
    title: str
    tables: Sequence[Table]
    terms: Sequence[str] = ()
    notes: Sequence[str] = ()
