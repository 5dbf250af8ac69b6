"""The order in which each rank of a pipeline runs its actions, as data. Pure."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from parbench.bench.results.details import Action

Actions = tuple[Action, ...]
"""The actions of one rank in a step, in the order in which the rank runs them."""
Output = tuple[int, Literal["F", "I", "W"], int]
"""The identity of a tensor that an action computes: its stage, its kind, and its microbatch.

The kind is the output of the stage ("F"), the gradient of the stage's input ("I"), or the gradient
of the stage's weights ("W").
"""


def get_received(action: Action, num_stages: int) -> Output | None:
    """Return the identity of the tensor that an action receives from a neighboring stage.

    The identity is (stage that computes the tensor, kind, microbatch), see ``Output``. The result
    is None if the action receives nothing. A forward pass receives the activations of the stage
    before. A backward pass or an input gradient receives the gradient from the stage after.
    ``num_stages`` counts the stages of all ranks.
    """
    if action.kind == "F" and action.stage > 0:
        return action.stage - 1, "F", action.microbatch
    if action.kind in ("B", "I") and action.stage < num_stages - 1:
        return action.stage + 1, "I", action.microbatch
    return None


def list_inputs(action: Action, num_stages: int) -> list[Output]:
    """Return all tensors that must be computed before an action can start, none to two.

    A weight gradient needs the input gradient of its own stage. A backward pass or input gradient
    needs the forward pass of its own stage, and the gradient from the stage after. A forward pass
    needs the activations of the stage before. ``num_stages`` counts the stages of all ranks.
    """
    inputs: list[Output] = []
    if action.kind == "W":
        inputs.append((action.stage, "I", action.microbatch))
    elif action.kind != "F":
        inputs.append((action.stage, "F", action.microbatch))
    received = get_received(action, num_stages)
    if received is not None:
        inputs.append(received)
    return inputs


@dataclass(frozen=True)
class PipelineSize:
    """The numbers of ranks, microbatches and stages of a pipeline.

    The actions of a schedule follow from them.
    """

    ranks: int
    """The number of pipeline ranks."""
    microbatches: int
    """The number of microbatches in a step."""
    stages_per_rank: int = 1
    """The number of stages (groups of layers) on each rank."""

    @property
    def num_stages(self) -> int:
        """The number of stages over all ranks."""
        return self.ranks * self.stages_per_rank


@dataclass(frozen=True, kw_only=True)
class PipelineOrder:
    """The actions that each rank of a pipeline runs in one step, in their order.

    An action is a pass of one stage for one microbatch. Torch's pipeline runtime executes the
    same order that ``simulate`` simulates.
    """

    size: PipelineSize
    """The numbers of ranks, microbatches and stages of the pipeline."""
    actions_by_rank: tuple[Actions, ...]
    """The actions of each rank of the pipeline, first rank first."""


def find_peak_held(actions: Iterable[Action], held_by_stage: Callable[[int], float]) -> float:
    """Return the peak amount of activations that a rank holds for backward.

    ``actions`` are those of one rank, in order. ``held_by_stage(stage)`` is the amount of one
    microbatch's activations in a stage: their bytes, or 1 to count microbatches. They are held from
    the forward pass to the end of the backward pass. If the backward pass is split, they are held
    to the end of the weight gradient. The result has the unit of ``held_by_stage``.
    """
    total = 0.0
    peak = 0.0
    for action in actions:
        if action.kind == "F":
            total += held_by_stage(action.stage)
            peak = max(peak, total)
        elif action.kind != "I":
            total -= held_by_stage(action.stage)
    return peak
