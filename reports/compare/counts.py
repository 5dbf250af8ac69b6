"""Exact counts of a step: calls and bytes by axis and operation, memory by component, the schedule.

Counts do not depend on the load of the machine, so one repetition decides. A count that is equal in
all repetitions of BASE and differs in NEW has changed, and the message names the cause. A count
that differs between the repetitions of BASE is not compared, but named: it depends on data, or the
code changed during the run.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import isclose
from typing import Any

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
"""The distinct values of one count over the repetitions of a run, in order of first occurrence.

There is one value if all repetitions agree, and none if the run does not have the count. Only the
schedule is text.
"""
ExactCounts = Mapping[str, CountValues]
"""The values of each exact count of a case in one run, keyed by the name of the count.

The names are those of metrics, such as ``calls.dp.all_reduce`` or ``sent.dp.all_reduce``, and
``schedule``.
"""
SCHEDULE = "schedule"
"""The name of the count that is the pipeline schedule as text."""
CALLS_PREFIX = "calls."
"""The prefix of the number of calls: ``calls.AXIS.OPERATION``, per step."""
SENT_PREFIX = "sent."
"""The prefix of the number of bytes that were sent: ``sent.AXIS.OPERATION``, per step."""
MEMORY_PREFIX = "memory_counted."
"""The prefix of the bytes of a component of memory, such as parameters."""
# The activations of a mixture of experts depend on the tokens that are routed to a rank.
ROUTED_MEMORY = f"{MEMORY_PREFIX}activations"


@dataclass(frozen=True, kw_only=True)
class CountChange:
    """A count of calls, bytes or memory, or a schedule, that differs between BASE and NEW."""

    path: str
    """The name of the count for the option ``--across``, such as ``counts.dp.all_reduce``."""
    base: CountValues
    """The distinct values over the repetitions of BASE."""
    new: CountValues
    """The distinct values over the repetitions of NEW."""
    message: str
    """A phrase with the name of the count, both values, and their difference."""
    verdict: Verdict = Verdict.COUNT_CHANGED
    """COUNT CHANGED, or UNCONFIRMED if the counts may not be comparable.

    It is UNCONFIRMED if only one run has the count, because the runs may have counted differently,
    or if the count differs between the repetitions of BASE.
    """
    is_intended: bool = False
    """True if the user declared the change intentional with ``--across``."""
    varies_in_base: bool = False
    """True if the repetitions of BASE disagree on the count."""

    @property
    def fails(self) -> bool:
        """True if the change makes the comparison fail with exit code 1."""
        return self.verdict == Verdict.COUNT_CHANGED and not self.is_intended


@dataclass(frozen=True, kw_only=True)
class CountComparison:
    """The exact counts of one case (calls, bytes, memory, schedule), compared between two runs."""

    num_compared: int = 0
    """The number of counts that both runs have and on which the repetitions of BASE agree."""
    changes: tuple[CountChange, ...] = ()
    """The counts that differ, with those that are intended or cannot be compared."""

    @property
    def varying(self) -> tuple[CountChange, ...]:
        """The counts on which the repetitions of BASE disagree, without intended changes."""
        return tuple(
            change for change in self.changes if change.varies_in_base and not change.is_intended
        )


def collect_counts(result: CaseResult) -> dict[str, list[float | str]]:
    """Return the exact counts of a case: the distinct values of each one over the repetitions.

    Exact counts are calls, bytes, memory and the schedule of a step. The keys are their names. An
    operation that a repetition did not call has the value 0 in it. The result is empty if the
    result of the case is wrong.
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
    """Return True if a repetition counted its calls, but did not call the operation of a count.

    Args:
        name: the name of the count, such as ``sent.dp.all_reduce``.
        counts: the counts of the repetition, keyed by name.
    """
    prefix, _, operation = name.partition(".")
    is_called = f"{CALLS_PREFIX}{operation}" in counts
    is_of_operation = f"{prefix}." in (CALLS_PREFIX, SENT_PREFIX)
    return is_of_operation and _has_calls(counts) and not is_called


def _read_counts(record: Record) -> dict[str, float | str]:
    """Return the exact counts of one repetition, keyed by name. A schedule is text."""
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
    """Compare the exact counts of a case (calls, bytes, memory, schedule) in two runs.

    Args:
        base: the counts in BASE, keyed by name.
        new: the counts in NEW, keyed by name.
        intended: globs for the paths of counts whose changes are intentional.
        torch_differs: True if the runs used different versions of torch. Then an operation that
            only one run has may be the same one by another name, so it does not fail.
    """
    changes = []
    for change in _find_changes(base, new, torch_differs):
        is_intended = any(fnmatchcase(change.path, glob) for glob in intended)
        changes.append(replace(change, is_intended=is_intended))
    compared = [name for name in base if _is_operation(name) or not name.startswith(CALLS_PREFIX)]
    return CountComparison(
        num_compared=sum(name in new and len(base[name]) == 1 for name in compared),
        changes=tuple(changes),
    )


def _find_changes(
    base: ExactCounts, new: ExactCounts, torch_differs: bool
) -> Iterator[CountChange]:
    """Yield each count of calls, bytes or memory that differs between two runs.

    A count that one run does not measure is left out. An operation that only one run called
    differs, because the other run counted 0 calls. With ``torch_differs``, it is UNCONFIRMED.
    ``base`` and ``new`` are keyed by name.
    """
    counts_calls = _has_calls(base) and _has_calls(new)
    for name in {**base, **new}:
        change = None
        if _is_operation(name):
            if counts_calls:
                change = _compare_operation(name, base, new, torch_differs)
        elif base and new and not name.startswith((CALLS_PREFIX, SENT_PREFIX)):
            change = _compare_value(name, base.get(name, ()), new.get(name, ()))
        if change is not None:
            yield change


def _has_calls(counts: Mapping[str, object]) -> bool:
    """Return True if a run counted the calls of operations. ``counts`` is keyed by name."""
    return any(name.startswith(CALLS_PREFIX) for name in counts)


def _is_operation(name: str) -> bool:
    """Return True for ``calls.AXIS.OPERATION``, False for ``calls.AXIS`` and other counts."""
    return name.startswith(CALLS_PREFIX) and "." in name.removeprefix(CALLS_PREFIX)


def _compare_operation(
    name: str, base: ExactCounts, new: ExactCounts, torch_differs: bool
) -> CountChange | None:
    """Return the change of the calls or bytes of one operation, None if both are equal.

    A run that lacks the operation made 0 calls. With ``torch_differs``, an operation that only one
    run has is UNCONFIRMED, because versions of torch may use different names.

    Args:
        name: the count ``calls.AXIS.OPERATION``.
        base: the counts in BASE, keyed by name.
        new: the counts in NEW.
        torch_differs: True if the runs used different versions of torch.
    """
    operation = name.removeprefix(CALLS_PREFIX)
    axis, _, operation_name = operation.rpartition(".")
    calls = CountChange(
        path=f"counts.{operation}",
        base=base.get(name, [0.0]),
        new=new.get(name, [0.0]),
        message=f"{operation_name} on {axis}: ",
    )
    sent = replace(
        calls, base=_get_sent_bytes(operation, base), new=_get_sent_bytes(operation, new)
    )
    if len(calls.base) > 1:
        return _report_variation(calls, f"{_format_counts(calls.base)} calls a step")
    if len(sent.base) > 1:
        return _report_variation(sent, f"{_format_bytes(sent.base)} a step")
    if _are_equal(calls.base, calls.new):
        return _compare_bytes(sent, calls.new)
    text = f"{_format_counts(calls.base)} -> {_format_counts(calls.new)} calls a step"
    if _are_equal(sent.base, sent.new):
        text += ", same number of bytes"
    elif len(sent.base) == 1 and len(sent.new) == 1:
        difference = _to_number(sent.new[0]) - _to_number(sent.base[0])
        text += f", {'+' if difference > 0 else ''}{format_bytes(difference)}"
    if torch_differs and (name not in base or name not in new):
        side = "NEW" if name in new else "BASE"
        text += f", only in {side}. Another version of torch may use another name"
        return _complete(calls, text, verdict=Verdict.UNCONFIRMED)
    return _complete(calls, text + _describe_disagreement(calls.new))


def _compare_bytes(sent: CountChange, calls: CountValues) -> CountChange | None:
    """Return the change of the bytes that an operation sent, None if they are equal.

    It is for an operation whose number of calls did not change. ``sent`` has the bytes in both
    runs, and ``calls`` the number of calls.
    """
    if _are_equal(sent.base, sent.new) or not (sent.base or sent.new):
        return None
    if not (sent.base and sent.new):
        side = "NEW" if sent.base else "BASE"
        text = f"the number of bytes is unknown in {side}"
        return _complete(sent, text, verdict=Verdict.UNCONFIRMED)
    text = f"{_format_bytes(sent.base)} -> {_format_bytes(sent.new)} a step"
    text += f" in {_format_counts(calls)} calls"
    if len(sent.new) == 1 and _to_number(sent.base[0]):
        ratio = _to_number(sent.new[0]) / _to_number(sent.base[0])
        text += f", each {format_number(ratio)} times as large"
    return _complete(sent, text)


def _complete(change: CountChange, text: str, **fields: Any) -> CountChange:
    """Return a changed count whose message is continued by ``text``, with new values of fields."""
    return replace(change, message=change.message + text, **fields)


def _report_variation(change: CountChange, text: str) -> CountChange:
    """Return the verdict UNCONFIRMED on a count that differs between the repetitions of BASE.

    ``text`` has the values of the count, and continues the message of ``change``.
    """
    return _complete(
        change,
        f"{text}, the count differs between repetitions of BASE",
        verdict=Verdict.UNCONFIRMED,
        varies_in_base=True,
    )


def _get_sent_bytes(operation: str, counts: ExactCounts) -> CountValues:
    """Return the distinct numbers of bytes per step that an operation sent in a run.

    The result is ``[0.0]`` if the operation was not called, and an empty list if the bytes are
    unknown. ``operation`` is ``AXIS.OPERATION``.
    """
    default = [] if f"{CALLS_PREFIX}{operation}" in counts else [0.0]
    return counts.get(f"{SENT_PREFIX}{operation}", default)


def _compare_value(name: str, base: CountValues, new: CountValues) -> CountChange | None:
    """Return the change of a count that belongs to no operation, such as memory, None without one.

    Args:
        name: the name of the count.
        base: its distinct values in BASE, empty if BASE lacks it.
        new: its distinct values in NEW, empty if NEW lacks it.
    """
    metric = find_metric(name)
    component = name.removeprefix(MEMORY_PREFIX)
    if component != name:
        title = f"{component} in memory"
    else:
        title = metric.title if metric else name
    change = CountChange(path=f"counts.{component}", base=base, new=new, message=f"{title}: ")
    if not base or not new:
        text = f"only {'BASE' if base else 'NEW'} has it"
        return _complete(change, text, verdict=Verdict.UNCONFIRMED)
    if _are_equal(base, new):
        return None
    unit = metric.unit if metric else ""
    base_text, new_text = (
        " or ".join(_format_value(name, value, unit) for value in values) for values in (base, new)
    )
    if len(base) > 1:
        return _report_variation(change, base_text)
    return _complete(change, f"{base_text} -> {new_text}{_describe_disagreement(new)}")


def _format_value(name: str, value: float | str, unit: str) -> str:
    """Return the value of a count as text with its unit, which is empty for plain numbers.

    A schedule is text already. A bubble is a fraction and becomes a percentage. ``name`` is the
    name of the count.
    """
    if isinstance(value, str):
        return value
    if name.startswith("bubble"):
        return format_percent(value)
    return format_quantity(value, unit)


def _format_counts(values: CountValues) -> str:
    """Return the distinct numbers of calls in ascending order, joined by ``or``."""
    return " or ".join(f"{value:g}" for value in sorted(map(_to_number, values)))


def _format_bytes(values: CountValues) -> str:
    """Return the distinct numbers of bytes with units, joined by ``or``."""
    return " or ".join(format_bytes(_to_number(value)) for value in values)


def _describe_disagreement(new: CountValues) -> str:
    """Return a phrase if a count differs between the repetitions of NEW, otherwise an empty text.

    ``new`` has the distinct values.
    """
    return ", the count differs between repetitions of NEW" if len(new) > 1 else ""


def _to_number(value: float | str) -> float:
    """Return a value of a count that is a number, not text. Raises ``AssertionError`` for text."""
    assert isinstance(value, int | float), "calls and bytes are numbers"
    return value


def _are_equal(base: CountValues, new: CountValues) -> bool:
    """Return True if a count has one value, which is equal in all repetitions of both runs."""
    if len(base) != 1 or len(new) != 1:
        return False
    if isinstance(base[0], str) or isinstance(new[0], str):
        return base[0] == new[0]
    return isclose(base[0], new[0], rel_tol=1e-9)
