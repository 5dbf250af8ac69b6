"""A pipeline schedule: one object with all that is specific to it. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isclose

from parbench.bench.results.details import Action, ActionKind
from parbench.bench.text import UserError
from parbench.workloads.pipeline_parallel.order import PipelineOrder, find_peak_held


@dataclass(frozen=True)
class PipelineSize:
    """The size of a pipeline, from which the order of a schedule's actions follows."""

    ranks: int
    microbatches: int
    """The number of microbatches in a step."""
    stages_per_rank: int = 1

    @property
    def num_stages(self) -> int:
        """The number of stages over all ranks."""
        return self.ranks * self.stages_per_rank


@dataclass(frozen=True)
class PassSeconds:
    """The seconds that one rank computes for one microbatch, summed over all stages of the rank."""

    forward: float
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
    def by_kind(self) -> dict[ActionKind, float]:
        """The seconds of each kind of action on a rank with one stage, keyed by F, I, W and B.

        F is a forward pass, I an input gradient, W a weight gradient, and B a full backward pass.
        """
        return {
            "F": self.forward,
            "I": self.input_gradient,
            "W": self.weight_gradient,
            "B": self.backward,
        }

    @property
    def is_equal(self) -> bool:
        """True if the three times are equal, except for rounding."""
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
    """Return an empty text, because the schedule can run with every size of a pipeline."""
    return ""


def omit_bubble(size: PipelineSize, seconds: PassSeconds) -> None:
    """Return None, because no formula exists for the bubble of the schedule."""


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
    list_actions: Callable[[int, PipelineSize], Sequence[Action]]
    """Returns the actions of a rank in the order in which it runs them, from rank and size."""
    splits_backward: bool = False
    """True if some backward passes are split into an input gradient and a weight gradient."""
    stages_of: Callable[[int, PipelineSize], tuple[int, ...]] = list_looped_stages
    """Returns the stages of a rank, in ascending order, from rank and size.

    Neighboring stages on different ranks send activations and gradients to each other.
    """
    stages_per_rank: int = 1
    """The number of stages per rank if the user sets none."""
    min_stages_per_rank: int | None = None
    """The minimum number of stages per rank, None if only the default is possible."""
    find_broken_rule: Callable[[PipelineSize], str] = accept_all
    """Returns the condition of this schedule that a size does not satisfy, as an equation.

    Returns an empty text if the schedule can run with the size.
    """
    compute_bubble: Callable[[PipelineSize, PassSeconds], AnalyticalBubble | None] = omit_bubble
    """Returns the idle time of a rank by a formula, from the size and the times of passes.

    Returns None if no formula is valid for them.
    """
    planned_stages_per_rank: tuple[int, ...] = ()
    """The numbers of stages per rank that ``parbench plan search`` tries. Empty tries none."""
    note: str = ""
    """A limit of the implementation, which results of measurements state. Empty without one."""

    def size(self, ranks: int, microbatches: int, stages_per_rank: int = 0) -> PipelineSize:
        """Return the size of a pipeline, after a check that the schedule can run with it.

        ``stages_per_rank`` 0 means the schedule's default. Raises ``UserError`` with the condition
        that the size does not satisfy.
        """
        size = PipelineSize(ranks, microbatches, stages_per_rank or self.stages_per_rank)
        rule = self._find_broken_size(size) or self.find_broken_rule(size)
        if rule:
            raise UserError(f"{self.name} needs {rule}")
        return size

    def _find_broken_size(self, size: PipelineSize) -> str:
        """Return a limit that the ranks, microbatches or stages per rank of a size break.

        The result is the limit as an equation, such as ``chunks(1) >= 2``. It is empty if the size
        is within all limits.
        """
        chunks, min_chunks = size.stages_per_rank, self.min_stages_per_rank
        if size.ranks < 2:
            return f"ranks({size.ranks}) >= 2: one rank is not a pipeline"
        if size.microbatches < 1:
            return f"microbatches({size.microbatches}) >= 1"
        if min_chunks is None and chunks != self.stages_per_rank:
            return f"chunks({chunks}) == {self.stages_per_rank}"
        if min_chunks is not None and chunks < min_chunks:
            return f"chunks({chunks}) >= {min_chunks}"
        return ""

    def make_order(self, size: PipelineSize) -> PipelineOrder:
        """Return the actions of all ranks, in the order in which each rank runs them."""
        return PipelineOrder(
            name=self.name,
            actions_by_rank=tuple(tuple(self.list_actions(r, size)) for r in range(size.ranks)),
            microbatches=size.microbatches,
            stages_per_rank=size.stages_per_rank,
        )

    def microbatches_in_flight(self, rank: int, size: PipelineSize) -> float:
        """Return the maximum number of microbatches whose activations a rank holds at once.

        With several stages per rank, a microbatch in one of them counts as 1 / stages_per_rank.
        """
        return _count_held(self, rank, size)[0] / size.stages_per_rank

    def logits_in_flight(self, rank: int, size: PipelineSize) -> float:
        """Return the maximum number of microbatches whose logits a rank holds at once.

        It is 0 on a rank without the last stage. With split backward passes, logits are held until
        the weight gradient of the head.
        """
        return _count_held(self, rank, size)[1]


@lru_cache(maxsize=65536)
def _count_held(schedule: Schedule, rank: int, size: PipelineSize) -> tuple[float, float]:
    """Return the maximum numbers of microbatches that a rank holds at once for backward.

    The first element counts all stages of the rank, a microbatch once per stage. The second counts
    only the last stage of the pipeline, 0 if another rank has it.
    """
    actions = tuple(schedule.list_actions(rank, size))
    last_stage = size.num_stages - 1
    return (
        find_peak_held(actions, lambda stage: 1),
        find_peak_held(actions, lambda stage: float(stage == last_stage)),
    )
