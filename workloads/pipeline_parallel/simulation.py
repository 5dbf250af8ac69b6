"""Simulation of a pipeline: whether its order can run, and when each action starts and stops."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

from parbench.bench.results.details import Action, ActionKind
from parbench.bench.text import UserError
from parbench.workloads.pipeline_parallel.order import (
    Output,
    PipelineOrder,
    get_output,
    get_received,
    list_inputs,
)

MAX_NAMED_RANKS = 4

Latency = float | Mapping[tuple[int, int], float]
"""Seconds of a message, of all ranks or by sender and receiver."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedAction:
    """An action of a rank, with its start and stop in seconds."""

    rank: int
    action: Action
    start: float
    stop: float

    @property
    def seconds(self) -> float:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """All actions of one step, measured or simulated."""

    actions: tuple[TimedAction, ...]
    ranks: int

    def actions_of(self, rank: int) -> tuple[TimedAction, ...]:
        """Return the actions of a rank in order of their start."""
        return self._actions_by_rank[rank]

    @cached_property
    def first_start(self) -> float:
        return min((timed.start for timed in self.actions), default=0.0)

    @cached_property
    def makespan(self) -> float:
        """Seconds from the first start to the last stop of all ranks."""
        return max((timed.stop for timed in self.actions), default=0.0) - self.first_start

    def busy(self, rank: int) -> float:
        """Return the seconds in which a rank runs at least one action."""
        seconds = 0.0
        last_stop = float("-inf")
        for timed in self.actions_of(rank):
            seconds += max(0.0, timed.stop - max(timed.start, last_stop))
            last_stop = max(last_stop, timed.stop)
        return seconds

    def span(self, rank: int) -> float:
        """Return the seconds from the first start to the last stop of a rank."""
        actions = self.actions_of(rank)
        if not actions:
            return 0.0
        return max(timed.stop for timed in actions) - actions[0].start

    @cached_property
    def idle(self) -> float:
        """Seconds within the makespan in which ranks run no action, summed over ranks."""
        return self.ranks * self.makespan - sum(map(self.busy, range(self.ranks)))

    @cached_property
    def _actions_by_rank(self) -> list[tuple[TimedAction, ...]]:
        rows: list[list[TimedAction]] = [[] for _ in range(self.ranks)]
        for timed in self.actions:
            rows[timed.rank].append(timed)
        return [tuple(sorted(row, key=lambda timed: timed.start)) for row in rows]


def simulate(
    order: PipelineOrder,
    action_seconds: Callable[[Action], float],
    latency: Latency = 0.0,
    *,
    rendezvous: bool = False,
) -> Timeline:
    """Start each action once its rank is free and its inputs have arrived.

    A message from another rank arrives ``latency`` seconds after the end of the action that sends
    it. Links do not queue. With ``rendezvous``, as on gloo, it leaves only when its receiver is
    free. Raises ``UserError`` for a deadlock.
    """
    rows: list[list[TimedAction]] = [[] for _ in range(order.ranks)]
    producers: dict[Output, TimedAction] = {}

    def compute_arrival(source: TimedAction, rank: int, free: float) -> float:
        if source.rank == rank:
            return source.stop
        departure = max(source.stop, free) if rendezvous else source.stop
        if isinstance(latency, Mapping):
            return departure + latency.get((source.rank, rank), 0.0)
        return departure + latency

    def run(rank: int, action: Action) -> None:
        start = rows[rank][-1].stop if rows[rank] else 0.0
        received = get_received(action, order.num_stages)
        if received is not None:
            start = max(start, compute_arrival(producers[received], rank, start))
        stop = start + action_seconds(action)
        timed = TimedAction(rank=rank, action=action, start=start, stop=stop)
        rows[rank].append(timed)
        producers[get_output(action)] = timed

    _visit_actions(order, run)
    return Timeline(actions=tuple(timed for row in rows for timed in row), ranks=order.ranks)


def simulate_equal_passes(order: PipelineOrder) -> Timeline:
    """Simulate F = I = W, where a full backward pass takes twice as long as a forward pass."""
    return simulate(order, lambda action: 2.0 if action.kind == "B" else 1.0)


class BlockedRank(NamedTuple):
    """A rank that waits forever for an input of its next action."""

    rank: int
    action: Action
    missing: Output


def _visit_actions(order: PipelineOrder, visit: Callable[[int, Action], object]) -> None:
    """Visit every action after its inputs. Raises ``UserError`` for a deadlock."""
    next_step = [0] * order.ranks
    outputs: set[Output] = set()
    blocked: dict[int, BlockedRank] = {}
    waiting: defaultdict[Output, list[int]] = defaultdict(list)
    ready = list(range(order.ranks))
    while ready:
        rank = ready.pop()
        blocked.pop(rank, None)
        actions = order.actions_by_rank[rank]
        while next_step[rank] < len(actions):
            action = actions[next_step[rank]]
            inputs = list_inputs(action, order.num_stages)
            missing = next((entry for entry in inputs if entry not in outputs), None)
            if missing is not None:
                waiting[missing].append(rank)
                blocked[rank] = BlockedRank(rank, action, missing)
                break
            visit(rank, action)
            next_step[rank] += 1
            output = get_output(action)
            outputs.add(output)
            ready += waiting.pop(output, [])
    if blocked:
        raise UserError(_format_deadlock(order, [blocked[rank] for rank in sorted(blocked)]))


def _format_deadlock(order: PipelineOrder, blocked: Sequence[BlockedRank]) -> str:
    producers = {
        get_output(action): str(action) for actions in order.actions_by_rank for action in actions
    }
    waits = []
    for rank, action, missing in blocked[:MAX_NAMED_RANKS]:
        name = "{}{}{}, which no rank runs".format(*missing)
        waits.append(f"rank {rank} waits with {action} for {producers.get(missing, name)}")
    num_others = len(blocked) - len(waits)
    if num_others:
        waits.append(f"and {num_others} more ranks wait")
    return f"{order.name} deadlocks: {', '.join(waits)}"


def check(order: PipelineOrder) -> None:
    """Raise ``UserError`` unless every microbatch passes every stage once, without a deadlock."""
    rank_by_stage: dict[int, int] = {}
    kinds: defaultdict[tuple[int, int], list[ActionKind]] = defaultdict(list)
    for rank, actions in enumerate(order.actions_by_rank):
        for action in actions:
            if action.stage >= order.num_stages or action.microbatch >= order.microbatches:
                size = f"stages({order.num_stages}) x microbatches({order.microbatches})"
                raise UserError(f"{order.name}: {action} on rank {rank} is outside of {size}")
            owner = rank_by_stage.setdefault(action.stage, rank)
            if owner != rank:
                place = f"stage {action.stage} is on rank {owner}"
                raise UserError(f"{order.name}: {action} is on rank {rank}, but {place}")
            kinds[action.stage, action.microbatch].append(action.kind)
    for stage, microbatch in product(range(order.num_stages), range(order.microbatches)):
        passes = " ".join(sorted(kinds[stage, microbatch]))
        if passes not in ("B F", "F I W"):
            place = f"microbatch {microbatch} of stage {stage} has {passes or 'no action'}"
            raise UserError(f"{order.name}: {place}: it needs F and B, or F, I and W, once each")
    _visit_actions(order, lambda rank, action: None)
