"""Simulation of a pipeline: when each action of its order starts and stops."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from parbench.bench.results.details import Action
from parbench.workloads.pipeline_parallel.order import (
    Output,
    PipelineOrder,
    get_received,
    list_inputs,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedAction:
    """An action of a rank with its start and stop, simulated or measured.

    An action is a pass of one stage for one microbatch. Times are in seconds of one clock for all
    ranks.
    """

    rank: int
    """The rank within the pipeline."""
    action: Action
    """The pass (F, B, I or W) with its stage and microbatch."""
    start: float
    """The start in seconds of the common clock."""
    stop: float
    """The stop in seconds of the common clock."""

    @property
    def seconds(self) -> float:
        """The duration of the action in seconds."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class SimulatedTimeline:
    """All actions of one step of a pipeline with their times, measured or simulated."""

    actions: tuple[SimulatedAction, ...]
    """The actions of all ranks, in any order."""
    ranks: int
    """The number of ranks of the pipeline."""

    def select_actions(self, rank: int) -> list[SimulatedAction]:
        """Return the actions of a rank in order of their start."""
        actions = [timed for timed in self.actions if timed.rank == rank]
        return sorted(actions, key=lambda timed: timed.start)

    @cached_property
    def first_start(self) -> float:
        """The earliest start of an action on any rank, in seconds."""
        return min(timed.start for timed in self.actions)

    @cached_property
    def makespan(self) -> float:
        """The seconds from the first start to the last stop of an action on any rank."""
        return max(timed.stop for timed in self.actions) - self.first_start

    @cached_property
    def idle(self) -> float:
        """The seconds within the makespan in which a rank runs no action, summed over ranks."""
        return self.ranks * self.makespan - sum(timed.seconds for timed in self.actions)

    @property
    def bubble_fraction(self) -> float:
        """The fraction of the makespan (0 to 1) in which a rank runs no action, mean over ranks."""
        return self.idle / (self.ranks * self.makespan)


def simulate(
    order: PipelineOrder,
    action_seconds: Callable[[Action], float],
    latency: float = 0.0,
) -> SimulatedTimeline:
    """Simulate one step of a pipeline in which each action starts as early as possible.

    ``action_seconds(action)`` is the duration of an action. An action starts once its rank is free
    and its inputs have arrived. A message from another rank arrives ``latency`` seconds after the
    end of the action that sends it. Messages do not wait for each other. Time 0 is the start of all
    ranks. Raises ``ValueError`` for a deadlock.
    """
    queues = [deque(actions) for actions in order.actions_by_rank]
    free_times = [0.0] * order.size.ranks
    producers: dict[Output, SimulatedAction] = {}

    while any(queues):
        num_finished = len(producers)
        for rank, queue in enumerate(queues):
            while queue and producers.keys() >= set(list_inputs(queue[0], order.size.num_stages)):
                action = queue.popleft()
                start = free_times[rank]
                received = get_received(action, order.size.num_stages)
                if received is not None:
                    source = producers[received]
                    arrival = source.stop if source.rank == rank else source.stop + latency
                    start = max(start, arrival)
                free_times[rank] = start + action_seconds(action)
                kind = "I" if action.kind == "B" else action.kind
                producers[action.stage, kind, action.microbatch] = SimulatedAction(
                    rank=rank, action=action, start=start, stop=free_times[rank]
                )
        if len(producers) == num_finished:
            waiting = ", ".join(str(queue[0]) for queue in queues if queue)
            raise ValueError(f"deadlock: inputs never arrive for {waiting}")
    return SimulatedTimeline(actions=tuple(producers.values()), ranks=order.size.ranks)
