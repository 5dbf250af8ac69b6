"""Names that tell rows apart without saying what they all share."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.plan.cases import Case
from bench.plan.params import Value
from reports import cells
from reports.analysis.summary import Row, common_details
from reports.cells import visible

# what has a column, an axis or a figure of its own
AXES = ("size_bytes", "dtype", "mode")


def operation(case: Case) -> str:
    """Return a communication's name without its kind, with the parameters that have no column: ``broadcast root=1``."""
    return operation_without(case, ())


def operation_without(case: Case, without: Iterable[str]) -> str:
    """Return the same without the parameters named, which stand elsewhere."""
    left_out = {*AXES, *without}
    return _with(case.name.partition(".")[2] or case.name, case.params, (n for n in case.params if n not in left_out))


def row_label(row: Row) -> str:
    """Return a communication with its size, mode and type, for a line that stands alone."""
    params = row.case.params
    size = cells.size(params["size_bytes"]) if "size_bytes" in params else ""
    return " ".join(
        filter(None, (operation(row.case), size, *(str(params.get(name, "")) for name in ("mode", "dtype"))))
    )


def short_labels(rows: Sequence[Row]) -> dict[str, str]:
    """Return by case id the name with those parameters in which cases of that name differ."""
    kinds = {row.case.name.partition(".")[0] for row in rows}
    labels = {}
    for row in rows:
        case = row.case
        name = case.name if len(kinds) > 1 else case.name.partition(".")[2] or case.name
        labels[case.id] = _with(name, case.params, _differing(case, rows))
    return labels


def differences(rows: Sequence[Row], without: Iterable[str] = ()) -> dict[str, str]:
    """Return by case id the parameters in which cases of its name differ: ``split=3+1``, or empty.

    Those named and those without a value are left out; cases that differ in nothing else share their text.
    """
    named = set(without)
    found = {}
    for row in rows:
        params = row.case.params
        told = [name for name in _differing(row.case, rows) if name not in named and params[name] != ""]
        found[row.case.id] = _with("", params, told)
    return found


def _differing(case: Case, rows: Sequence[Row]) -> list[str]:
    alike = [other.case.params for other in rows if other.case.name == case.name]
    return [name for name in case.params if any(params.get(name) != case.params[name] for params in alike)]


def _with(name: str, params: Mapping[str, Value], shown: Iterable[str]) -> str:
    return visible(" ".join([name, *(f"{param}={params[param]}" for param in shown)]))


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
