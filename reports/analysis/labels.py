"""Names that tell rows apart without saying what they all share."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from parbench.bench.plan.cases import Case
from parbench.reports import cells
from parbench.reports.analysis.frame import group_by
from parbench.reports.analysis.summary import Row, common_details
from parbench.reports.cells import visible

# what has a column, an axis or a figure of its own
AXES = ("size_bytes", "dtype", "mode")


def operation(case: Case, without: Iterable[str] = ()) -> str:
    """Return a communication's name without its kind, with the parameters that have no column: ``broadcast root=1``."""
    return _with(case.short_name, case, case.params.keys() - {*AXES, *without})


def row_label(row: Row) -> str:
    """Return a communication with its size, mode and type, for a line that stands alone."""
    params = row.case.params
    size = cells.size(params["size_bytes"]) if "size_bytes" in params else ""
    words = (operation(row.case), size, str(params.get("mode", "")), str(params.get("dtype", "")))
    return " ".join(filter(None, words))


def short_labels(rows: Sequence[Row]) -> dict[str, str]:
    """Return by case id the name with those parameters in which cases of that name differ."""
    differing, is_one_kind = _differing(rows), len({row.kind for row in rows}) == 1
    names = {name: (is_one_kind and name.partition(".")[2]) or name for name in differing}
    return {row.case.id: _with(names[row.case.name], row.case, differing[row.case.name]) for row in rows}


def differences(rows: Sequence[Row], without: Iterable[str] = ()) -> dict[str, str]:
    """Return by case id the parameters, but those ``without``, in which cases of its name differ: ``split=3+1``."""
    differing, found = _differing(rows), {}
    for row in rows:
        left_out = {*without, *(name for name, value in row.case.params.items() if value == "")}
        found[row.case.id] = _with("", row.case, differing[row.case.name] - left_out)
    return found


def _differing(rows: Sequence[Row]) -> dict[str, set[str]]:
    alike = {name: [row.case.params for row in of] for name, of in group_by(rows, lambda row: row.case.name).items()}
    return {
        name: {param for param in set[str]().union(*of) if any(one.get(param) != of[0].get(param) for one in of)}
        for name, of in alike.items()
    }


def _with(name: str, case: Case, shown: Collection[str]) -> str:
    return visible(" ".join([name, *(f"{param}={value}" for param, value in case.params.items() if param in shown)]))


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
    locality = environment.get("locality") or {}
    facts = flatten({name: value for name, value in environment.items() if name != "locality"})
    for kind, alike in group_by(locality, lambda pair: _text(locality[pair])).items():
        pairs = [*alike]
        more = f", ... ({len(pairs)} pairs)" if len(pairs) > _MOST_PAIRS else ""
        facts.append((f"{PAIRS}{kind}", f"{', '.join(pairs[:_MOST_PAIRS])}{more}"))
    return facts


def row_facts(row: Row) -> list[Fact]:
    """Return all that is known of a row and has no column, from its parameters to every metric's method."""
    metrics = ((name, one, f" ({one.method})" if one.method else "") for name, one in row.metrics.items())
    name, launches = row.headline, row.measured[:_MOST_LAUNCHES] if len(row.measured) > 1 else ()
    left = len(row.measured) - _MOST_LAUNCHES
    return [
        ("case", f"{row.case.id} {row.case.target}"),
        *((name, _text(value)) for name, value in row.case.params.items()),
        *((name, f"{cells.measured(one)}{method}") for name, one, method in metrics),
        *((f"{name}, launch {one.launch + 1}", cells.measured(one.metrics.get(name))) for one in launches),
        *([(f"{name}, other launches", f"{left} more, in records.jsonl")] if left > 0 else []),
        ("why measuring stopped", cells.counted(row.stops)),
        ("steady", cells.counted(row.steady)),
        *(("note", note) for note in row.notes),
        *flatten(common_details(row)),
        *(fact for one in row.records for fact in flatten(one.environment, f"environment, launch {one.launch + 1}: ")),
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
