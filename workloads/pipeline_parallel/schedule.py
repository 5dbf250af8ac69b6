"""A pipeline schedule: one object with all that is specific to it. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isclose

from parbench.bench.results.details import Action
from parbench.bench.text import UserError
from parbench.workloads.pipeline_parallel.order import PipelineOrder, PipelineSize, find_peak_held


@dataclass(frozen=True)
class PassSeconds:
    """The seconds that one rank computes for one microbatch, summed over all stages of the rank."""

    forward: float
    """The seconds of the forward pass."""
    input_gradient: float
    """The seconds of the part of backward that computes gradients of the stages' inputs."""
    weight_gradient: float
    """The seconds of the part of backward that computes gradients of parameters."""

    @property
    def backward(self) -> float:
        """The seconds of a full backward pass: of input gradients and weight gradients."""
        return self.input_gradient + self.weight_gradient

    @property
    def total(self) -> float:
        """The seconds of the forward pass and the full backward pass."""
        return self.forward + self.backward

    @property
    def is_equal(self) -> bool:
        """True if forward, input gradient and weight gradient take equal times, up to rounding."""
        return isclose(self.forward, self.input_gradient) and isclose(
            self.input_gradient, self.weight_gradient
        )


@dataclass(frozen=True)
class AnalyticalBubble:
    """The idle time of each rank in one step of a pipeline (the bubble), by a formula."""

    seconds: float
    """The idle seconds of a rank between the first start and the last stop of all ranks."""
    note: str
    """The formula as text, with the conditions under which it is valid."""


def accept_all(size: PipelineSize) -> str:
    """Return an empty text, which means that the schedule can run with this and every size."""
    return ""


def omit_bubble(size: PipelineSize, seconds: PassSeconds) -> None:
    """Return None for every size and times: no formula exists for the bubble of the schedule."""


def list_looped_stages(rank: int, size: PipelineSize) -> tuple[int, ...]:
    """Return the stages of a rank if stages are distributed round-robin over the ranks.

    Stages are in ascending order. With P ranks, rank r has the stages r, r + P, r + 2P and so on.
    """
    return tuple(range(rank, size.num_stages, size.ranks))


def list_v_stages(rank: int, size: PipelineSize) -> tuple[int, ...]:
    """Return the two stages of a rank if stages are distributed in a V over the ranks.

    Stage numbers ascend from the first rank to the last, and then from the last to the first. So
    the first rank has the first and the last stage.
    """
    return rank, size.num_stages - 1 - rank


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """A pipeline schedule: the order of its actions, the sizes it accepts, and its bubble."""

    name: str
    """The name that users write as ``schedule``, such as ``1f1b``."""
    list_actions: Callable[[int, PipelineSize], Sequence[Action]]
    """Returns the actions of a rank in the order in which it runs them, from rank and size."""
    splits_backward: bool = False
    """True if some backward passes are split into an input gradient and a weight gradient."""
    list_stages: Callable[[int, PipelineSize], tuple[int, ...]] = list_looped_stages
    """Returns the stages of a rank, in ascending order, from rank and size.

    Neighboring stages on different ranks send activations and gradients to each other.
    """
    stages_per_rank: int = 1
    """The number of stages per rank if the user sets none."""
    min_stages_per_rank: int | None = None
    """The minimum number of stages per rank, None if only the default is possible."""
    find_broken_rule: Callable[[PipelineSize], str] = accept_all
    """Returns the first violation of a rule of this schedule by a size, empty if it can run.

    For example, ``microbatches(2) < stages(4)`` means that there are 2 microbatches and at least 4
    are required.
    """
    compute_bubble: Callable[[PipelineSize, PassSeconds], AnalyticalBubble | None] = omit_bubble
    """Returns the idle time of a rank by a formula, from the size and the times of passes.

    Returns None if no formula is valid for them.
    """

    def size(self, ranks: int, microbatches: int, stages_per_rank: int = 0) -> PipelineSize:
        """Return the numbers of ranks, microbatches and stages, if the schedule can run with them.

        ``stages_per_rank`` 0 means the schedule's default. Raises ``UserError`` with the violation
        of a rule, such as ``schedule = zb_v does not allow virtual_stages(3) != 2``.
        ``virtual_stages`` is the name of the user's parameter.
        """
        size = PipelineSize(ranks, microbatches, stages_per_rank or self.stages_per_rank)
        stages, min_stages = size.stages_per_rank, self.min_stages_per_rank
        if size.ranks < 2:
            rule = f"ranks({size.ranks}) < 2"
        elif size.microbatches < 1:
            rule = f"microbatches({size.microbatches}) < 1"
        elif min_stages is None and stages != self.stages_per_rank:
            rule = f"virtual_stages({stages}) != {self.stages_per_rank}"
        elif min_stages is not None and stages < min_stages:
            rule = f"virtual_stages({stages}) < {min_stages}"
        else:
            rule = self.find_broken_rule(size)
        if rule:
            raise UserError(f"schedule = {self.name} does not allow {rule}")
        return size

    def make_order(self, size: PipelineSize) -> PipelineOrder:
        """Return the actions of all ranks, in the order in which each rank runs them."""
        actions_by_rank = [tuple(self.list_actions(rank, size)) for rank in range(size.ranks)]
        return PipelineOrder(size=size, actions_by_rank=tuple(actions_by_rank))

    def microbatches_in_flight(self, rank: int, size: PipelineSize) -> float:
        """Return the maximum number of microbatches whose activations a rank holds together.

        A microbatch counts from its forward to the end of its backward pass. With several stages
        per rank, a microbatch in one of them counts as 1 / stages_per_rank.
        """
        stages = self.list_stages(rank, size)
        return _find_peak(self, rank, size, stages) / size.stages_per_rank

    def logits_in_flight(self, rank: int, size: PipelineSize) -> float:
        """Return the maximum number of microbatches whose logits a rank holds together.

        It is 0 on a rank without the last stage. With split backward passes, logits are held until
        the weight gradient of the head.
        """
        return _find_peak(self, rank, size, (size.num_stages - 1,))


@lru_cache(maxsize=65536)
def _find_peak(schedule: Schedule, rank: int, size: PipelineSize, stages: tuple[int, ...]) -> float:
    """Return the maximum number of microbatches that a rank holds together for backward.

    Only the activations in ``stages`` count, and a microbatch counts once for each of them.
    """
    actions = schedule.list_actions(rank, size)
    return find_peak_held(actions, lambda stage: float(stage in stages))
