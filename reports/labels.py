"""Names that tell rows apart without saying what they all share."""

from collections.abc import Iterable, Mapping, Sequence

from bench.plan.cases import Case
from bench.plan.params import Value
from reports.cells import visible
from reports.summary import Row

# what has a column, an axis or a figure of its own
AXES = ("size_bytes", "dtype", "mode")


def operation(case: Case) -> str:
    """Return a communication's name without its kind, with the parameters that have no column: ``broadcast root=1``."""
    return operation_without(case, ())


def operation_without(case: Case, without: Iterable[str]) -> str:
    """Return the same without the parameters named, which stand elsewhere."""
    left_out = {*AXES, *without}
    return _with(case.name.partition(".")[2] or case.name, case.params, (n for n in case.params if n not in left_out))


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
