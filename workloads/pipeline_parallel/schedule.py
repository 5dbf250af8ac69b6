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
    """The numbers from which the order of a schedule follows."""

    ranks: int
    microbatches: int
    stages_per_rank: int = 1

    @property
    def num_stages(self) -> int:
        return self.ranks * self.stages_per_rank


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of one rank for all of its stages and one microbatch."""

    forward: float
    input_gradient: float
    weight_gradient: float

    @property
    def backward(self) -> float:
        return self.input_gradient + self.weight_gradient

    @property
    def total(self) -> float:
        return self.forward + self.backward

    @property
    def by_kind(self) -> dict[ActionKind, float]:
        """The seconds by kind of action, if a rank has one stage."""
        return {
            "F": self.forward,
            "I": self.input_gradient,
            "W": self.weight_gradient,
            "B": self.backward,
        }

    @property
    def is_equal(self) -> bool:
        """True if F = I = W."""
        return isclose(self.forward, self.input_gradient) and isclose(
            self.input_gradient, self.weight_gradient
        )


@dataclass(frozen=True)
class AnalyticalBubble:
    """The idle seconds of a rank between the first start and the last stop of all ranks."""

    seconds: float
    note: str
    """The formula as text, with its conditions."""


def accept_all(size: PipelineSize) -> str:
    """Return an empty text: the schedule accepts every size."""
    return ""


def omit_bubble(size: PipelineSize, seconds: PassSeconds) -> None:
    """Return None: the schedule has no analytical bubble."""


def list_looped_stages(rank: int, size: PipelineSize) -> tuple[int, ...]:
    """Return the stages of a rank if stages are placed round-robin over the ranks."""
    return tuple(range(rank, size.num_stages, size.ranks))


def list_v_stages(rank: int, size: PipelineSize) -> tuple[int, ...]:
    """Return the two stages of a rank if stages are placed in a V: down the ranks and back up."""
    return rank, size.num_stages - 1 - rank


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """A pipeline schedule: its order of actions, and its rules and formulas."""

    name: str
    list_actions: Callable[[int, PipelineSize], Sequence[Action]]
    """Returns the actions of a rank, in order."""
    splits_backward: bool = False
    """True if some backward passes are an input gradient (I) and a weight gradient (W)."""
    stages_of: Callable[[int, PipelineSize], tuple[int, ...]] = list_looped_stages
    """Returns the stages of a rank. Neighboring stages on different ranks send to each other."""
    stages_per_rank: int = 1
    """The default number of stages per rank."""
    min_stages_per_rank: int | None = None
    """The fewest stages per rank, None if only the default is possible."""
    find_broken_rule: Callable[[PipelineSize], str] = accept_all
    """Returns the equation of this schedule that a size does not satisfy, otherwise empty."""
    compute_bubble: Callable[[PipelineSize, PassSeconds], AnalyticalBubble | None] = omit_bubble
    """Returns the analytical bubble, None if no formula is valid for these sizes and times."""
    planned_stages_per_rank: tuple[int, ...] = ()
    """The stages per rank that a search of the planner tries."""
    note: str = ""
    """A limit of the implementation, which is a note of measured rows. Empty if there is none."""

    def size(self, ranks: int, microbatches: int, stages_per_rank: int = 0) -> PipelineSize:
        """Return the checked pipeline size. ``stages_per_rank`` 0 is the schedule's default.

        Raises ``UserError`` with the equation that the size does not satisfy.
        """
        size = PipelineSize(ranks, microbatches, stages_per_rank or self.stages_per_rank)
        rule = self._find_broken_size(size) or self.find_broken_rule(size)
        if rule:
            raise UserError(f"{self.name} needs {rule}")
        return size

    def _find_broken_size(self, size: PipelineSize) -> str:
        """Return the equation that ranks, microbatches or stages break, otherwise empty."""
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
        """Return the actions of all ranks for a pipeline size."""
        return PipelineOrder(
            name=self.name,
            actions_by_rank=tuple(tuple(self.list_actions(r, size)) for r in range(size.ranks)),
            microbatches=size.microbatches,
            stages_per_rank=size.stages_per_rank,
        )

    def microbatches_in_flight(self, rank: int, size: PipelineSize) -> float:
        """Return the most microbatches whose activations a rank holds at once for its stages."""
        return _count_held(self, rank, size)[0] / size.stages_per_rank

    def logits_in_flight(self, rank: int, size: PipelineSize) -> float:
        """Return the maximum number of microbatches whose logits a rank holds.

        A split backward pass holds logits until the weight gradient of the head.
        """
        return _count_held(self, rank, size)[1]


@lru_cache(maxsize=65536)
def _count_held(schedule: Schedule, rank: int, size: PipelineSize) -> tuple[float, float]:
    """Return the maximum number of microbatches that a rank holds, and that its last stage holds.

    The first number counts a microbatch once per stage. The second is 0 without the last stage.
    """
    actions = tuple(schedule.list_actions(rank, size))
    last_stage = size.num_stages - 1
    return (
        find_peak_held(actions, lambda stage: 1),
        find_peak_held(actions, lambda stage: float(stage == last_stage)),
    )
