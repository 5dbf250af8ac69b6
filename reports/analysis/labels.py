"""Short names of cases, and the facts of an environment as text."""

import textwrap
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from parbench.bench.plan.cases import Case
from parbench.bench.results.formatting import UNKNOWN, format_case_size, to_single_line
from parbench.bench.text import pluralize
from parbench.reports.analysis.case_results import CaseResult

K = TypeVar("K")
AXES = ("size_bytes", "dtype", "mode")
"""The parameters of a communication case that have their own column, axis or figure."""


def describe_ranks(num_ranks: int, num_nodes: int) -> str:
    """Return the text ``8 ranks on 2 nodes``, without nodes if their number is 0 (unknown)."""
    ranks = pluralize(num_ranks, "rank")
    return f"{ranks} on {pluralize(num_nodes, 'node')}" if num_nodes else ranks


def label_operation(case: Case, without: Iterable[str] = ()) -> str:
    """Return the operation of a communication case and its parameters: ``broadcast root=1``.

    Size, data type and mode are left out, and the parameters named in ``without``.
    """
    return _join(case.short_name, case, case.params.keys() - {*AXES, *without})


def label_communication(case: Case) -> str:
    """Return a communication case as text with its size, mode and type.

    An example is ``all_reduce 1M blocking float32``.
    """
    params = case.params
    size = format_case_size(params["size_bytes"]) if "size_bytes" in params else ""
    parts = (
        label_operation(case),
        size,
        params.get("mode", ""),
        params.get("dtype", ""),
    )
    return " ".join(str(part) for part in parts if part)


def label_differences(results: Sequence[CaseResult], without: Iterable[str] = ()) -> dict[str, str]:
    """Return a label of each case with the parameters that differ, keyed by case id: ``layers=4``.

    A parameter is in the label if its value differs between the cases of the same benchmark in
    ``results``. Parameters with an empty value and the parameters named in ``without`` are left
    out. A label is empty if no parameter differs.
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
    """Return a short label for each case, keyed by case id.

    The label of a communication case has its size, mode and type. The label of another case has the
    parameters in which cases of its name differ: ``fsdp layers=4``. If the other cases are of
    several kinds of benchmark, their labels begin with the kind: ``workload.fsdp``.
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
    """Return ``name``, followed by ``PARAM=VALUE`` for each of the parameters ``params`` of a case.

    An example is ``broadcast root=1``.
    """
    settings = [f"{param}={value}" for param, value in case.params.items() if param in params]
    return to_single_line(" ".join([name, *settings]))


def group_by_text(texts: Mapping[K, Iterable[str]]) -> dict[str, list[K]]:
    """Invert a mapping: return the keys of ``texts`` that have a text, keyed by the text.

    For example, from the notes of each run, keyed by run, it makes the runs with each note, keyed
    by note.
    """
    owners: dict[str, list[K]] = {}
    for owner, own_texts in texts.items():
        for text in own_texts:
            owners.setdefault(text, []).append(owner)
    return owners


Fact = tuple[str, str]
"""The dotted name of a value in an environment, and its text."""

PAIRS = "pairs of ranks: "
"""The prefix of the name of a fact about a kind of link. The text of the fact lists the pairs."""
MAX_PAIR_LETTERS = 80
"""The largest number of letters of the pairs of ranks that the fact about a link lists."""


def flatten(values: Mapping[str, Any], prefix: str = "") -> list[Fact]:
    """Return the values inside nested mappings as pairs of dotted name and text.

    An example of a pair is ``("gpu.count", "8")``. ``prefix`` is put before each name. An empty
    mapping has the text ``-``.
    """
    facts: list[Fact] = []
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            facts += flatten(value, f"{prefix}{name}.")
        else:
            facts.append((f"{prefix}{name}", _format_value(value)))
    return facts


def list_environment_facts(environment: Mapping[str, Any]) -> list[Fact]:
    """Return the facts of a run's environment as pairs of dotted name and text.

    The links between pairs of ranks (key ``locality``) are grouped by the kind of link. The fact
    about a kind is the list of the pairs that it connects, cut to 80 letters.
    """
    locality = environment.get("locality") or {}
    facts = flatten({name: value for name, value in environment.items() if name != "locality"})
    pairs_by_link = group_by_text({pair: [_format_value(link)] for pair, link in locality.items()})
    facts += [
        (f"{PAIRS}{link}", textwrap.shorten(", ".join(pairs), MAX_PAIR_LETTERS, placeholder=" ..."))
        for link, pairs in pairs_by_link.items()
    ]
    return facts


def _format_value(value: Any) -> str:
    """Return a value of a run's environment as text.

    Booleans are ``yes`` or ``no``, items of lists are joined by commas, and items of mappings are
    ``name=value``. Missing and empty values are ``-``.
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or value in ("", {}):
        return UNKNOWN
    if isinstance(value, Mapping):
        return " ".join(f"{name}={_format_value(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_format_value, value)) or UNKNOWN
    return f"{value:.6g}" if isinstance(value, float) else str(value)
