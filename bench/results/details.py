"""Facts of training steps next to metrics, in ``Record.details`` and ``plan.json``.

Workloads write them and reports read them. Timelines are whole microseconds since the first action
of the step.
"""

import re
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar, cast, get_args

import msgspec

from parbench.bench.results.records import Record
from parbench.bench.text import UserError

STATE_COMPONENTS = ("parameters", "gradients", "optimizer")
COMPONENTS = (*STATE_COMPONENTS, "activations", "buffers")
"""The components of the memory of a step."""

ActionKind = Literal["F", "B", "I", "W"]
"""Forward, full backward, gradient of the input, gradient of the weights."""
IdleCause = Literal["schedule", "imbalance", "p2p", "rest"]
IDLE_CAUSES: tuple[IdleCause, ...] = get_args(IdleCause)


class Details(msgspec.Struct, frozen=True, kw_only=True):
    """A typed view of some keys of ``Record.details``, or of the value of one key.

    If ``key`` is a field of the class, the fields are keys of the details. Otherwise the fields are
    in the value of that key. A record without the key has no such details.
    """

    key: ClassVar[str]

    @classmethod
    def _is_flat(cls) -> bool:
        """Return True if the fields are keys of the record's details."""
        return cls.key in cls.__struct_fields__

    @property
    def as_details(self) -> dict[str, Any]:
        """The details in the form of ``Record.details``, with values that JSON can hold."""
        fields: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return fields if self._is_flat() else {self.key: fields}


T = TypeVar("T", bound=Details)


def read_details(record: Record, kind: type[T]) -> T | str | None:
    """Return the details of this kind from a record, None if it has none.

    Returns an error message if they cannot be read.
    """
    value = record.details.get(kind.key)
    if value is None:
        return None
    try:
        return msgspec.convert(record.details if kind._is_flat() else value, kind)
    except msgspec.ValidationError as error:
        return f"{record.case.label}: its details of {kind.key} cannot be read: {error}."


@dataclass(frozen=True, order=True, slots=True)
class Action:
    """One kind of work of one stage on one microbatch, written as in torch: ``2F0``."""

    stage: int
    kind: ActionKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Return the action in a text such as ``2F0``."""
        match = re.fullmatch("([0-9]+)([FBIW])([0-9]+)", text.strip())
        if match is None:
            allowed = "it is a stage, F, B, I or W, and a microbatch, such as 2F0, or empty"
            raise UserError(f"{text.strip()!r} is not an action: {allowed}")
        return cls(int(match[1]), cast(ActionKind, match[2]), int(match[3]))


class TimedAction(msgspec.Struct, frozen=True, array_like=True):
    """An action that ran on a rank, with its start and end in microseconds."""

    name: str
    start_us: int
    stop_us: int

    @property
    def action(self) -> Action:
        return Action.parse(self.name)


PipelineTimeline = tuple[tuple[TimedAction, ...], ...]
"""The actions of each rank in the order of time."""


class SimulatedSchedule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A schedule that was simulated with the measured times of a step."""

    schedule: str
    """The name of the schedule, such as ``1F1B``."""
    chunks: int
    """The number of stages on each rank."""
    measured: bool
    """True for the schedule with which the step was measured."""
    step_seconds: float | None = None
    bubble_fraction: float | None = None
    """The idle share of the time of all ranks."""
    in_flight: float | None = None
    """The largest number of microbatches whose activations a rank holds."""
    activation_bytes: float | None = None
    """The memory of these activations."""


class PipelineDetails(Details, frozen=True, kw_only=True, omit_defaults=True):
    """The pipeline schedule of a step, as measured and as predicted. None means unknown."""

    key = "pipeline"
    schedule: str
    """The name of the schedule, such as ``1F1B``."""
    ranks: int
    """The number of ranks of the pipeline."""
    microbatches: int
    chunks: int
    """The number of stages on each rank."""
    layers_by_stage: tuple[int, ...] | None = None
    """The number of layers of each stage."""
    stages_by_rank: tuple[tuple[int, ...], ...]
    """The indices of the stages on each rank."""
    measured: PipelineTimeline | None = None
    why_not_measured: str = ""
    """The reason why there is no measured timeline, empty if there is one."""
    predicted: PipelineTimeline | None = None
    comparison: tuple[SimulatedSchedule, ...] | None = None
    """Several schedules, simulated with the measured times of this step."""
    clock: str | None = None
    """A phrase about how the clocks of the ranks were compared."""
    clock_uncertainty_seconds: float | None = None


class AttentionDetails(Details, frozen=True, kw_only=True):
    """The attention method of ranks that share a sequence."""

    key = "crossover_ranks"
    method: str
    sequence: int
    tokens_per_rank: int
    crossover_ranks: float
    crossover: str = (
        "Ulysses sends less forward than a ring above 1 + 1/g ranks, g = kv_heads / heads"
    )


class MeshDetails(Details, frozen=True, kw_only=True):
    """The mesh axes on which a step communicates."""

    key = "axes"
    axes: dict[str, dict[str, int]]


class BytesFormulaDetails(Details, frozen=True, kw_only=True):
    """The bytes that rank 0 sends on each axis in a step, as the text of an equation."""

    key = "bytes_formula"
    bytes_formula: dict[str, str]
    """The equation by the name of the axis."""


class ExpertLoadDetails(Details, frozen=True, kw_only=True):
    """The number of tokens that each expert and each rank gets."""

    key = "expert_load"
    expert_load: list[list[int]]
    """By layer, the number of tokens that chose each expert."""
    rank_load: list[list[int]]
    """By layer, the number of pairs of token and expert that each rank got."""


class CountedCall(msgspec.Struct, frozen=True, kw_only=True, rename={"num_bytes": "bytes"}):
    """The calls of one step that have the same axis, operation, size and number of ranks."""

    axis: str
    op: str
    num_bytes: int
    """The size of one call as nccl-tests counts it."""
    ranks: int
    """The number of ranks in the process group."""
    count: int
    """The number of such calls in a step."""

    @property
    def description(self) -> str:
        return f"{self.axis}: {self.op} on {self.ranks} ranks"


class CommunicationDetails(Details, frozen=True, kw_only=True):
    """All communication calls of a step, counted by axis, operation, size and number of ranks."""

    key = "comm_calls"
    comm_calls: tuple[CountedCall, ...]


PLAN_FILE = "plan.json"
PLAN_SCHEMA = 1


class ComponentCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A predicted number next to the measured one. None means unknown."""

    name: str
    predicted: float
    measured: float | None
    unit: str
    low: float | None = None
    """The lower bound of the 95 % interval of the measured number."""
    high: float | None = None
    """The upper bound of the same interval."""
    method: str = ""
    """The method of the measured number."""
    is_within_repetition: bool = False
    """True if the interval is within a single repetition, False if it is over repetitions."""

    @property
    def error(self) -> float | None:
        """The relative error of the prediction: predicted over measured, less 1."""
        return self.predicted / self.measured - 1 if self.measured else None

    @property
    def error_text(self) -> str:
        """The error, and whether the prediction is within the interval of the measurement."""
        if self.error is None:
            return "-"
        text = f"{self.error:+.1%}"
        if self.low is None or self.high is None or self.low == self.high:
            return text
        is_within = self.low <= self.predicted <= self.high
        return f"{text} (within the interval)" if is_within else text


class StepCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of one step of a run with its prediction."""

    case: str
    """The id of the case."""
    label: str
    ranks: int
    """The number of ranks of the step."""
    rule: str
    """A sentence about how the times of its calls add up."""
    compute: Literal["measured", "declared"]
    """The source of the time of its arithmetic."""
    components: list[ComponentCheck]
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
    """The reason why a step was not compared, by the label of the step."""
