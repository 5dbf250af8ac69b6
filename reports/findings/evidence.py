"""Evidence: the facts from which rules derive findings, in the same form for runs and traces.

A rule is a function that returns findings, such as ``find_slow_rates``. A finding is a problem with
its likely cause.
`reports/findings/record_evidence.py` makes evidence from a run, `reports/traces/trace_evidence.py`
from traces.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from parbench.bench.results.formatting import format_percent

StepCommand = Callable[..., str]
"""A function that returns the command to measure a step again, empty if there is none.

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
    """The bytes of all of these calls together."""
    hideable_seconds: float
    """The part of ``exposed_seconds`` that an earlier start could hide."""
    is_on_demand: bool = False
    """True if parameters are gathered when needed, without prefetch."""


@dataclass(frozen=True, kw_only=True)
class PipelineIdle:
    """The idle time of a pipeline step by cause, in seconds per step, with facts on the pipeline."""

    bubble_seconds: float
    """The idle time due to the schedule.

    In traces it is the exposed time of messages between stages.
    """
    uneven_seconds: float
    """The idle time that stages of equal duration would save. 0 if it is not significant."""
    message_seconds: float = 0.0
    """The idle time due to the latency of messages between stages."""
    ranks: int
    """The number of ranks of the pipeline."""
    microbatches: int | None = None
    """The number of microbatches per step, None in traces."""
    layers_by_stage: tuple[int, ...] = ()
    """The number of layers of each stage, empty if unknown."""
    slowest_rank: int | None = None
    """The rank that computes longest, None in runs."""


@dataclass(frozen=True, kw_only=True)
class StepEvidence:
    """The times, bytes and settings of one training step of a run or of a job's traces.

    All times are seconds per step, from a profiled step where there is one.
    """

    name: str
    """The label of the case, empty for the step of a trace."""
    id: str
    """The id of the case, empty for the step of a trace."""
    seconds: float
    """The wall time of the step."""
    num_observations: int
    """The number of steps in a trace, or of repetitions of a run."""
    command: StepCommand
    """Returns the command that measures the step with other settings."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """The parameters of the case by name, empty for the step of a trace."""
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
    max_expert_load: float | None = None
    """The tokens of the rank with most tokens over the mean of all ranks, None if unknown."""
    bytes_ratios: Mapping[str, float] = field(default_factory=dict)
    """The counted bytes over the analytical bytes that ranks send, keyed by mesh axis."""
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    """The duration of each phase that the step marks, such as ``forward``, keyed by phase."""
    exposed_by_phase: Mapping[str, float] = field(default_factory=dict)
    """The seconds of exposed communication, keyed by phase."""
    idle_by_phase: Mapping[str, float] = field(default_factory=dict)
    """The seconds in which nothing runs, keyed by phase."""

    @property
    def full_name(self) -> str:
        """The name of the step for a sentence: ``the step of NAME``, or only ``the step``."""
        return f"the step of {self.name}" if self.name else "the step"

    def name_phase(self, seconds_by_phase: Mapping[str, float], total: float) -> str:
        """Return ``, most of it in phase NAME`` for the phase that has most of a time.

        ``seconds_by_phase`` are the parts of ``total`` in each phase, in seconds. If several nested
        phases have more than half, the shortest is named. Empty if no phase has more than half.
        """
        phases = [name for name, seconds in seconds_by_phase.items() if seconds > total / 2]
        if not phases:
            return ""
        return f", most of it in phase {min(phases, key=self.phase_seconds.__getitem__)}"

    def format_share(self, seconds: float) -> str:
        """Return a time as a percentage of the wall time of the step."""
        return format_percent(seconds / self.seconds)


@dataclass(frozen=True, kw_only=True)
class StragglerEvidence:
    """A rank for which other ranks wait, with the size of the wait."""

    rank: int
    """The global rank."""
    observation: Literal["arrives last", "finishes last", "computes longest"]
    """The reason for which the rank counts as slow."""
    occasions: str
    """The repetitions or calls with the observation: ``in 3 of 3 repetitions``."""
    waited_seconds: float
    """The seconds that the other ranks wait for the rank in each operation or step."""
    waited_share: float
    """These seconds as a fraction of the duration of the operation or step."""
    compute_ratio: float = 1.0
    """The rank's compute time over the median of other ranks, 1 if it does not explain the wait."""
    host_idle_seconds: float = 0.0
    """The extra time per step in which nothing runs on the rank, relative to other ranks."""
    command: str = ""
    """The command that examines the host of the rank, empty if there is none."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Bus bandwidths that should be equal: of links at one distance, or of groups."""

    kind: Literal["slow-link", "slow-group"]
    """The kind of finding that a low bandwidth causes."""
    scope: str
    """The distance of the ranks, or the operation with its size. It may be empty."""
    by_name: Mapping[str, Sequence[float]]
    """The bandwidths in B/s, one for each repetition, keyed by the name of the link or group.

    A name may stand for all links of a rank: ``links of rank 3``.
    """
    command: str
    """The command that measures the bandwidths again."""


@dataclass(frozen=True, kw_only=True)
class TimeComparison:
    """The time of an operation next to a reference time that it should not exceed."""

    kind: Literal["off-fit", "slower-than-composite"]
    """The reference: the fit of the operation over size, or an operation that includes its work."""
    name: str
    """The operation with its size and mode."""
    seconds: float
    """The mean time of the operation over repetitions or calls."""
    reference: str
    """A phrase that names the reference, such as ``its fit``."""
    ratio: float
    """The time over the reference time, the geometric mean over repetitions or calls."""
    low_ratio: float | None
    """The lower end of the 95 % interval of ``ratio``, None with fewer than three repetitions."""
    lost_share: float
    """The fraction of a total time that is lost because the operation exceeds its reference time.

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
    """The ranks for which others wait."""
    rates: Sequence[Rates] = ()
    """The bandwidths of links and groups, in sets that are compared."""
    comparisons: Sequence[TimeComparison] = ()
    """The times of operations next to reference times."""
    bus_bandwidths: Mapping[str, float] = field(default_factory=dict)
    """The bus bandwidth of each communication case in B/s, keyed by label. 0 if unknown."""
    link_bytes_per_second: float | None = None
    """The link speed that the user declared in B/s, None if none was declared."""
