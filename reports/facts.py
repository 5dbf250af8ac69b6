"""Nested values as lines of name and text, for whatever a record holds beside its columns."""

from collections.abc import Mapping
from typing import Any

from reports import cells
from reports.summary import Row, common_details

Fact = tuple[str, str]


def flatten(values: Mapping[str, Any], prefix: str = "") -> list[Fact]:
    """Return the leaves of nested mappings by their dotted names; None and empty ones as ``-``."""
    facts: list[Fact] = []
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            facts += flatten(value, f"{prefix}{name}.")
        else:
            facts.append((f"{prefix}{name}", _text(value)))
    return facts


def row_facts(row: Row) -> list[Fact]:
    """Return all that is known of a row and has no column, from its parameters to every metric's method."""
    return [
        ("case", f"{row.case.id} {row.case.target}"),
        *((name, _text(value)) for name, value in row.case.params.items()),
        *_metrics(row),
        *_launches(row),
        ("why measuring stopped", cells.counted(row.stops)),
        ("steady", cells.counted(row.steady)),
        *(("note", note) for note in row.notes),
        *flatten(common_details(row)),
        *_differences(row),
    ]


def _metrics(row: Row) -> list[Fact]:
    return [
        (name, f"{cells.measured(metric)}{f' ({metric.method})' if metric.method else ''}")
        for name, metric in row.metrics.items()
    ]


def _launches(row: Row) -> list[Fact]:
    """Return the headline of each launch, where there are several."""
    if len(row.measured) < 2:
        return []
    name = row.headline
    return [
        (f"{name}, launch {record.launch + 1}", cells.measured(record.metrics.get(name))) for record in row.measured
    ]


def _differences(row: Row) -> list[Fact]:
    """Return where a launch's environment differed from the run's."""
    return [
        (f"environment, launch {record.launch + 1}: {name}", text)
        for record in row.records
        for name, text in flatten(record.environment)
    ]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping) and value:
        return " ".join(f"{name}={_text(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_text(item) for item in value) or cells.UNKNOWN
    if isinstance(value, float):
        return f"{value:.6g}"
    return cells.UNKNOWN if value is None or value in ("", {}) else str(value)
