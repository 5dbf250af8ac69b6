"""Short names of cases, and the facts of an environment as text."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from parbench.bench.plan.cases import Case
from parbench.bench.results.formatting import UNKNOWN, format_case_size, to_single_line
from parbench.reports.analysis.case_results import CaseResult

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
    """Return by case id the parameters in which cases of its name differ, such as ``split=3+1``.

    ``without`` are parameters to leave out.
    """
    differing = _find_differing_params(results)
    labels = {}
    for result in results:
        case = result.case
        empty_params = {name for name, value in case.params.items() if value == ""}
        labels[case.id] = _join("", case, differing[case.name] - empty_params - {*without})
    return labels


def label_cases(results: Sequence[CaseResult]) -> dict[str, str]:
    """Return the label of each case by its id.

    Communication has its size, mode and type. Other cases have the parameters in which cases of
    their name differ, and the kind of benchmark if there are several, such as ``workload.``.
    """
    steps = [result for result in results if not result.is_communication]
    differing = _find_differing_params(steps)
    has_one_kind = len({step.kind for step in steps}) == 1
    labels = {}
    for result in results:
        case = result.case
        if result.is_communication:
            labels[case.id] = label_communication(case)
        else:
            name = case.short_name if has_one_kind else case.name
            labels[case.id] = _join(name, case, differing[case.name])
    return labels


def _find_differing_params(results: Sequence[CaseResult]) -> dict[str, set[str]]:
    """Return by name of the case the parameters that do not have one value in all its cases."""
    params_by_name: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        params_by_name.setdefault(result.case.name, []).append(result.case.params)
    return {name: _find_differing(params) for name, params in params_by_name.items()}


def _find_differing(mappings: Sequence[Mapping[str, Any]]) -> set[str]:
    first = mappings[0]
    names = set[str]().union(*mappings)
    return {
        name for name in names if any(mapping.get(name) != first.get(name) for mapping in mappings)
    }


def _join(name: str, case: Case, params: Collection[str]) -> str:
    settings = [f"{param}={value}" for param, value in case.params.items() if param in params]
    return to_single_line(" ".join([name, *settings]))


Fact = tuple[str, str]
"""The dotted name of a value in an environment, and its text."""

PAIRS = "pairs of ranks: "
MAX_NAMED_PAIRS = 12


def flatten(values: Mapping[str, Any], prefix: str = "") -> list[Fact]:
    """Return the leaves of nested mappings by their dotted names."""
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
    pairs_by_link: dict[str, list[str]] = {}
    for pair, link in locality.items():
        pairs_by_link.setdefault(_format_value(link), []).append(pair)
    for link, pairs in pairs_by_link.items():
        names = ", ".join(pairs[:MAX_NAMED_PAIRS])
        if len(pairs) > MAX_NAMED_PAIRS:
            names += f", ... ({len(pairs)} pairs)"
        facts.append((f"{PAIRS}{link}", names))
    return facts


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or value in ("", {}):
        return UNKNOWN
    if isinstance(value, Mapping):
        return " ".join(f"{name}={_format_value(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_format_value, value)) or UNKNOWN
    return f"{value:.6g}" if isinstance(value, float) else str(value)
