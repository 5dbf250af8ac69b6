"""Names that tell rows apart without saying what they all share."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from parbench.bench.plan.cases import Case
from parbench.bench.results.formatting import UNKNOWN, format_case_size, to_single_line
from parbench.reports.analysis.frame import group_by
from parbench.reports.analysis.summary import Row

# what has a column, an axis or a figure of its own
AXES = ("size_bytes", "dtype", "mode")


def operation(case: Case, without: Iterable[str] = ()) -> str:
    """Return a communication's name without its kind, with the parameters that have no column: ``broadcast root=1``."""
    return _with(case.short_name, case, case.params.keys() - {*AXES, *without})


def row_label(row: Row) -> str:
    """Return a communication with its size, mode and type, for a line that stands alone."""
    params = row.case.params
    size = format_case_size(params["size_bytes"]) if "size_bytes" in params else ""
    words = (operation(row.case), size, str(params.get("mode", "")), str(params.get("dtype", "")))
    return " ".join(filter(None, words))


def short_labels(rows: Sequence[Row]) -> dict[str, str]:
    """Return by case id the name with those parameters in which cases of that name differ."""
    differing, is_one_kind = _differing(rows), len({row.kind for row in rows}) == 1
    names = {name: (is_one_kind and name.partition(".")[2]) or name for name in differing}
    return {
        row.case.id: _with(names[row.case.name], row.case, differing[row.case.name]) for row in rows
    }


def differences(rows: Sequence[Row], without: Iterable[str] = ()) -> dict[str, str]:
    """Return by case id the parameters, but those ``without``, in which cases of its name differ: ``split=3+1``."""
    differing, found = _differing(rows), {}
    for row in rows:
        left_out = {*without, *(name for name, value in row.case.params.items() if value == "")}
        found[row.case.id] = _with("", row.case, differing[row.case.name] - left_out)
    return found


def _differing(rows: Sequence[Row]) -> dict[str, set[str]]:
    alike = {
        name: [row.case.params for row in of]
        for name, of in group_by(rows, lambda row: row.case.name).items()
    }
    return {
        name: {
            param
            for param in set[str]().union(*of)
            if any(one.get(param) != of[0].get(param) for one in of)
        }
        for name, of in alike.items()
    }


def _with(name: str, case: Case, shown: Collection[str]) -> str:
    return to_single_line(
        " ".join(
            [name, *(f"{param}={value}" for param, value in case.params.items() if param in shown)]
        )
    )


Fact = tuple[str, str]
PAIRS = "pairs of ranks: "
MAX_NAMED_PAIRS = 12


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
        more = f", ... ({len(pairs)} pairs)" if len(pairs) > MAX_NAMED_PAIRS else ""
        facts.append((f"{PAIRS}{kind}", f"{', '.join(pairs[:MAX_NAMED_PAIRS])}{more}"))
    return facts


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping) and value:
        return " ".join(f"{name}={_text(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_text(item) for item in value) or UNKNOWN
    if isinstance(value, float):
        return f"{value:.6g}"
    return UNKNOWN if value is None or value in ("", {}) else str(value)
