"""A schedule run on paper: whether it can run and does all the work once, and when each action starts and stops."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

from parbench.bench.results.details import Action, ActionKind
from parbench.bench.text import UserError
from parbench.workloads.pipeline_parallel.schedules import Result, Schedule, needs, result

_MAX_NAMED_RANKS = 4

Latency = Callable[[int, int], float] | Mapping[tuple[int, int], float]  # seconds from one rank to another


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """One action as it ran on a rank, in seconds."""

    rank: int
    action: Action
    start: float
    stop: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """All actions of one step, measured or simulated."""

    ran: tuple[Ran, ...]
    ranks: int

    def of(self, rank: int) -> tuple[Ran, ...]:
        """Return what ``rank`` ran, in order of start."""
        return self._by_rank[rank]

    @cached_property
    def first_start(self) -> float:
        """Seconds, on the timeline's own clock, at which the first rank began."""
        return min((ran.start for ran in self.ran), default=0.0)

    @cached_property
    def makespan(self) -> float:
        """Seconds from the first start to the last stop of all ranks."""
        return max((ran.stop for ran in self.ran), default=0.0) - self.first_start

    def busy(self, rank: int) -> float:
        """Return the seconds in which ``rank`` ran something, each counted once."""
        seconds, reached = 0.0, float("-inf")
        for ran in self.of(rank):
            seconds += max(0.0, ran.stop - max(ran.start, reached))
            reached = max(reached, ran.stop)
        return seconds

    def span(self, rank: int) -> float:
        mine = self.of(rank)
        return max(ran.stop for ran in mine) - mine[0].start if mine else 0.0

    @cached_property
    def idle(self) -> float:
        """Rank-seconds in which a rank ran nothing between the first start and the last stop of all."""
        return self.ranks * self.makespan - sum(self.busy(rank) for rank in range(self.ranks))

    @cached_property
    def _by_rank(self) -> tuple[tuple[Ran, ...], ...]:
        rows: list[list[Ran]] = [[] for _ in range(self.ranks)]
        for ran in self.ran:
            rows[ran.rank].append(ran)
        return tuple(tuple(sorted(row, key=lambda ran: ran.start)) for row in rows)


def simulate(
    schedule: Schedule, seconds: Callable[[Action], float], latency: Latency | None = None, *, rendezvous: bool = False
) -> Timeline:
    """Run ``schedule`` from 0: each rank in its order, each action once its rank is free and what it needs has come.

    What comes from another rank takes ``latency(from_rank, to_rank)`` seconds more, none if not given; links do not
    queue. With ``rendezvous`` it does not set out before its receiver is free and asks for it, as on gloo, whose
    sender waits for that. ``UserError`` where the orders deadlock, with the ranks that wait for one another.
    """
    rows: list[list[Ran]] = [[] for _ in range(schedule.ranks)]
    came: dict[Result, Ran] = {}

    def between(source: int, target: int) -> float:
        return latency(source, target) if callable(latency) else (latency or {}).get((source, target), 0.0)

    def run(rank: int, action: Action, needed: Sequence[Result]) -> None:
        free = start = rows[rank][-1].stop if rows[rank] else 0.0
        for need in needed:
            if need[0] != action.stage:  # what a stage needs of itself its rank has run before
                source = came[need]
                sets_out = max(source.stop, free) if rendezvous else source.stop
                arrival = source.stop if source.rank == rank else sets_out + between(source.rank, rank)
                start = max(start, arrival)
        ran = Ran(rank=rank, action=action, start=start, stop=start + seconds(action))
        rows[rank].append(ran)
        came[result(action)] = ran

    stuck = _walk(schedule, run)
    if stuck:
        raise UserError(_deadlock_message(schedule, stuck))
    return Timeline(ran=tuple(ran for row in rows for ran in row), ranks=schedule.ranks)


def simulate_even(schedule: Schedule) -> Timeline:
    """Run it where F = I = W, so that a whole backward takes twice as long as a forward."""
    return simulate(schedule, lambda action: 2.0 if action.kind == "B" else 1.0)


class _Waiting(NamedTuple):
    rank: int
    action: Action
    needs: Result


def _walk(schedule: Schedule, visit: Callable[[int, Action, Sequence[Result]], object]) -> list[_Waiting]:
    """Visit every action with what it needs, in some order that can run; return the ranks that wait forever."""
    rows = [schedule.actions_of(rank) for rank in range(schedule.ranks)]
    next_step = [0] * schedule.ranks
    done: set[Result] = set()
    stuck: dict[int, _Waiting] = {}
    waiting: dict[Result, list[int]] = {}
    ready = list(range(schedule.ranks))
    while ready:
        rank = ready.pop()
        stuck.pop(rank, None)
        while next_step[rank] < len(rows[rank]):
            action = rows[rank][next_step[rank]]
            needed = needs(action, schedule.num_stages)
            missing = next((need for need in needed if need not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                stuck[rank] = _Waiting(rank, action, missing)
                break
            visit(rank, action, needed)
            next_step[rank] += 1
            left = result(action)
            done.add(left)
            ready += waiting.pop(left, ())
    return [stuck[rank] for rank in sorted(stuck)]


def _deadlock_message(schedule: Schedule, stuck: Sequence[_Waiting]) -> str:
    producers = {result(action): str(action) for rank in range(schedule.ranks) for action in schedule.actions_of(rank)}
    waits = [
        f"rank {wait.rank} waits with {wait.action} for "
        + producers.get(wait.needs, "{}{}{}, which nobody runs".format(*wait.needs))
        for wait in stuck[:_MAX_NAMED_RANKS]
    ]
    more = len(stuck) - len(waits)
    if more:
        waits.append(f"and {more} more ranks wait")
    return f"{schedule.name} deadlocks: {', '.join(waits)}"


def check(schedule: Schedule) -> None:
    """Raise ``UserError`` unless every action of every stage and microbatch comes once, and all of them can run."""
    name, stages, microbatches = schedule.name, schedule.num_stages, schedule.microbatches
    if len(schedule.order) != schedule.ranks:
        raise UserError(f"{name} has rows({len(schedule.order)}) != ranks({schedule.ranks})")
    rank_of_stage: dict[int, int] = {}
    kinds: defaultdict[tuple[int, int], list[ActionKind]] = defaultdict(list)
    for rank, actions in enumerate(schedule.order):
        for action in actions:
            if action.stage >= stages or action.microbatch >= microbatches:
                size = f"stages({stages}) x microbatches({microbatches})"
                raise UserError(f"{name}: {action} on rank {rank} is outside of {size}")
            holder = rank_of_stage.setdefault(action.stage, rank)
            if holder != rank:
                raise UserError(f"{name}: {action} is on rank {rank}, and stage {action.stage} lies on rank {holder}")
            kinds[action.stage, action.microbatch].append(action.kind)
    for stage, microbatch in product(range(stages), range(microbatches)):
        found = sorted(kinds[stage, microbatch])
        if found not in (["B", "F"], ["F", "I", "W"]):
            rule = "it needs F and B, or F, I and W, once each"
            raise UserError(
                f"{name}: microbatch {microbatch} of stage {stage} has {' '.join(found) or 'nothing'}: {rule}"
            )
    stuck = _walk(schedule, lambda rank, action, needed: None)
    if stuck:
        raise UserError(_deadlock_message(schedule, stuck))
