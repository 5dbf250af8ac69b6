"""Nested values as lines of name and text, for whatever a record holds beside its columns."""

from collections.abc import Mapping
from typing import Any

from reports import cells
from reports.summary import Row, common_details

Fact = tuple[str, str]
PAIRS = "pairs of ranks: "
_MOST_PAIRS, _MOST_LAUNCHES = 12, 12


def flatten(values: Mapping[str, Any], prefix: str = "") -> list[Fact]:
    """Return the leaves of nested mappings by their dotted names; None and empty ones as ``-``."""
    facts: list[Fact] = []
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            facts += flatten(value, f"{prefix}{name}.")
        else:
            facts.append((f"{prefix}{name}", _text(value)))
    return facts


def environment_facts(environment: Mapping[str, Any]) -> list[Fact]:
    """Return the environment's leaves; of pairs of ranks, whose number grows as their square, each kind is one."""
    locality = environment.get("locality")
    if not isinstance(locality, Mapping):
        return flatten(environment)
    kinds: dict[str, list[str]] = {}
    for pair, kind in locality.items():
        kinds.setdefault(_text(kind), []).append(str(pair))
    rest = {name: value for name, value in environment.items() if name != "locality"}
    return [*flatten(rest), *((f"{PAIRS}{kind}", _few(pairs)) for kind, pairs in kinds.items())]


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
    """Return the headline of each launch, where there are several, as far as there is room."""
    if len(row.measured) < 2:
        return []
    name, shown = row.headline, row.measured[:_MOST_LAUNCHES]
    facts = [(f"{name}, launch {record.launch + 1}", cells.measured(record.metrics.get(name))) for record in shown]
    left = len(row.measured) - len(shown)
    return [*facts, (f"{name}, other launches", f"{left} more, in records.jsonl")] if left else facts


def _differences(row: Row) -> list[Fact]:
    """Return where a launch's environment differed from the run's."""
    return [
        (f"environment, launch {record.launch + 1}: {name}", text)
        for record in row.records
        for name, text in flatten(record.environment)
    ]


def _few(pairs: list[str]) -> str:
    more = f", ... ({len(pairs)} pairs)" if len(pairs) > _MOST_PAIRS else ""
    return f"{', '.join(pairs[:_MOST_PAIRS])}{more}"


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
