"""Names that tell rows apart without saying what they all share."""

from collections.abc import Iterable, Mapping, Sequence

from bench.cases import Case
from bench.params import Value
from reports.cells import visible
from reports.summary import Row

# what has a column, an axis or a figure of its own
AXES = ("size_bytes", "dtype", "mode")


def operation(case: Case) -> str:
    """Return a communication's name without its kind, with the parameters that have no column: ``broadcast root=1``."""
    return _with(case.name.partition(".")[2] or case.name, case.params, (n for n in case.params if n not in AXES))


def short_labels(rows: Sequence[Row]) -> dict[str, str]:
    """Return by case id the name with those parameters in which cases of that name differ."""
    names = {row.case.name for row in rows}
    kinds = {name.partition(".")[0] for name in names}
    labels = {}
    for row in rows:
        case = row.case
        alike = [other.case.params for other in rows if other.case.name == case.name]
        differing = [n for n in case.params if any(params.get(n) != case.params[n] for params in alike)]
        name = case.name if len(kinds) > 1 else case.name.partition(".")[2] or case.name
        labels[case.id] = _with(name, case.params, differing)
    return labels


def _with(name: str, params: Mapping[str, Value], shown: Iterable[str]) -> str:
    return visible(" ".join([name, *(f"{param}={params[param]}" for param in shown)]))
