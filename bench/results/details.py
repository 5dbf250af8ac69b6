"""Facts of training steps next to metrics, in ``Record.details``, and their predictions.

Workloads write them and reports read them. Timelines are whole microseconds since the first action
of the step.
"""

import re
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar, cast

import msgspec

from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import Record
from parbench.bench.text import UserError

STATE_COMPONENTS = ("parameters", "gradients", "optimizer")
"""The components of a training step's memory that outlive the step."""
COMPONENTS = (*STATE_COMPONENTS, "activations", "buffers")
"""All components of the memory of a training step."""

ActionKind = Literal["F", "B", "I", "W"]
"""Forward, full backward, gradient of the input, gradient of the weights."""
IdleCause = Literal["schedule", "imbalance", "rest"]
"""The cause of idle time in a pipeline.

It is the schedule, unequal stages, or anything else, such as messages between stages.
"""


class Details(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of structs that are stored in the dictionary ``Record.details``.

    A subclass whose ``key`` is one of its fields is stored flat: each field is a key of the
    dictionary. Any other subclass is stored under the dictionary's key ``key``, as a dictionary of
    all fields. If the dictionary lacks ``key``, the record does not have the struct.
    """

    key: ClassVar[str]
    """The key that ``Record.details`` contains if the record has this struct."""

    @classmethod
    def _is_flat(cls) -> bool:
        """Return True if each field is a key of ``Record.details``, False if all are in the key ``key``."""
        return cls.key in cls.__struct_fields__

    @property
    def as_details(self) -> dict[str, Any]:
        """The dictionary to merge into ``Record.details``. Its values have the types of JSON."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields if self._is_flat() else {self.key: fields}


T = TypeVar("T", bound=Details)


def read_details(record: Record, kind: type[T]) -> T | None:
    """Return the details of class ``kind`` from a record, None if the record has no such details.

    Raises ``UserError`` if the stored details do not have the fields of the class.
    """
    value = record.details.get(kind.key)
    if value is None:
        return None
    try:
        return msgspec.convert(record.details if kind._is_flat() else value, kind)
    except msgspec.ValidationError as error:
        name = record.case.label
        raise UserError(f"{name}: its details of {kind.key} cannot be read: {error}") from error


@dataclass(frozen=True, order=True, slots=True)
class Action:
    """The forward or backward pass of one pipeline stage for one microbatch.

    It is written as in torch: ``2F0`` is the forward pass of stage 2 for microbatch 0.
    """

    stage: int
    """The index of the stage in the whole pipeline, from 0."""
    kind: ActionKind
    """``F`` (forward), ``B`` (full backward), ``I`` (input gradient) or ``W`` (weight gradient)."""
    microbatch: int
    """The index of the microbatch in the step, from 0."""

    def __str__(self) -> str:
        """Return the action in torch's notation, such as ``2F0``."""
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Return the action that a text in torch's notation, such as ``2F0``, describes.

        Raises ``UserError`` if the text is not an action.
        """
        match = re.fullmatch("([0-9]+)([FBIW])([0-9]+)", text)
        if match is None:
            raise UserError(f"{text!r} is not an action, such as 2F0")
        return cls(int(match[1]), cast(ActionKind, match[2]), int(match[3]))


class TimedAction(msgspec.Struct, frozen=True, array_like=True):
    """A pipeline action on a rank, with its start and end.

    The times are in microseconds since the first action of the step on any rank.
    """

    name: str
    """The action in torch's notation, such as ``2F0``."""
    start_us: int
    """The start of the action."""
    stop_us: int
    """The end of the action."""

    @property
    def action(self) -> Action:
        """The stage, the kind and the microbatch that ``name`` describes."""
        return Action.parse(self.name)


PipelineTimeline = tuple[tuple[TimedAction, ...], ...]
"""The actions of each rank of a pipeline in the order of time, by rank."""


class PipelineDetails(Details, frozen=True, kw_only=True, omit_defaults=True):
    """The pipeline schedule of a training step, and its actions as measured and as predicted.

    None means unknown.
    """

    key = "pipeline"
    schedule: str
    """The name of the schedule, such as ``1F1B``."""
    ranks: int
    """The number of ranks of the pipeline."""
    microbatches: int
    """The number of microbatches of a step."""
    virtual_stages: int
    """The number of stages on each rank (virtual stages)."""
    layers_by_stage: tuple[int, ...] | None = None
    """The number of transformer layers of each stage, in the order of stages."""
    stages_by_rank: tuple[tuple[int, ...], ...]
    """The indices of the stages on each rank of the pipeline, by rank."""
    measured: PipelineTimeline | None = None
    """The actions of one measured step."""
    predicted: PipelineTimeline | None = None
    """The actions of a simulated step."""
    clock: str | None = None
    """A phrase about the method by which the clocks of the ranks were compared."""


class AttentionDetails(Details, frozen=True, kw_only=True):
    """The context parallelism of a step: the method of attention of ranks that share a sequence."""

    key = "tokens_per_rank"
    method: str
    """The name of the method, such as ``ring`` or ``ulysses``."""
    sequence: int
    """The number of tokens of a sequence on all ranks together."""
    tokens_per_rank: int
    """The number of tokens of a sequence on one rank."""


class CountedCall(msgspec.Struct, frozen=True, kw_only=True, rename={"num_bytes": "bytes"}):
    """Equal communication calls of rank 0 in a step, which have one axis, operation and size."""

    axis: str
    """The name of the mesh axis."""
    op: str
    """The operation, such as ``all_gather``."""
    num_bytes: int
    """The size of one call as nccl-tests counts it."""
    ranks: int
    """The number of ranks in the process group."""
    count: int
    """The number of these calls in a step of rank 0."""

    @property
    def description(self) -> str:
        """Axis, operation and group size as text, such as ``tp: all_reduce on 4 ranks``."""
        return f"{self.axis}: {self.op} on {self.ranks} ranks"


class CommunicationDetails(Details, frozen=True, kw_only=True):
    """All communication calls of rank 0 in a step, counted by axis, operation, size and ranks."""

    key = "comm_calls"
    comm_calls: tuple[CountedCall, ...]
    """An element for each combination of axis, operation, size and number of ranks."""


VALIDATION_SCHEMA = 1
"""The version of the JSON that compares the steps of a run with predictions."""


class ComponentCheck(msgspec.Struct, frozen=True, kw_only=True):
    """One quantity of a training step as predicted and as measured.

    An example is the exposed communication on a mesh axis.
    """

    name: str
    """The name of the quantity, such as ``step_time`` or ``exposed.dp``."""
    predicted: float
    """The predicted number in the unit of the measured one."""
    measured: MetricValue
    """The measured number with its unit and its 95 % interval. Its value is None if unknown."""

    @property
    def error(self) -> float | None:
        """The relative error of the prediction, which is predicted / measured - 1.

        None if nothing was measured or the measured number is 0.
        """
        return self.predicted / self.measured.value - 1 if self.measured.value else None

    @property
    def error_text(self) -> str:
        """The relative error of the prediction, such as ``+3.2%``, or ``-`` if it is unknown."""
        return "-" if self.error is None else f"{self.error:+.1%}"


class StepCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of one training step of a run with its prediction."""

    case: str
    """The id of the case."""
    label: str
    """The name and parameters of the case as text."""
    ranks: int
    """The number of ranks of the step."""
    compute: Literal["measured", "declared"]
    """The source of the compute time in the prediction.

    It is ``measured`` in this run, or ``declared`` if the step only simulates its compute.
    """
    components: list[ComponentCheck]
    """The quantities that are compared."""
    notes: list[str] = []
    """Sentences about limits of the prediction."""


class Validation(msgspec.Struct, frozen=True, kw_only=True):
    """The training steps of a run as predicted and as measured (``parbench plan validate``)."""

    kind: Literal["validation"] = "validation"
    """A constant by which readers recognize the JSON as a validation."""
    schema: int = VALIDATION_SCHEMA
    """The version of the JSON format."""
    run: str
    """The id of the run with the training steps."""
    fits: str
    """The id of the run whose measured collectives the predictions are computed from."""
    rows: list[StepCheck]
    """The training steps that were compared."""
    left_out: dict[str, str]
    """The reason why a training step was not compared, by the label of its case."""
