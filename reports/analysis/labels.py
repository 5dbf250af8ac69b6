"""Short names of cases, and the facts of an environment as text."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from parbench.bench.plan.cases import Case
from parbench.bench.results.formatting import UNKNOWN, format_case_size, to_single_line
from parbench.reports.analysis.case_results import CaseResult

K = TypeVar("K")
AXES = ("size_bytes", "dtype", "mode")
"""The parameters of communication that have a column, an axis or a figure of their own."""


def label_operation(case: Case, without: Iterable[str] = ()) -> str:
    """Return a communication without size, type and mode, such as ``broadcast root=1``.

    ``without`` are further parameters to leave out.
    """
    return _join(case.short_name, case, case.params.keys() - {*AXES, *without})


def label_communication(case: Case) -> str:
    """Return a communication with its size, mode and type, such as ``all_reduce 1M blocking``."""
    params = case.params
    size = format_case_size(params["size_bytes"]) if "size_bytes" in params else ""
    parts = (label_operation(case), size, params.get("mode", ""), params.get("dtype", ""))
    return " ".join(str(part) for part in parts if part)


def label_differences(results: Sequence[CaseResult], without: Iterable[str] = ()) -> dict[str, str]:
    """Return the parameters in which cases of one name differ, such as ``split=3+1``, by case id.

    ``without`` are parameters to leave out.
    """
    first_params: dict[str, Mapping[str, Any]] = {}
    differing: dict[str, set[str]] = defaultdict(set)
    for result in results:
        params = result.case.params
        first = first_params.setdefault(result.case.name, params)
        differing[result.case.name].update(
            name for name in {*first, *params} if first.get(name) != params.get(name)
        )
    labels = {}
    for result in results:
        case = result.case
        empty_params = {name for name, value in case.params.items() if value == ""}
        labels[case.id] = _join("", case, differing[case.name] - empty_params - {*without})
    return labels


def label_cases(results: Sequence[CaseResult]) -> dict[str, str]:
    """Return the labels of cases, keyed by case id.

    Communication has its size, mode and type. Other cases have the parameters in which cases of
    their name differ, and the kind of benchmark if there are several, such as ``workload.``.
    """
    steps = [result for result in results if not result.is_communication]
    has_one_kind = len({step.kind for step in steps}) == 1
    labels = {
        result.case.id: label_communication(result.case)
        for result in results
        if result.is_communication
    }
    differences = label_differences(steps)
    for step in steps:
        name = step.case.short_name if has_one_kind else step.case.name
        labels[step.case.id] = f"{name} {differences[step.case.id]}".strip()
    return labels


def _join(name: str, case: Case, params: Collection[str]) -> str:
    """Return ``name`` and the settings of these parameters of a case."""
    settings = [f"{param}={value}" for param, value in case.params.items() if param in params]
    return to_single_line(" ".join([name, *settings]))


def group_by_text(texts: Mapping[K, Iterable[str]]) -> dict[str, list[K]]:
    """Return the owners of each text, such as the runs that have a note."""
    owners: dict[str, list[K]] = {}
    for owner, own_texts in texts.items():
        for text in own_texts:
            owners.setdefault(text, []).append(owner)
    return owners


Fact = tuple[str, str]
"""The dotted name of a value in an environment, and its text."""

PAIRS = "pairs of ranks: "
MAX_NAMED_PAIRS = 12


def flatten(values: Mapping[str, Any], prefix: str = "") -> list[Fact]:
    """Return the leaves of nested mappings with their dotted names."""
    facts: list[Fact] = []
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            facts += flatten(value, f"{prefix}{name}.")
        else:
            facts.append((f"{prefix}{name}", _format_value(value)))
    return facts


def list_environment_facts(environment: Mapping[str, Any]) -> list[Fact]:
    """Return the leaves of an environment; pairs of ranks with the same links are one fact."""
    locality = environment.get("locality") or {}
    facts = flatten({name: value for name, value in environment.items() if name != "locality"})
    pairs_by_link = group_by_text({pair: [_format_value(link)] for pair, link in locality.items()})
    for link, pairs in pairs_by_link.items():
        names = ", ".join(pairs[:MAX_NAMED_PAIRS])
        if len(pairs) > MAX_NAMED_PAIRS:
            names += f", ... ({len(pairs)} pairs)"
        facts.append((f"{PAIRS}{link}", names))
    return facts


def _format_value(value: Any) -> str:
    """Return a value as text: yes or no, items joined by commas, ``UNKNOWN`` for missing ones."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or value in ("", {}):
        return UNKNOWN
    if isinstance(value, Mapping):
        return " ".join(f"{name}={_format_value(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_format_value, value)) or UNKNOWN
    return f"{value:.6g}" if isinstance(value, float) else str(value)
