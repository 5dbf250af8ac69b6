"""Exact counts of a step: calls and bytes by axis and operation, memory by component, the schedule.

Counts do not depend on the load of the machine, so one repetition decides. A count that is equal in
all repetitions of BASE and differs in NEW has changed. A count that differs between the repetitions
of BASE, or that only one run has, is UNDECIDED.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from parbench.bench.results.details import PipelineDetails, read_details
from parbench.bench.results.formatting import format_bytes
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

The names are those of metrics, such as ``calls.dp.all_reduce`` (calls per step),
``sent.dp.all_reduce`` (bytes per step) or ``memory_counted.parameters`` (bytes), and ``schedule``.
"""
ROUTED_MEMORY = "memory_counted.activations"
"""The name of the count that is not exact if a case has experts.

It depends on the tokens that are routed to a rank.
"""


@dataclass(frozen=True, kw_only=True)
class CountChange:
    """A count of calls, bytes or memory, or a schedule, that differs between BASE and NEW."""

    path: str
    """The name of the count, as ``--across`` takes it: ``counts.dp.all_reduce``, for example."""
    base: CountValues
    """The distinct values over the repetitions of BASE, empty if BASE lacks the count."""
    new: CountValues
    """The distinct values over the repetitions of NEW, empty if NEW lacks the count."""
    message: str
    """A phrase with the name of the count and both values."""
    verdict: Verdict
    """COUNT CHANGED, or UNDECIDED if a run lacks the count or BASE has several values."""
    is_intended: bool
    """True if the user declared the change intentional with ``--across``."""

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
    """All counts that differ, including intended and UNDECIDED differences."""


def collect_counts(result: CaseResult) -> dict[str, list[float | str]]:
    """Return the exact counts of a case: calls, bytes, memory, and the schedule of a step as text.

    The key is the name of a count, and the value has its distinct values over the repetitions. A
    repetition that did not call an operation that another repetition called has the value 0. The
    result is empty for a case with a wrong result.
    """
    repetitions = [_read_counts(record) for record in result.measured if result.metrics]
    values: dict[str, dict[float | str, None]] = {}
    for name in dict.fromkeys(name for counts in repetitions for name in counts):
        for counts in repetitions:
            if name in counts:
                values.setdefault(name, {})[counts[name]] = None
            elif _is_uncalled(name, counts):
                values.setdefault(name, {})[0.0] = None
    return {name: list(distinct) for name, distinct in values.items()}


def _read_counts(record: Record) -> dict[str, float | str]:
    """Return the exact counts (calls, bytes, memory, schedule) of one repetition, keyed by name.

    The schedule of a step is text, the other counts are numbers.
    """
    is_routed = "rank_load" in record.details
    counts: dict[str, float | str] = {}
    for name, metric in record.metrics.items():
        declared = find_metric(name)
        is_exact = declared is not None and (declared.is_exact or name.startswith("calls."))
        if is_exact and metric.value is not None and not (is_routed and name == ROUTED_MEMORY):
            counts[name] = metric.value
    pipeline = read_details(record, PipelineDetails)
    if pipeline is not None:
        text = f"{pipeline.schedule} of {pluralize(pipeline.microbatches, 'microbatch')}"
        if pipeline.virtual_stages > 1:
            text += f", {pluralize(pipeline.virtual_stages, 'virtual stage')} per rank"
        counts["schedule"] = text
    return counts


def _is_uncalled(name: str, counts: Mapping[str, object]) -> bool:
    """Return True if a count is missing because its operation was not called, so its value is 0.

    False if the calls of all operations are unknown. ``name`` is the name of the missing count.
    ``counts`` are the known counts, keyed by name.
    """
    prefix, _, operation = name.partition(".")
    if prefix not in ("calls", "sent") or f"calls.{operation}" in counts:
        return False
    return any(known_name.startswith("calls.") for known_name in counts)


def compare_counts(
    base: ExactCounts, new: ExactCounts, intended: Sequence[str] = ()
) -> CountComparison:
    """Compare the exact counts of a case (calls, bytes, memory, schedule) in two runs.

    Nothing is compared if a run has no counts. An operation that a run did not call has 0 calls.

    Args:
        base: the counts in BASE, keyed by name.
        new: the counts in NEW, keyed by name.
        intended: globs for the names of counts whose changes are intentional, such as
            ``counts.dp.*``.
    """
    if not base or not new:
        return CountComparison()
    num_compared = 0
    changes = []
    for name in dict.fromkeys([*base, *new]):
        if name.startswith("calls.") and name.count(".") == 1:
            continue  # calls.AXIS is the sum over the operations on an axis, which are compared.
        base_values, new_values = (
            counts.get(name, [0.0] if _is_uncalled(name, counts) else []) for counts in (base, new)
        )
        is_decided = len(base_values) == 1 and len(new_values) > 0
        num_compared += is_decided
        if is_decided and list(base_values) == list(new_values):
            continue
        prefix, _, rest = name.partition(".")
        path = f"counts.{rest if prefix in ('calls', 'sent', 'memory_counted') else name}"
        change = CountChange(
            path=path,
            base=base_values,
            new=new_values,
            message=_describe_change(name, base_values, new_values),
            verdict=Verdict.COUNT_CHANGED if is_decided else Verdict.UNDECIDED,
            is_intended=any(fnmatchcase(path, glob) for glob in intended),
        )
        changes.append(change)
    return CountComparison(num_compared=num_compared, changes=tuple(changes))


def _describe_change(name: str, base: CountValues, new: CountValues) -> str:
    """Return a phrase with the name of a count and its values in BASE and NEW.

    For example ``all_gather on fsdp: 9 -> 10 calls a step``. Bytes are followed by their
    difference.
    """
    metric = find_metric(name)
    unit = metric.unit if metric else ""
    values = " -> ".join(_format_values(base, new, unit))
    if unit == "B" and len(base) == len(new) == 1:
        difference = float(new[0]) - float(base[0])
        values += f" ({'+' if difference > 0 else ''}{format_bytes(difference)})"
    prefix, _, rest = name.partition(".")
    axis, _, operation = rest.rpartition(".")
    if prefix == "calls":
        return f"{operation} on {axis}: {values} calls a step"
    if prefix == "sent":
        return f"{operation} on {axis}: {values} a step"
    if prefix == "memory_counted":
        return f"{rest} in memory: {values}"
    return f"{metric.title if metric else name}: {values}"


def _format_values(base: CountValues, new: CountValues, unit: str) -> tuple[str, str]:
    """Return the distinct values of a count in BASE and in NEW as two texts, joined by ``or``.

    A text is ``unknown`` without values. ``unit`` is the unit of the count: ``B`` for bytes. Bytes
    have three digits, or all digits if two values would look equal.
    """
    text_by_value: dict[float | str, str] = {}
    for value in (*base, *new):
        if isinstance(value, str):
            text_by_value[value] = value
        elif unit == "B":
            text_by_value[value] = format_bytes(value)
        else:
            text_by_value[value] = f"{value:g} {unit}".rstrip()
    if unit == "B" and len(set(text_by_value.values())) < len(text_by_value):
        text_by_value = {value: f"{float(value):,.0f} B" for value in text_by_value}
    base_text = " or ".join(text_by_value[value] for value in base)
    new_text = " or ".join(text_by_value[value] for value in new)
    return base_text or "unknown", new_text or "unknown"
