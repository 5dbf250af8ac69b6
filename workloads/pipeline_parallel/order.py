"""The order in which each rank of a pipeline runs its actions, as data. Pure."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from parbench.bench.results.details import Action

Actions = tuple[Action, ...]
Output = tuple[int, Literal["F", "I", "W"], int]
"""The product of an action, by stage and microbatch: the output of the stage ("F"), the gradient of
its input ("I") or the gradient of its weights ("W")."""


def get_output(action: Action) -> Output:
    """Return the output of an action that others wait for. B produces an input gradient, like I."""
    kind = "I" if action.kind == "B" else action.kind
    return action.stage, kind, action.microbatch


def get_received(action: Action, num_stages: int) -> Output | None:
    """Return the output of a neighboring stage that an action needs, None if it needs none."""
    if action.kind == "F" and action.stage > 0:
        return action.stage - 1, "F", action.microbatch
    if action.kind in ("B", "I") and action.stage < num_stages - 1:
        return action.stage + 1, "I", action.microbatch
    return None


def list_inputs(action: Action, num_stages: int) -> list[Output]:
    """Return all outputs that an action needs, of its own stage and of a neighboring stage."""
    inputs: list[Output] = []
    if action.kind == "W":
        inputs.append((action.stage, "I", action.microbatch))
    elif action.kind != "F":
        inputs.append((action.stage, "F", action.microbatch))
    received = get_received(action, num_stages)
    if received is not None:
        inputs.append(received)
    return inputs


@dataclass(frozen=True, kw_only=True)
class PipelineOrder:
    """The actions of all ranks. Torch's runtime runs the same order that is simulated."""

    name: str
    actions_by_rank: tuple[Actions, ...]
    microbatches: int
    stages_per_rank: int

    @property
    def ranks(self) -> int:
        return len(self.actions_by_rank)

    @property
    def num_stages(self) -> int:
        """The number of stages over all ranks."""
        return self.ranks * self.stages_per_rank


def find_peak_held(actions: Iterable[Action], held_by_stage: Callable[[int], float]) -> float:
    """Return the maximum amount that a rank holds at once for backward.

    A microbatch of a stage holds the amount ``held_by_stage(stage)``, such as bytes, from its
    forward pass to the end of its backward pass. If the backward pass is split, that is the end of
    the weight gradient.
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
