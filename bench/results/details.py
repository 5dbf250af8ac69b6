"""What training steps tell beside metrics, in ``Record.details`` and ``plan.json``: workloads write, reports read.

Timelines are whole microseconds since the step's first action.
"""

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal, TypeVar, cast, get_args

import msgspec

from parbench.bench.results.records import Record
from parbench.bench.text import UserError

STATE = ("parameters", "gradients", "optimizer")
COMPONENTS = (*STATE, "activations", "buffers")  # of a step's memory

ActionKind = Literal["F", "B", "I", "W"]  # forward, full backward, input gradient, weight gradient
Cause = Literal["schedule", "imbalance", "p2p", "rest"]
KINDS: tuple[ActionKind, ...] = get_args(ActionKind)
CAUSES: tuple[Cause, ...] = get_args(Cause)


class Details(msgspec.Struct, frozen=True, kw_only=True):
    """Some keys of ``Record.details``, or what stands there under one key; without ``known_by`` nothing is told."""

    known_by: ClassVar[str]

    @property
    def as_details(self) -> dict[str, Any]:
        """The keys with plain values, as they are read back."""
        built: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return built if self.known_by in self.__struct_fields__ else {self.known_by: built}

    def _check(self) -> None:
        """Refuse what contradicts itself, when it is read: no measurement fails for it."""


T = TypeVar("T", bound=Details)


def read(record: Record, kind: type[T]) -> T | str | None:
    """Return what a record tells of a kind, None where it tells nothing, or the sentence why it cannot be read."""
    told = record.details.get(kind.known_by)
    if told is None:
        return None
    try:
        found = msgspec.convert(record.details if kind.known_by in kind.__struct_fields__ else told, kind)
        found._check()
    except ValueError as error:
        return f"{record.case.label}: its details of {kind.known_by} cannot be read: {error}."
    return found


@dataclass(frozen=True, order=True, slots=True)
class Action:
    """One kind of work of one stage on one microbatch; printed as torch does, ``2F0``."""

    stage: int
    kind: ActionKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        match = re.fullmatch("([0-9]+)([FBIW])([0-9]+)", text.strip())
        if match is None:
            allowed = "it is a stage, F, B, I or W, and a microbatch, such as 2F0, or empty"
            raise UserError(f"{text.strip()!r} is no action: {allowed}")
        return cls(int(match[1]), cast(ActionKind, match[2]), int(match[3]))


class Ran(msgspec.Struct, frozen=True, array_like=True):
    """An action, by its name, on a rank."""

    name: str
    start_us: int
    stop_us: int

    @property
    def action(self) -> Action:
        return Action.parse(self.name)


class Idle(msgspec.Struct, frozen=True, array_like=True):
    """A time in which a rank runs no action, and why."""

    rank: int
    start_us: int
    stop_us: int
    cause: Cause


Timeline = tuple[tuple[Ran, ...], ...]  # by rank


class Simulated(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Another schedule as simulated with the times that a step measured; ``why_not`` says why it cannot run."""

    schedule: str
    chunks: int
    measured: bool
    step_seconds: float | None = None
    bubble_fraction: float | None = None
    in_flight: float | None = None
    activation_bytes: float | None = None
    why_not: str = ""


class Pipeline(Details, frozen=True, kw_only=True, omit_defaults=True):
    """The pipeline that a step ran in; None is unknown. A timeline has each rank's actions in order of time."""

    known_by = "pipeline"
    schedule: str
    ranks: int
    microbatches: int
    chunks: int
    layers_by_stage: tuple[int, ...] | None = None
    stages_by_rank: tuple[tuple[int, ...], ...]
    in_flight_by_rank: tuple[float, ...] | None = None
    activation_bytes_by_rank: tuple[float | None, ...] | None = None
    memory_by_rank: dict[str, tuple[float, ...]] | None = None
    boundaries: list[dict[str, Any]] | None = None
    measured: Timeline | None = None
    why_not_measured: str = ""
    predicted: Timeline | None = None
    idle: tuple[Idle, ...] | None = None
    comparison: tuple[Simulated, ...] | None = None
    clock: str | None = None
    clock_uncertainty_seconds: float | None = None

    def _check(self) -> None:
        _expect(len(self.stages_by_rank) == self.ranks, f"stages_by_rank({len(self.stages_by_rank)}) != {self.ranks}")
        for timeline in (one for one in (self.measured, self.predicted) if one is not None):
            _expect(len(timeline) == self.ranks, f"a timeline has {len(timeline)} of {self.ranks} ranks")
            for rank, (held, told) in enumerate(zip(self.stages_by_rank, timeline, strict=True)):
                strays = [ran.name for ran in told if ran.action.stage not in held]
                _expect(not strays, f"{', '.join(strays)} ran on rank {rank}, which holds stages {held}")
                for one, after in pairwise(told):
                    begins = f"{after.name} on rank {rank} begins at {after.start_us} us"
                    _expect(one.stop_us <= after.start_us, f"{begins}, before {one.name} ends at {one.stop_us} us")
        strange = {idle.rank for idle in self.idle or ()} - set(range(self.ranks))
        _expect(not strange, f"idle time of ranks {strange} of {self.ranks}")


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise UserError(otherwise)


class Attention(Details, frozen=True, kw_only=True):
    """How the ranks that share a sequence attend."""

    known_by = "attention_bytes"
    method: str
    mask: str
    token_order: str = ""
    sequence: int
    tokens_per_rank: int
    attention: str = ""
    attention_bytes: dict[str, Any]
    crossover_ranks: float | None = None
    crossover: str = "Ulysses sends less forward than a ring above 1 + 1/g ranks, g = kv_heads / heads"
    balance_limit: float | None = None
    kernel: str | None = None

    def _check(self) -> None:
        divided = self.tokens_per_rank > 0 and self.sequence % self.tokens_per_rank == 0
        _expect(divided, f"sequence({self.sequence}) % tokens_per_rank({self.tokens_per_rank}) != 0")


class Mesh(Details, frozen=True, kw_only=True):
    """The axes that a step communicates on, and each one's ``ranks``."""

    known_by = "axes"
    axes: dict[str, dict[str, int]]


class Formulas(Details, frozen=True, kw_only=True):
    """The bytes that rank 0 sends on each axis in a step, as an equation's text."""

    known_by = "bytes_formula"
    bytes_formula: dict[str, str]


class Loads(Details, frozen=True, kw_only=True):
    """Tokens that chose each expert, and pairs of token and expert that each rank got, by layer."""

    known_by = "expert_load"
    expert_load: list[list[int]]
    rank_load: list[list[int]]
    claim: str = ""  # what the results may be used to claim

    def _check(self) -> None:
        n, m = len(self.expert_load), len(self.rank_load)
        _expect(n == m != 0, f"layers of expert_load({n}) != layers of rank_load({m}), or there are none")
        even = all(loads[0] and len(set(map(len, loads))) == 1 for loads in (self.expert_load, self.rank_load))
        _expect(even, "layers differ in experts or ranks, or have none")


class Calls(msgspec.Struct, frozen=True, kw_only=True, rename={"num_bytes": "bytes"}):
    """Calls of one step that are alike: ``num_bytes`` is one's size as nccl-tests counts it, ``ranks`` its group's."""

    axis: str
    op: str
    num_bytes: int
    ranks: int
    count: int

    @property
    def words(self) -> str:
        return f"{self.axis}: {self.op} on {self.ranks} ranks"


class Communication(Details, frozen=True, kw_only=True):
    """All calls of a step, and the step's seconds without a look at them."""

    known_by = "comm_calls"
    comm_calls: tuple[Calls, ...]
    plain_step_seconds: float | None = None


class MemoryOverTime(Details, frozen=True, kw_only=True):
    """What the rank that rose highest held above the start of a step: ``points`` of microseconds and bytes, in order.

    ``phases`` are what the step says it was doing: a name, its start and its end.
    """

    known_by = "memory_over_time"
    rank: int
    points: tuple[tuple[int, int], ...]
    phases: tuple[tuple[str, int, int], ...] = ()

    def _check(self) -> None:
        _expect(len(self.points) > 1, f"{len(self.points)} points are no curve")
        _expect(self.points[0][0] >= 0, "its first point is before the step")
        _expect(all(a < b for (a, _), (b, _) in pairwise(self.points)), "its points are not in order of time")

    @property
    def peak(self) -> tuple[int, int]:
        return max(self.points, key=lambda point: point[1])

    def phase_at(self, at_us: int) -> str:
        """Return what the step was doing, empty where it does not say."""
        return next((name for name, start, stop in self.phases if start <= at_us <= stop), "")


PLAN_FILE, PLAN_SCHEMA = "plan.json", 1


class Component(msgspec.Struct, frozen=True, kw_only=True):
    """One predicted number beside the measured one, over launches with its 95 % interval; None is unknown.

    ``error`` is predicted over measured, less 1; ``method`` is the measured one's.
    """

    name: str
    predicted: float
    measured: float | None
    unit: str
    error: float | None = None
    low: float | None = None
    high: float | None = None
    method: str = ""
    is_within_launch: bool = False

    def __post_init__(self) -> None:
        if self.measured:
            msgspec.structs.force_setattr(self, "error", self.predicted / self.measured - 1)

    @property
    def error_words(self) -> str:
        """The error, and whether what was measured may as well be what was predicted: its interval holds it."""
        if self.error is None:
            return "-"
        is_within = self.low is not None and self.high is not None and self.low <= self.predicted <= self.high
        return f"{self.error:+.1%}" + " (within the interval)" * (is_within and self.low != self.high)


class StepCheck(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a run; ``rule`` says how its calls add up, ``compute`` where its arithmetic is from."""

    case: str
    label: str
    ranks: int
    rule: str
    compute: Literal["measured", "declared"]
    components: list[Component]
    notes: list[str] = []


class Validation(msgspec.Struct, frozen=True, kw_only=True):
    """``plan.json``: a run's steps as predicted, by the collectives of the run ``fits``, and as measured."""

    kind: Literal["validation"] = "validation"
    schema: int = PLAN_SCHEMA
    run: str
    fits: str
    rows: list[StepCheck]
    left_out: dict[str, str]
