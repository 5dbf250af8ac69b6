"""Exact counts of a step: calls and bytes by axis and operation, memory by component, the schedule.

Counts do not depend on the load of the machine, so one repetition decides. A count that is equal in
all repetitions of BASE and differs in NEW has changed, and the message names the cause. A count that
differs between the repetitions of BASE is not compared, but named: it depends on data, or the code
changed during the run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import isclose

from parbench.bench.results.details import ExpertLoadDetails, PipelineDetails, read_details
from parbench.bench.results.formatting import (
    format_bytes,
    format_number,
    format_percent,
    format_quantity,
)
from parbench.bench.results.metrics import find_metric
from parbench.bench.results.records import Record
from parbench.bench.text import pluralize
from parbench.reports.analysis.case_results import CaseResult
from parbench.reports.compare.verdicts import Verdict

CountValues = Sequence[float | str]
"""The distinct values of a count over the repetitions. There is one if all repetitions agree."""
ExactCounts = Mapping[str, CountValues]
"""The values of each count by its name."""
SCHEDULE = "schedule"
CALLS_PREFIX = "calls."
SENT_PREFIX = "sent."
MEMORY_PREFIX = "memory_counted."
# The activations of a mixture of experts depend on the tokens that are routed to a rank.
ROUTED_MEMORY = f"{MEMORY_PREFIX}activations"


@dataclass(frozen=True, kw_only=True)
class CountChange:
    """A count that differs between two runs. ``path`` is its name for ``--across``.

    The verdict is UNCONFIRMED if only one run has the count, because the runs may have counted
    differently, or if the count differs between the repetitions of BASE.
    """

    path: str
    base: CountValues
    new: CountValues
    message: str
    verdict: Verdict = Verdict.COUNT_CHANGED
    is_intended: bool = False
    varies_in_base: bool = False
    """True if the repetitions of BASE disagree."""

    @property
    def fails(self) -> bool:
        """True if the change makes the comparison fail."""
        return self.verdict == Verdict.COUNT_CHANGED and not self.is_intended


@dataclass(frozen=True, kw_only=True)
class CountComparison:
    """The exact counts of one series in two runs."""

    num_compared: int = 0
    changes: tuple[CountChange, ...] = ()

    @property
    def varying(self) -> tuple[CountChange, ...]:
        """Counts on which the repetitions of BASE disagree, without intended changes."""
        return tuple(
            change for change in self.changes if change.varies_in_base and not change.is_intended
        )


def collect_counts(result: CaseResult) -> dict[str, list[float | str]]:
    """Return the distinct values of each count over the repetitions of a case, keyed by name.

    The result is empty if the result of the case is wrong.
    """
    repetitions = [_read_counts(record) for record in result.measured if result.metrics]
    values: dict[str, dict[float | str, None]] = {}
    for name in dict.fromkeys(name for counts in repetitions for name in counts):
        for counts in repetitions:
            value = counts.get(name, 0.0 if _lacks_operation(name, counts) else None)
            if value is not None:
                values.setdefault(name, {})[value] = None
    return {name: list(distinct) for name, distinct in values.items()}


def _lacks_operation(name: str, counts: Mapping[str, float | str]) -> bool:
    """Return True if a repetition whose calls were counted did not call this operation."""
    prefix, _, operation = name.partition(".")
    is_called = f"{CALLS_PREFIX}{operation}" in counts
    is_of_operation = f"{prefix}." in (CALLS_PREFIX, SENT_PREFIX)
    counts_calls = any(name.startswith(CALLS_PREFIX) for name in counts)
    return is_of_operation and counts_calls and not is_called


def _read_counts(record: Record) -> dict[str, float | str]:
    """Return the exact counts of one repetition, keyed by name, and its pipeline schedule."""
    is_routed = isinstance(read_details(record, ExpertLoadDetails), ExpertLoadDetails)
    counts: dict[str, float | str] = {}
    for name, metric in record.metrics.items():
        declared = find_metric(name)
        is_exact = declared is not None and (declared.is_exact or name.startswith(CALLS_PREFIX))
        if is_exact and metric.value is not None and not (is_routed and name == ROUTED_MEMORY):
            counts[name] = metric.value
    pipeline = read_details(record, PipelineDetails)
    if isinstance(pipeline, PipelineDetails):
        text = f"{pipeline.schedule} of {pluralize(pipeline.microbatches, 'microbatch')}"
        if pipeline.chunks > 1:
            text += f", {pluralize(pipeline.chunks, 'virtual stage')} per rank"
        counts[SCHEDULE] = text
    return counts


def compare_counts(
    base: ExactCounts,
    new: ExactCounts,
    intended: Sequence[str] = (),
    *,
    torch_differs: bool = False,
) -> CountComparison:
    """Compare the counts of two runs. Changes that match a glob of ``intended`` are intentional.

    With ``torch_differs``, an operation that only one run has may be the same one by another name.
    """
    names = list({**base, **new})
    changes: list[CountChange | None] = []
    if _has_calls(base) and _has_calls(new):
        for name in names:
            if _is_operation(name):
                operation = name.removeprefix(CALLS_PREFIX)
                changes.append(_compare_operation(operation, base, new, torch_differs))
    if base and new:
        for name in names:
            if not name.startswith((CALLS_PREFIX, SENT_PREFIX)):
                changes.append(_compare_value(name, base.get(name), new.get(name)))
    marked = []
    for change in changes:
        if change is not None:
            is_intended = any(fnmatchcase(change.path, glob) for glob in intended)
            marked.append(replace(change, is_intended=is_intended))
    compared = [name for name in base if _is_operation(name) or not name.startswith(CALLS_PREFIX)]
    return CountComparison(
        num_compared=sum(name in new and len(base[name]) == 1 for name in compared),
        changes=tuple(marked),
    )


def _has_calls(counts: ExactCounts) -> bool:
    """Return True if the calls of operations were counted."""
    return any(name.startswith(CALLS_PREFIX) for name in counts)


def _is_operation(name: str) -> bool:
    """Return True for ``calls.AXIS.OPERATION``, False for ``calls.AXIS`` and other counts."""
    return name.startswith(CALLS_PREFIX) and "." in name.removeprefix(CALLS_PREFIX)


def _compare_operation(
    operation: str, base: ExactCounts, new: ExactCounts, torch_differs: bool
) -> CountChange | None:
    """Compare the calls and bytes of an operation. A run that lacks it made 0 calls."""
    name = f"{CALLS_PREFIX}{operation}"
    base_calls = base.get(name, [0.0])
    new_calls = new.get(name, [0.0])
    base_bytes = _get_sent_bytes(operation, base)
    new_bytes = _get_sent_bytes(operation, new)
    axis, _, operation_name = operation.rpartition(".")
    prefix = f"{operation_name} on {axis}: "
    path = f"counts.{operation}"
    if len(base_calls) > 1:
        text = f"{prefix}{_format_counts(base_calls)} calls a step"
        return _report_variation(path, base_calls, new_calls, text)
    if len(base_bytes) > 1:
        text = f"{prefix}{_format_bytes(base_bytes)} a step"
        return _report_variation(path, base_bytes, new_bytes, text)
    if _are_equal(base_calls, new_calls):
        if _are_equal(base_bytes, new_bytes) or not (base_bytes or new_bytes):
            return None
        if not (base_bytes and new_bytes):
            side = "NEW" if base_bytes else "BASE"
            return CountChange(
                path=path,
                base=base_bytes,
                new=new_bytes,
                message=f"{prefix}the number of bytes is unknown in {side}",
                verdict=Verdict.UNCONFIRMED,
            )
        message = prefix + _describe_bytes(base_bytes, new_bytes, new_calls)
        return CountChange(path=path, base=base_bytes, new=new_bytes, message=message)
    message = prefix + _describe_calls(base_calls, new_calls, base_bytes, new_bytes)
    change = CountChange(path=path, base=base_calls, new=new_calls, message=message)
    if torch_differs and (name not in base or name not in new):
        side = "NEW" if name in new else "BASE"
        message += f", only in {side}. Another version of torch may use another name"
        return replace(change, message=message, verdict=Verdict.UNCONFIRMED)
    return replace(change, message=message + _describe_disagreement(new_calls))


def _report_variation(path: str, base: CountValues, new: CountValues, text: str) -> CountChange:
    """Report a count that differs between the repetitions of BASE."""
    return CountChange(
        path=path,
        base=base,
        new=new,
        message=f"{text}, the count differs between repetitions of BASE",
        verdict=Verdict.UNCONFIRMED,
        varies_in_base=True,
    )


def _get_sent_bytes(operation: str, counts: ExactCounts) -> CountValues:
    """Return the bytes that an operation sent, one value for each distinct count of repetitions.

    The result is ``[0.0]`` if the operation was not called, and an empty list if the bytes are
    unknown.
    """
    default = [] if f"{CALLS_PREFIX}{operation}" in counts else [0.0]
    return counts.get(f"{SENT_PREFIX}{operation}", default)


def _describe_bytes(base: CountValues, new: CountValues, calls: CountValues) -> str:
    """Return the change of the bytes of an operation, with the ratio of the sizes if known."""
    text = f"{_format_bytes(base)} -> {_format_bytes(new)} a step in {_format_counts(calls)} calls"
    if len(base) == 1 and len(new) == 1 and _to_number(base[0]):
        ratio = _to_number(new[0]) / _to_number(base[0])
        text += f", each {format_number(ratio)} times as large"
    return text


def _describe_calls(
    base_calls: CountValues, new_calls: CountValues, base_bytes: CountValues, new_bytes: CountValues
) -> str:
    """Return the change of the calls of an operation, with the difference of the bytes if known."""
    text = f"{_format_counts(base_calls)} -> {_format_counts(new_calls)} calls a step"
    if len(base_bytes) != 1 or len(new_bytes) != 1:
        return text
    if _are_equal(base_bytes, new_bytes):
        return f"{text}, same number of bytes"
    difference = _to_number(new_bytes[0]) - _to_number(base_bytes[0])
    sign = "+" if difference > 0 else ""
    return f"{text}, {sign}{format_bytes(difference)}"


def _compare_value(
    name: str, base: CountValues | None, new: CountValues | None
) -> CountChange | None:
    """Compare a count that belongs to no operation."""
    metric = find_metric(name)
    component = name.removeprefix(MEMORY_PREFIX)
    if component != name:
        title = f"{component} in memory"
    else:
        title = metric.title if metric else name
    path = f"counts.{component}"
    if base is None or new is None:
        side = "NEW" if base is None else "BASE"
        return CountChange(
            path=path,
            base=base or (),
            new=new or (),
            message=f"{title}: only {side} has it",
            verdict=Verdict.UNCONFIRMED,
        )
    if _are_equal(base, new):
        return None
    unit = metric.unit if metric else ""
    base_text = " or ".join(_format_value(name, value, unit) for value in base)
    if len(base) > 1:
        return _report_variation(path, base, new, f"{title}: {base_text}")
    new_text = " or ".join(_format_value(name, value, unit) for value in new)
    message = f"{title}: {base_text} -> {new_text}{_describe_disagreement(new)}"
    return CountChange(path=path, base=base, new=new, message=message)


def _format_value(name: str, value: float | str, unit: str) -> str:
    """Return a count with its unit. Schedules are text, and bubbles are percentages."""
    if isinstance(value, str):
        return value
    if name.startswith("bubble"):
        return format_percent(value)
    return format_quantity(value, unit)


def _format_counts(values: CountValues) -> str:
    """Return the values of a number of calls in ascending order, joined by ``or``."""
    return " or ".join(f"{value:g}" for value in sorted(map(_to_number, values)))


def _format_bytes(values: CountValues) -> str:
    """Return the values of a number of bytes, joined by ``or``."""
    return " or ".join(format_bytes(_to_number(value)) for value in values)


def _describe_disagreement(new: CountValues) -> str:
    """Return a phrase if the repetitions of NEW disagree, otherwise an empty text."""
    return ", the count differs between repetitions of NEW" if len(new) > 1 else ""


def _to_number(value: float | str) -> float:
    """Return ``value`` after an assertion that it is a number, not text."""
    assert isinstance(value, int | float), "calls and bytes are numbers"
    return value


def _are_equal(base: CountValues, new: CountValues) -> bool:
    """Return True if a count is equal in all repetitions of both runs."""
    if len(base) != 1 or len(new) != 1:
        return False
    if isinstance(base[0], str) or isinstance(new[0], str):
        return base[0] == new[0]
    return isclose(base[0], new[0], rel_tol=1e-9)
