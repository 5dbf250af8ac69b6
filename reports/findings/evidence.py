"""The evidence for findings: facts that are the same whether they are from records or from traces.

`reports/findings/record_evidence.py` makes evidence from a run, `reports/traces/trace_evidence.py` from traces.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from parbench.reports.findings.commands import build_preset_command


class StepCommand(Protocol):
    """Builds the command that measures a step with other settings, empty if there is none."""

    def __call__(self, preset: str, **settings: object) -> str:
        """Return the command.

        ``preset`` is the training step to measure if the step itself cannot be measured again.
        """


@dataclass(frozen=True, kw_only=True)
class Communication:
    """The communication of a step on one axis, or of one operation in one group of ranks."""

    label: str
    ops: frozenset[str]
    exposed_seconds: float
    calls_per_sum: float | None = None
    """The number of calls that sum the gradients once, None if it is unknown."""
    largest_bytes: int | None = None
    earlier_compute_seconds: float | None = None
    """The computation before the calls that could have hidden them, None if it is unknown."""
    is_prefetched: bool | None = None
    """False if the step gathers parameters without prefetch, None if it is unknown."""


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
class ExpertLoad:
    """The load of a mixture of experts."""

    slowdown: float
    """The time of the step over its time with balanced experts. 1 if it is not significant."""
    max_rank_load: float | None = None
    """The tokens of the rank with most tokens over the mean."""
    has_capacity: bool = False


@dataclass(frozen=True, kw_only=True)
class StragglerEvidence:
    """A rank for which the others wait."""

    rank: int
    observation: Literal["arrives last", "finishes last", "computes longest"]
    where: str
    """The repetitions or calls in which it was observed: ``in 3 of 3 repetitions``."""
    waited_seconds: float
    waited_share: float
    compute_ratio: float | None = None
    """Its computation over the median of the other ranks."""
    host_idle_seconds: float | None = None
    """The time in which its host starts nothing, beyond that of the other ranks."""
    command: str = ""


@dataclass(frozen=True, kw_only=True)
class StepEvidence:
    """A training step. All times are seconds of one profiled step."""

    name: str
    id: str
    seconds: float
    num_observations: int
    command: StepCommand = build_preset_command
    settings: Mapping[str, object] = field(default_factory=dict)
    communication: Sequence[Communication] = ()
    overlap: float | None = None
    """The share of all communication that is hidden."""
    copy_seconds: float = 0.0
    idle_seconds: float = 0.0
    longest_gap_seconds: float | None = None
    syncs_per_step: int = 1
    """How often gradients are summed."""
    pipeline: PipelineIdle | None = None
    experts: ExpertLoad | None = None
    straggler: StragglerEvidence | None = None
    bytes_ratios: Mapping[str, float] = field(default_factory=dict)
    """The sent bytes over the expected bytes, by axis."""


Link = tuple[int, int]
"""The sending and the receiving rank."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """The bandwidths of the links between ranks of the same distance, in B/s."""

    distance: str
    rates: Mapping[Link, float]
    rates_by_repetition: Mapping[Link, Sequence[float]]
    command: str

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for link in self.rates for rank in link}))


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The bus bandwidths of an operation in groups of ranks of the same kind, in B/s."""

    operation: str
    rates: Mapping[str, float]
    num_observations: int
    command: str


@dataclass(frozen=True, kw_only=True)
class TimeComparison:
    """The time of an operation compared with that of a reference."""

    name: str
    id: str
    seconds: float
    reference: str
    reference_seconds: float
    ratios: Sequence[float]
    """The ratio of the times in each repetition, or of each call."""
    low_ratio: float | None = None
    """The lower end of the 95 % interval of the ratio, None if it is unknown."""
    lost_seconds: float
    total_seconds: float
    """The time of which lost_seconds are a part: of a step, or of all sizes of an operation."""
    command: str


@dataclass(frozen=True, kw_only=True)
class HostDisturbance:
    """The work of other processes during the repetitions."""

    description: str
    """The repetition with most work of other processes, and its amount."""
    num_disturbed: int
    num_repetitions: int
    variation: float | None
    """The variation between repetitions, None if the run is quiet."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All evidence of a run, or of the traces of a job."""

    steps: Sequence[StepEvidence] = ()
    stragglers: Sequence[StragglerEvidence] = ()
    links: Sequence[Links] = ()
    groups: Sequence[Groups] = ()
    fits: Sequence[TimeComparison] = ()
    """Operations compared with their latency-bandwidth fit."""
    composites: Sequence[TimeComparison] = ()
    """Operations compared with one that does the same work and more."""
    background_loads: Sequence[TimeComparison] = ()
    """Operations during a background load compared with the same ones without it."""
    host_disturbance: HostDisturbance | None = None
