"""The metrics, each declared once: unit, direction, heading, meaning and formula.

Capitals in a name stand for any word: ``exposed_comm.AXIS`` declares ``exposed_comm.dp``. Columns,
glossary and README follow from these declarations. Benchmarks give values.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, TypeVar

import msgspec

from parbench.bench.results.stats import (
    Estimate,
    ValueKind,
    estimate_mean,
)

Better = Literal["lower", "higher"]
"""The direction in which a metric improves."""
T = TypeVar("T")
_ANY_WORD = re.compile("[A-Z]{2,}")
"""Matches a word in capitals in the name of a declared metric, which stands for any word."""


class MetricValue(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The value of one metric of a benchmark, with its unit and its 95 % confidence interval."""

    value: float | None
    """The number in ``unit``, None if it is unknown. ``method`` states its statistic."""
    unit: str = ""
    """A unit such as ``s``, ``B`` or ``B/s``, empty for a fraction, ratio or count."""
    better: Better | None = None
    """The direction in which the metric improves, None if it is neither good nor bad."""
    low: float | None = None
    """The lower bound of the interval in ``unit``, None if there is no interval."""
    high: float | None = None
    """The upper bound of the interval in ``unit``, None if there is no interval."""
    method: str = ""
    """A phrase about the source, the statistic and the interval of the value, empty if not stated.

    For example ``last arrival - first, median of 60 iterations in 10 blocks of one repetition``.
    """


@dataclass(frozen=True)
class Metric:
    """The declaration of a metric, or of all metrics whose names follow one pattern."""

    name: str
    """The name. A word in capitals stands for any word, such as the axis in ``bytes_sent.AXIS``."""
    unit: str
    """A unit such as ``s``, ``B`` or ``B/s``, empty for a fraction, ratio or count."""
    better: Better | None
    """The direction in which the metric improves, None if it is neither good nor bad."""
    title: str
    """The heading of the metric's column in tables."""
    help: str
    """A phrase that defines the metric for glossary and documentation."""
    formula: str = ""
    """The formula or the method of the metric as a phrase, empty if ``help`` is sufficient."""
    tables: tuple[str, ...] = ()
    """The tables of training steps that show the metric, such as ``times`` or ``experts``."""
    number_format: str = ""
    """A format such as ``{:.3f}`` for a value without unit. If empty, the value prints as %."""
    kind: ValueKind = "amount"
    """The range of the values: ``amount`` (above 0), ``from zero`` or ``difference`` (any sign).

    For an amount the mean over repetitions is geometric, otherwise arithmetic. Tables show the
    intervals of metrics of kind difference.
    """
    is_exact: bool = False
    """True for a count that must be the same in all runs of a step, so that any change matters."""

    def specialize(self, name: str) -> "Metric | None":
        """Return this declaration for the metric ``name``, None if its pattern does not match.

        The result has the name ``name``. The words of ``name`` also replace the words in capitals
        in title and help: with ``bytes_sent.dp``, ``bytes sent on AXIS`` becomes ``bytes sent on
        dp``.
        """
        match = re.fullmatch(_ANY_WORD.sub("(.+)", self.name.replace(".", r"\.")), name)
        if match is None:
            return None
        title, description = self.title, self.help
        for capitals, word in zip(_ANY_WORD.findall(self.name), match.groups(), strict=True):
            title = title.replace(capitals, word)
            description = description.replace(capitals, word)
        return replace(self, name=name, title=title, help=description)


# fmt: off
METRICS = (
    Metric("time", "s", "lower", "time",
           "geometric mean over repetitions of the median, with its 95 % interval"),
    Metric("step_time", "s", "lower", "step time",
           "geometric mean over repetitions of the median, with its 95 % interval"),
    Metric("HEADLINE_p99", "s", "lower", "p99",
           "99th percentile, from repetitions of at least 100 iterations"),
    Metric("algbw", "B/s", "higher", "algbw GB/s",
           "algorithm bandwidth in 1e9 B/s, nccl-tests' convention", "size / time"),
    Metric("busbw", "B/s", "higher", "busbw GB/s",
           "bus bandwidth in 1e9 B/s, nccl-tests' convention", "algbw x nccl-tests' factor"),
    Metric("busbw_of_copy", "", "higher", "% of memory-copy bandwidth",
           "bus bandwidth over that of a copy in memory on the same host", "busbw / memory.copy"),
    Metric("flops", "FLOP/s", "higher", "FLOP/s", "floating-point operations a second"),
    Metric("pairs_per_second", "pairs/s", "higher", "pairs/s",
           "token-expert pairs dispatched and combined per second"),
    Metric("issue_time", "s", "lower", "issue", "time of the call itself",
           "until every rank has issued"),
    Metric("skew", "s", "lower", "skew", "how far apart ranks arrive at an iteration",
           "last arrival - first", kind="from zero"),
    Metric("transfer", "s", "lower", "transfer", "time from the last rank's arrival to the end",
           "last exit - last arrival", kind="from zero"),
    Metric("rank_mean_time", "s", "lower", "mean over ranks",
           "time as the mean over ranks, which nccl-tests reports, instead of the maximum"),
    # ---- a training step; tables show metrics in this order
    Metric("tokens_per_second", "tokens/s", "higher", "tokens/s",
           "tokens per second of all ranks"),
    Metric("bubble_fraction", "", "lower", "bubble fraction",
           "share of the pipeline's time in which ranks run no action", "bubble / (ranks x makespan)",
           ("pipelines",), kind="from zero"),
    Metric("bubble_fraction_simulated", "", None, "simulated",
           "bubble fraction simulated with this step's own times",
           "simulated with the mean time of each kind, no latency", ("pipelines",),
           kind="from zero"),
    Metric("bubble_fraction_formula", "", None, "analytical",
           "analytical bubble fraction of the schedule: (P-1)/(M+P-1) for 1F1B with P ranks and M "
           "microbatches", "analytical", ("pipelines",), kind="from zero"),
    Metric("mfu", "", "higher", "mfu",
           "model FLOPs utilization of a GPU, FLOPs counted as in PaLM, of the datasheet's peak",
           "model FLOPs of a step / step time / peak FLOP/s",
           ("steps",)),
    Metric("compute", "s", None, "compute", "time in which a rank computes", "", ("times",)),
    Metric("overlap", "", "higher", "overlap",
           "share of communication that compute or copies hide", "hidden / (hidden + exposed)",
           ("steps",), kind="from zero"),
    Metric("exposed_comm.AXIS", "s", "lower", "exposed AXIS",
           "communication on AXIS that neither compute nor copies hide",
           "duration of communication outside compute and copies", ("times",), kind="from zero"),
    Metric("exposed_fraction", "", "lower", "exposed",
           "share of the profiled step in which communication is exposed",
           "exposed communication on all axes / profiled step", kind="from zero"),
    Metric("phase_time.PHASE", "s", None, "phase PHASE",
           "time of a phase that the step marks, such as its backward pass", kind="from zero"),
    Metric("phase_compute.PHASE", "s", None, "compute of PHASE",
           "time of a phase in which the rank computes", kind="from zero"),
    Metric("phase_exposed.PHASE", "s", None, "exposed in PHASE",
           "exposed communication of a phase, on all axes", kind="from zero"),
    Metric("phase_idle.PHASE", "s", None, "idle in PHASE",
           "time of a phase in which the rank does nothing", kind="from zero"),
    Metric("exposed_copy", "s", "lower", "copy",
           "copies that compute does not hide", "", ("times",), kind="from zero"),
    Metric("idle", "s", "lower", "idle",
           "time in which a rank does nothing", "", ("times",), kind="from zero"),
    Metric("idle_schedule", "s", "lower", "bubble: schedule", "bubble time due to the schedule",
           "bubble with the mean time of each kind of action, simulated", ("pipelines",),
           kind="from zero"),
    Metric("idle_imbalance", "s", "lower", "bubble: imbalance", "bubble time due to uneven stages",
           "simulated with each stage's own times, less the schedule's part", ("pipelines",),
           kind="difference"),
    Metric("idle_rest", "s", "lower", "bubble: rest", "remaining bubble time: messages and jitter",
           "measured bubble time less the two simulated parts", ("pipelines",), kind="difference"),
    Metric("in_flight", "microbatches", None, "in flight",
           "maximum number of microbatches whose activations a rank holds",
           "from a microbatch's forward until the end of its backward, counted in the order",
           ("pipelines",), "{:.4g}", is_exact=True),
    Metric("ect", "s", "lower", "ect",
           "effective communication time: what the step would save without communication",
           "time of an instrumented step minus the same step without communication; a lower bound "
           "if the instrumentation makes a GPU wait for the host", ("times",), kind="difference"),
    Metric("straggler_wait", "s", "lower", "straggler wait",
           "time that communication waits for the last rank to arrive",
           "time in communication before the last rank has arrived", ("times",), kind="from zero"),
    Metric("comm_transfer.AXIS", "s", "lower", "transfer AXIS",
           "communication on AXIS after the last rank has arrived",
           "per call, minimum over ranks", ("times",), kind="from zero"),
    Metric("calls.AXIS.OPERATION", "", None, "calls AXIS OPERATION",
           "calls of AXIS OPERATION that a rank makes in a step, mean over ranks",
           "counted at the process group", number_format="{:.4g}", kind="from zero", is_exact=True),
    Metric("calls.AXIS", "", None, "calls AXIS",
           "calls on AXIS that a rank makes in a step, mean over ranks",
           "counted at the process group", number_format="{:.4g}", kind="from zero"),
    Metric("sent.AXIS.OPERATION", "B", None, "sent AXIS OPERATION",
           "bytes that a rank sends in a step by AXIS OPERATION, mean over ranks; unknown where "
           "the data decide how many", "counted at the process group", kind="from zero",
           is_exact=True),
    Metric("bytes_sent.AXIS", "B", None, "bytes sent AXIS", "bytes sent on AXIS",
           "counted at the process group", kind="from zero"),
    Metric("bytes_expected.AXIS", "B", None, "bytes expected AXIS",
           "bytes sent on AXIS, analytical", "analytical", kind="from zero"),
    Metric("bytes_ratio.AXIS", "", None, "bytes ratio",
           "counted bytes / analytical bytes; a note explains values other than 1",
           "counted / analytical", number_format="{:.3f}", kind="from zero"),
    Metric("memory_peak", "B", "lower", "peak",
           "peak memory of a step above that at its start", "of torch's allocator",
           ("times",), kind="from zero"),
    Metric("memory.COMPONENT", "B", "lower", "measured",
           "memory while the step ran, maximum over ranks",
           "measured on storages, activations by their peak", kind="from zero"),
    Metric("memory_counted.COMPONENT", "B", None, "counted",
           "bytes of a rank's tensors, each storage once", "counted from tensors", kind="from zero",
           is_exact=True),
    Metric("memory_formula.COMPONENT", "B", None, "analytical",
           "analytical memory, from shapes and layout", "analytical", kind="from zero"),
    # ---- experts over ranks
    Metric("imbalance.rank", "", "lower", "rank load", "how uneven the ranks' work is",
           "maximum over mean of the token-expert pairs per rank, without dropped pairs, in the "
           "worst layer", ("experts",), "{:.2f}"),
    Metric("drop_rate", "", "lower", "dropped",
           "share of token-expert pairs dropped because experts were full",
           "dropped over routed, all ranks and layers", ("experts",), kind="from zero"),
    Metric("dispatch_time", "s", "lower", "dispatch time",
           "time to send tokens to experts, with packing"),
    Metric("dispatch_packing_time", "s", "lower", "packing time",
           "time to permute tokens by expert, before and after the transfer"),
    Metric("dispatch_transfer_time", "s", "lower", "transfer time",
           "time of the collectives of dispatch"),
    Metric("combine_time", "s", "lower", "combine time", "time to send results back, with packing"),
    Metric("dispatch_bandwidth.wire", "B/s", "higher", "dispatch GB/s",
           "bytes that leave the busiest rank over dispatch time", "", ("experts",)),
)
# fmt: on


@cache
def find_metric(name: str) -> Metric | None:
    """Return the first declaration in METRICS whose name or pattern matches the name of a metric.

    The result has the pattern as its name, see ``Metric.specialize``. It is None if no declaration
    matches, for example for a metric that a user's benchmark defines.
    """
    return next((metric for metric in METRICS if metric.specialize(name) is not None), None)


def make_value(name: str, number: float | Estimate | None, method: str = "") -> MetricValue:
    """Return ``number`` as a value of the metric ``name``, with the unit that METRICS declares.

    Args:
        name: the name of the metric, such as ``exposed_comm.dp``.
        number: the number in that unit. An ``Estimate`` is a number with its interval. None stands
            for an unknown number, and the result then has the value None.
        method: a phrase about the source of the number, such as ``99th percentile``. The field
            ``method`` of the result is the formula of the metric, then this phrase, then the method
            of the estimate, separated by commas. Empty parts are left out.

    Raises ``LookupError`` if METRICS does not declare the metric.
    """
    metric = find_metric(name)
    if metric is None:
        raise LookupError(f"metric {name} is not declared in {__name__}")
    method = ", ".join(filter(None, (metric.formula, method)))
    value = MetricValue(value=None, unit=metric.unit, better=metric.better, method=method)
    return _replace_number(value, number)


def make_values(
    numbers: Mapping[str, float | Estimate | None], method: str = ""
) -> dict[str, MetricValue]:
    """Return numbers as values of metrics, by name of the metric, see ``make_value``.

    ``numbers`` holds the number of each metric by name, None for an unknown number. ``method`` is a
    phrase about the source of all numbers. Raises ``LookupError`` for an undeclared metric.
    """
    return {name: make_value(name, number, method) for name, number in numbers.items()}


def _replace_number(metric: MetricValue, number: float | Estimate | None) -> MetricValue:
    """Return a copy of ``metric`` with another number and, if it is an estimate, its interval.

    A value of None means unknown. The field ``method`` of the copy is that of ``metric``, followed
    by that of the estimate.
    """
    if not isinstance(number, Estimate):
        return msgspec.structs.replace(metric, value=number)
    method = ", ".join(filter(None, (metric.method, number.method)))
    return msgspec.structs.replace(
        metric, value=number.value, low=number.low, high=number.high, method=method
    )


def collect_by_name(mappings: Sequence[Mapping[str, T]]) -> dict[str, list[T]]:
    """Return a mapping from each name to the list of its values, in the order of the mappings.

    A mapping without the name adds no value to the list.
    """
    collected: dict[str, list[T]] = {}
    for mapping in mappings:
        for name, item in mapping.items():
            collected.setdefault(name, []).append(item)
    return collected


def merge_metrics(repetitions: Sequence[Mapping[str, MetricValue]]) -> dict[str, MetricValue]:
    """Merge the metrics that a benchmark had in several starts of all ranks (repetitions).

    ``repetitions`` holds the metrics of each repetition by name. A merged metric is the mean over
    the repetitions that have it, with its 95 % interval. The result has the merged metrics by name.
    """
    by_name = collect_by_name(repetitions)
    return {name: _merge(name, metrics) for name, metrics in by_name.items()}


def _merge(name: str, metrics: Sequence[MetricValue]) -> MetricValue:
    """Return the mean of one metric over the repetitions with a known value, with its t interval.

    The mean is geometric for a metric of kind ``amount``, otherwise arithmetic. A metric that is
    not declared counts as a difference.

    In three cases the result differs. If all values are equal and without interval, such as counts,
    the result is this value. If only one repetition has a value, the result is this value without
    its interval. If an amount is not above zero in a repetition, the mean is arithmetic.

    ``name`` is the name of the metric, and ``metrics`` holds its value in each repetition.
    """
    first = metrics[0]
    if first.low is None and all(metric == first for metric in metrics):
        return first
    known = [metric for metric in metrics if metric.value is not None]
    if len(known) < 2:
        # The interval of a single repetition lacks the variation between repetitions.
        return msgspec.structs.replace(known[0], low=None, high=None) if known else first
    numbers = [metric.value for metric in known if metric.value is not None]
    declared = find_metric(name)
    kind: ValueKind = declared.kind if declared else "difference"
    if kind == "amount" and min(numbers) <= 0:
        kind = "from zero"
    merged = msgspec.structs.replace(first, method="")
    return _replace_number(merged, estimate_mean(numbers, "repetitions", kind))
