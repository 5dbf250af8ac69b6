"""The evidence for findings: facts in the same form for records and for traces.

`reports/findings/record_evidence.py` makes evidence from a run, `reports/traces/trace_evidence.py`
from traces.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from parbench.bench.results.formatting import format_percent

StepCommand = Callable[..., str]
"""Builds the command that measures a step again, empty if there is none.

Its argument is a preset for a step that cannot be measured again. Settings follow by name.
"""


@dataclass(frozen=True, kw_only=True)
class Communication:
    """The communication of a step on one axis, or of one operation in one group of ranks."""

    label: str
    exposed_seconds: float
    reductions: float = 0
    """The number of calls that sum the gradients once."""
    has_buckets: bool = True
    """False if the step has no setting for the size of gradient buckets."""
    largest_bytes: int = 0
    """The bytes of the largest reduction, 0 if unknown."""
    reduced_bytes: float = 0
    """The bytes of all reductions that sum the gradients once."""
    hideable_seconds: float
    """The part of the exposed time that an earlier start could hide."""
    is_on_demand: bool = False
    """True if parameters are gathered without prefetch."""


@dataclass(frozen=True, kw_only=True)
class PipelineIdle:
    """The idle time of a pipeline by cause, in seconds per step."""

    bubble_seconds: float
    uneven_seconds: float
    """The time that equal stages would save. 0 if it is not significant."""
    message_seconds: float = 0.0
    ranks: int
    microbatches: int | None = None
    layers_by_stage: tuple[int, ...] = ()
    slowest_rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class StepEvidence:
    """A training step. All times are seconds of one profiled step."""

    name: str
    """The label of the case, empty for the step of a trace."""
    id: str
    seconds: float
    num_observations: int
    """The number of steps in a trace, or of repetitions of a run."""
    command: StepCommand
    settings: Mapping[str, object] = field(default_factory=dict)
    """The parameters of the case, empty for the step of a trace."""
    communication: Sequence[Communication] = ()
    copy_seconds: float = 0.0
    idle_seconds: float = 0.0
    syncs: int = 1
    """The number of times per step that all gradients are summed."""
    pipeline: PipelineIdle | None = None
    expert_imbalance_seconds: float = 0.0
    """The time that balanced experts would save. 0 if it is not significant."""
    max_expert_load: float | None = None
    """The tokens of the rank with most tokens over the mean of all ranks."""
    bytes_ratios: Mapping[str, float] = field(default_factory=dict)
    """The sent bytes over the expected bytes, keyed by mesh axis."""
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    """The duration of each phase that the step marks."""
    exposed_by_phase: Mapping[str, float] = field(default_factory=dict)
    """The seconds of exposed communication in each phase."""
    idle_by_phase: Mapping[str, float] = field(default_factory=dict)
    """The idle seconds of each phase."""

    @property
    def full_name(self) -> str:
        """The name of the step as a sentence contains it."""
        return f"the step of {self.name}" if self.name else "the step"

    def name_phase(self, seconds_by_phase: Mapping[str, float], total: float) -> str:
        """Return a phrase with the shortest phase that has most of ``total``, empty if none has.

        ``seconds_by_phase`` and ``total`` are in seconds.
        """
        phases = [name for name, seconds in seconds_by_phase.items() if seconds > total / 2]
        if not phases:
            return ""
        return f", most of it in phase {min(phases, key=self.phase_seconds.__getitem__)}"

    def format_share(self, seconds: float) -> str:
        """Return ``seconds`` as a percentage of the step."""
        return format_percent(seconds / self.seconds)


@dataclass(frozen=True, kw_only=True)
class StragglerEvidence:
    """A rank for which the others wait."""

    rank: int
    observation: Literal["arrives last", "finishes last", "computes longest"]
    occasions: str
    """The repetitions or calls with the observation: ``in 3 of 3 repetitions``."""
    waited_seconds: float
    waited_share: float
    compute_ratio: float = 1.0
    """The rank's computation over the median of other ranks, 1 if it does not explain the wait."""
    host_idle_seconds: float = 0.0
    """The time in which the rank's host starts nothing, beyond the same time of other ranks."""
    command: str = ""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The bandwidths of links or groups of the same kind, in B/s of each repetition."""

    kind: Literal["slow-link", "slow-group"]
    scope: str
    """The distance of the ranks, or the operation."""
    by_name: Mapping[str, Sequence[float]]
    command: str


@dataclass(frozen=True, kw_only=True)
class TimeComparison:
    """The time of an operation compared with the time of a reference."""

    kind: Literal["off-fit", "slower-than-composite"]
    name: str
    seconds: float
    reference: str
    """A phrase that names the reference, such as ``its fit``."""
    ratio: float
    """The time over the time of the reference."""
    low_ratio: float | None
    """The lower end of the 95 % interval of the ratio, None if unknown."""
    lost_share: float
    """The share of the time that is lost: of a step, or of all sizes of the operation."""
    command: str


@dataclass(frozen=True, kw_only=True)
class CollectedEvidence:
    """All evidence of a run, or of the traces of a job."""

    steps: Sequence[StepEvidence] = ()
    stragglers: Sequence[StragglerEvidence] = ()
    rates: Sequence[Rates] = ()
    comparisons: Sequence[TimeComparison] = ()
    bus_bandwidths: Mapping[str, float] = field(default_factory=dict)
    """The bus bandwidths of operations in B/s, keyed by label."""
    link_bytes_per_second: float | None = None
    """The declared speed of the link, None if it was not declared."""
