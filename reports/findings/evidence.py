"""Evidence: the facts from which rules derive findings, in the same form for runs and traces.

A rule is a function that yields findings, such as ``find_slow_rates``. A finding is a problem with
its likely cause.
`reports/findings/run_evidence.py` makes evidence from a run, `reports/traces/trace_evidence.py`
from traces.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from parbench.bench.results.formatting import format_percent
from parbench.reports.stats import estimate_paired_effect

StepCommand = Callable[..., str]
"""A function that returns the ``parbench run`` command to measure a step again, empty for none.

Its argument is a preset, for a step that cannot be measured again itself. Settings follow by name.
"""


@dataclass(frozen=True, kw_only=True)
class Communication:
    """The exposed communication of one profiled step, on one mesh axis or of one kind of call.

    In a run it is the communication on an axis. In traces it is the communication by one operation
    in one process group.
    """

    label: str
    """The name for messages, such as ``fsdp (axis dp)``."""
    exposed_seconds: float
    """The seconds per step that neither compute nor copies hide."""
    reductions: float = 0
    """The number of calls of all_reduce and reduce_scatter that together sum the gradients once."""
    has_buckets: bool = True
    """False if the step has no parameter for the size of gradient buckets."""
    largest_bytes: int = 0
    """The bytes of the largest reduction call, 0 if unknown."""
    reduced_bytes: float = 0
    """The bytes of all ``reductions`` together: those that sum the gradients once."""
    is_on_demand: bool = False
    """True if parameters are probably gathered only when they are needed, without prefetch."""


@dataclass(frozen=True, kw_only=True)
class PipelineIdle:
    """The idle time of a pipeline step by cause in seconds per step, and facts on the pipeline."""

    bubble_seconds: float
    """The idle time due to the schedule.

    In traces it is the exposed time of messages between stages.
    """
    uneven_seconds: float
    """The idle time that stages of equal duration would save. 0 if it is not significant."""
    microbatches: int | None = None
    """The number of microbatches per step, None in traces."""
    layers_by_stage: tuple[int, ...] = ()
    """The number of layers of each stage, empty if unknown."""


@dataclass(frozen=True, kw_only=True)
class StepEvidence:
    """The times, bytes and settings of one training step of a run or of a job's traces.

    All times are seconds per step, from a profiled step where there is one. In traces, copies and
    idle time are minimums over ranks.
    """

    name: str
    """The label of the case, empty for the step of a trace."""
    seconds: float
    """The wall time of the step."""
    command: StepCommand
    """A function that returns the command that measures the step with other settings."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """The parameters of the step's case, keyed by name. Empty for the step of a trace."""
    communication: Sequence[Communication] = ()
    """The exposed communication, one item for each axis or kind of call."""
    copy_seconds: float = 0.0
    """The time of copies that neither compute nor communication hides."""
    idle_seconds: float = 0.0
    """The time in which nothing runs on the device."""
    syncs: int = 1
    """The number of times per step that all gradients are summed: 1, or once per microbatch."""
    pipeline: PipelineIdle | None = None
    """The idle time by cause if the step is a pipeline, otherwise None."""
    expert_imbalance_seconds: float = 0.0
    """The time that balanced experts would save. 0 if it is not significant."""
    bytes_ratios: Mapping[str, float] = field(default_factory=dict)
    """The ratio of sent bytes to the bytes that the formula of the step gives, keyed by mesh axis.

    The sent bytes were counted at the process groups.
    """

    def format_share(self, seconds: float) -> str:
        """Return a time as a percentage of the wall time of the step."""
        return format_percent(seconds / self.seconds)


@dataclass(frozen=True, kw_only=True)
class StragglerEvidence:
    """A rank for which other ranks wait (straggler), with the time that they wait."""

    rank: int
    """The global rank."""
    observation: str
    """The reason for which the rank counts as slow: ``arrives last in 3 of 3 repetitions``."""
    waited_seconds: float
    """The seconds that the other ranks wait for the rank in each operation or step."""
    waited_share: float
    """``waited_seconds`` as a fraction of the duration of the operation or step."""
    command: str = ""
    """The command that examines the host of the rank, empty if there is none."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """A set of bus bandwidths that are equal if no link or process group is slow.

    They are those of links at one network distance, or of groups that ran one operation.
    """

    kind: Literal["slow-link", "slow-group"]
    """The kind of the finding that is reported if one of the bandwidths is low."""
    scope: str
    """The network distance of the links, or the operation of the groups with its size, as text."""
    by_name: Mapping[str, Sequence[float]]
    """The bandwidths in B/s, one for each repetition, keyed by the name of the link or group.

    A name may stand for all links of a rank: ``links of rank 3``.
    """
    command: str
    """The command that measures the bandwidths again."""


@dataclass(frozen=True, kw_only=True)
class FitComparison:
    """The time of an operation, compared with the fit of its times over size."""

    name: str
    """The operation with its size and mode."""
    seconds: float
    """The mean time of the operation in seconds, over repetitions of a run or calls of a trace."""
    ratio: float
    """The measured time over the fitted time, the geometric mean over repetitions or calls."""
    low_ratio: float
    """The lower end of the 95 % interval of ``ratio``."""
    lost_share: float
    """The fraction of a total time that is lost because the operation exceeds its fitted time.

    The total is the time of a traced step. In a run it is the sum of the operation's times over all
    sizes.
    """
    command: str
    """The command that measures the operation again."""


@dataclass(frozen=True, kw_only=True)
class CollectedEvidence:
    """All evidence from a run, or from the traces of a job."""

    steps: Sequence[StepEvidence] = ()
    """The training steps."""
    stragglers: Sequence[StragglerEvidence] = ()
    """The ranks for which other ranks wait."""
    rates: Sequence[Rates] = ()
    """Sets of bandwidths of links or groups. The bandwidths of one set are compared."""
    comparisons: Sequence[FitComparison] = ()
    """The times of operations that are compared with their fits."""


def compare_with_fit(
    name: str,
    fitted_seconds: Sequence[float],
    seconds: Sequence[float],
    *,
    total_seconds: float,
    affected_seconds: float,
    command: str,
) -> Iterator[FitComparison]:
    """Yield the comparison of the times of an operation with the fit of its times over size.

    Nothing is yielded for fewer than three times, because their ratio has no interval.

    Args:
        name: the operation with its size and mode.
        fitted_seconds: the time by the fit for each repetition or call.
        seconds: the measured time of each repetition or call.
        total_seconds: the time of which ``lost_share`` is a fraction.
        affected_seconds: the part of ``total_seconds`` that the operation takes, and that would
            shrink if the operation took its fitted time.
        command: the command that measures the operation again.
    """
    effect = estimate_paired_effect(dict(enumerate(fitted_seconds)), dict(enumerate(seconds)))
    if effect is not None and effect.low is not None:
        yield FitComparison(
            name=name,
            seconds=fmean(seconds),
            ratio=effect.ratio,
            low_ratio=1 + effect.low,
            lost_share=affected_seconds * (1 - 1 / effect.ratio) / total_seconds,
            command=command,
        )
