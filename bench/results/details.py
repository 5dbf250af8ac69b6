"""Facts of training steps next to metrics, in ``Record.details`` and ``plan.json``.

Workloads write them and reports read them. Timelines are whole microseconds since the first action
of the step.
"""

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal, TypeVar, cast, get_args

import msgspec

from parbench.bench.results.records import Record
from parbench.bench.text import UserError

STATE = ("parameters", "gradients", "optimizer")
COMPONENTS = (*STATE, "activations", "buffers")
"""The components of the memory of a step."""

ActionKind = Literal["F", "B", "I", "W"]
"""Forward, full backward, gradient of the input, gradient of the weights."""
Cause = Literal["schedule", "imbalance", "p2p", "rest"]
KINDS: tuple[ActionKind, ...] = get_args(ActionKind)
CAUSES: tuple[Cause, ...] = get_args(Cause)


class Details(msgspec.Struct, frozen=True, kw_only=True):
    """A typed view of some keys of ``Record.details``, or of the value of one key.

    If ``known_by`` is a field of the class, the fields are keys of the details. Otherwise it is the
    one key, and its value has the fields.
    """

    known_by: ClassVar[str]
    """The key without which a record has no such details."""

    @classmethod
    def _is_flat(cls) -> bool:
        return cls.known_by in cls.__struct_fields__

    @property
    def as_details(self) -> dict[str, Any]:
        """The keys with plain values, as they are read back."""
        fields: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return fields if self._is_flat() else {self.known_by: fields}

    def _check(self) -> None:
        """Raise ``ValueError`` for a contradiction. Only reading checks, so that no run fails."""


T = TypeVar("T", bound=Details)


def read_details(record: Record, kind: type[T]) -> T | str | None:
    """Return the details of a record, None if it has none, or a sentence about a problem."""
    value = record.details.get(kind.known_by)
    if value is None:
        return None
    try:
        details = msgspec.convert(record.details if kind._is_flat() else value, kind)
        details._check()
    except ValueError as error:
        return f"{record.case.label}: its details of {kind.known_by} cannot be read: {error}."
    return details


@dataclass(frozen=True, order=True, slots=True)
class Action:
    """One kind of work of one stage on one microbatch, which is printed as torch does: ``2F0``."""

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
            raise UserError(f"{text.strip()!r} is not an action: {allowed}")
        return cls(int(match[1]), cast(ActionKind, match[2]), int(match[3]))


class Ran(msgspec.Struct, frozen=True, array_like=True):
    """An action that ran on a rank."""

    name: str
    start_us: int
    stop_us: int

    @property
    def action(self) -> Action:
        return Action.parse(self.name)


class Idle(msgspec.Struct, frozen=True, array_like=True):
    """A time in which a rank runs no action, with the cause."""

    rank: int
    start_us: int
    stop_us: int
    cause: Cause


Timeline = tuple[tuple[Ran, ...], ...]
"""The actions of each rank in the order of time."""


class Simulated(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A schedule that was simulated with the measured times of a step."""

    schedule: str
    chunks: int
    measured: bool
    step_seconds: float | None = None
    bubble_fraction: float | None = None
    in_flight: float | None = None
    activation_bytes: float | None = None
    why_not: str = ""
    """Why it cannot run, if it cannot."""


class Pipeline(Details, frozen=True, kw_only=True, omit_defaults=True):
    """The pipeline that a step ran in. None is unknown."""

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
    measured: Timeline | None = None
    why_not_measured: str = ""
    predicted: Timeline | None = None
    idle: tuple[Idle, ...] | None = None
    comparison: tuple[Simulated, ...] | None = None
    clock: str | None = None
    clock_uncertainty_seconds: float | None = None

    def _check(self) -> None:
        num_entries = len(self.stages_by_rank)
        _require(num_entries == self.ranks, f"stages_by_rank({num_entries}) != {self.ranks}")
        for timeline in (self.measured, self.predicted):
            if timeline is not None:
                self._check_timeline(timeline)
        unknown_ranks = {idle.rank for idle in self.idle or ()} - set(range(self.ranks))
        _require(not unknown_ranks, f"idle time of ranks {unknown_ranks} of {self.ranks}")

    def _check_timeline(self, timeline: Timeline) -> None:
        num_ranks = len(timeline)
        _require(num_ranks == self.ranks, f"a timeline has {num_ranks} of {self.ranks} ranks")
        for rank, actions in enumerate(timeline):
            stages = self.stages_by_rank[rank]
            strays = [ran.name for ran in actions if ran.action.stage not in stages]
            names = ", ".join(strays)
            _require(not strays, f"{names} ran on rank {rank}, which holds stages {stages}")
            for previous, following in pairwise(actions):
                begin = f"{following.name} on rank {rank} begins at {following.start_us} us"
                end = f"{previous.name} ends at {previous.stop_us} us"
                _require(previous.stop_us <= following.start_us, f"{begin}, before {end}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


class Attention(Details, frozen=True, kw_only=True):
    """The attention of ranks that share a sequence."""

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
        is_divided = self.tokens_per_rank > 0 and self.sequence % self.tokens_per_rank == 0
        tokens = f"tokens_per_rank({self.tokens_per_rank})"
        _require(is_divided, f"sequence({self.sequence}) % {tokens} != 0")


class Mesh(Details, frozen=True, kw_only=True):
    """The axes that a step communicates on, with the number of ``ranks`` of each."""

    known_by = "axes"
    axes: dict[str, dict[str, int]]


class Formulas(Details, frozen=True, kw_only=True):
    """The bytes that rank 0 sends on each axis in a step, as the text of an equation."""

    known_by = "bytes_formula"
    bytes_formula: dict[str, str]


class Loads(Details, frozen=True, kw_only=True):
    """The load of experts and ranks."""

    known_by = "expert_load"
    expert_load: list[list[int]]
    """By layer, the number of tokens that chose each expert."""
    rank_load: list[list[int]]
    """By layer, the number of pairs of token and expert that each rank got."""
    claim: str = ""
    """What the results may be used to claim."""

    def _check(self) -> None:
        n = len(self.expert_load)
        m = len(self.rank_load)
        message = f"layers of expert_load({n}) != layers of rank_load({m}), or there are none"
        _require(n == m != 0, message)
        for loads in (self.expert_load, self.rank_load):
            is_rectangular = len(loads[0]) > 0 and len(set(map(len, loads))) == 1
            _require(is_rectangular, "layers differ in experts or ranks, or have none")


class Calls(msgspec.Struct, frozen=True, kw_only=True, rename={"num_bytes": "bytes"}):
    """Calls of one step with the same axis, operation, size and number of ranks."""

    axis: str
    op: str
    num_bytes: int
    """The size of one call as nccl-tests counts it."""
    ranks: int
    """The number of ranks in its group."""
    count: int

    @property
    def words(self) -> str:
        return f"{self.axis}: {self.op} on {self.ranks} ranks"


class Communication(Details, frozen=True, kw_only=True):
    """All calls of communication of a step."""

    known_by = "comm_calls"
    comm_calls: tuple[Calls, ...]
    plain_step_seconds: float | None = None
    """The time of the uninstrumented step."""


class MemoryOverTime(Details, frozen=True, kw_only=True):
    """The memory above that at the start of a step, on the rank with the highest peak."""

    known_by = "memory_over_time"
    rank: int
    points: tuple[tuple[int, int], ...]
    """Microseconds and bytes, in order."""
    phases: tuple[tuple[str, int, int], ...] = ()
    """The name, start and stop of the phases that the step names."""

    def _check(self) -> None:
        _require(len(self.points) > 1, f"{len(self.points)} points are no curve")
        _require(self.points[0][0] >= 0, "its first point is before the step")
        times = [time for time, _ in self.points]
        is_ordered = all(earlier < later for earlier, later in pairwise(times))
        _require(is_ordered, "its points are not in order of time")

    @property
    def peak(self) -> tuple[int, int]:
        return max(self.points, key=lambda point: point[1])

    def phase_at(self, at_us: int) -> str:
        """Return the phase at a time, an empty string if the step names none."""
        return next((name for name, start, stop in self.phases if start <= at_us <= stop), "")


PLAN_FILE = "plan.json"
PLAN_SCHEMA = 1


class Component(msgspec.Struct, frozen=True, kw_only=True):
    """A predicted number next to the measured one. None is unknown."""

    name: str
    predicted: float
    measured: float | None
    unit: str
    error: float | None = None
    """Predicted over measured, less 1."""
    low: float | None = None
    """With ``high`` the 95 % interval of the measured number."""
    high: float | None = None
    method: str = ""
    """The method of the measured number."""
    is_within_launch: bool = False

    def __post_init__(self) -> None:
        if self.measured:
            msgspec.structs.force_setattr(self, "error", self.predicted / self.measured - 1)

    @property
    def error_words(self) -> str:
        """The error, and whether the prediction is within the interval of the measurement."""
        if self.error is None:
            return "-"
        text = f"{self.error:+.1%}"
        if self.low is None or self.high is None or self.low == self.high:
            return text
        is_within = self.low <= self.predicted <= self.high
        return f"{text} (within the interval)" if is_within else text


class StepCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The prediction of one step of a run."""

    case: str
    label: str
    ranks: int
    rule: str
    """A sentence about how the times of its calls add up."""
    compute: Literal["measured", "declared"]
    """The source of the time of its arithmetic."""
    components: list[Component]
    notes: list[str] = []


class Validation(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``plan.json``: the steps of a run as predicted and as measured."""

    kind: Literal["validation"] = "validation"
    schema: int = PLAN_SCHEMA
    run: str
    fits: str
    """The run whose collectives the predictions follow from."""
    rows: list[StepCheck]
    left_out: dict[str, str]
