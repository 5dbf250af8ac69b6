"""When each action of a schedule starts and stops, given how long each takes and how long a message is on its way."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from bench.results.details import Action
from bench.text import UserError
from workloads.pipeline_parallel.schedules import Result, Schedule, needs, result

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
        """Return the seconds from the first start to the last stop of ``rank``."""
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

    if circle := walk(schedule, run):
        raise UserError(tell_deadlock(schedule, circle))
    return Timeline(ran=tuple(ran for row in rows for ran in row), ranks=schedule.ranks)


class Waiting(NamedTuple):
    """A rank that can go no further: its next action, and what that needs."""

    rank: int
    action: Action
    needs: Result


def walk(schedule: Schedule, visit: Callable[[int, Action, Sequence[Result]], None]) -> tuple[Waiting, ...]:
    """Visit every action with what it needs, in some order that can run.

    Where some can not, return the ranks that wait for one another in a circle, or one that waits for what nobody does.
    """
    rows = [schedule.actions_of(rank) for rank in range(schedule.ranks)]
    at = [0] * schedule.ranks
    done: set[Result] = set()
    stuck: dict[int, Waiting] = {}
    waiting: dict[Result, list[int]] = {}
    ready = list(range(schedule.ranks))
    while ready:
        rank = ready.pop()
        stuck.pop(rank, None)
        while at[rank] < len(rows[rank]):
            action = rows[rank][at[rank]]
            needed = needs(action, schedule.num_stages)
            lacking = next((need for need in needed if need not in done), None)
            if lacking is not None:
                waiting.setdefault(lacking, []).append(rank)
                stuck[rank] = Waiting(rank, action, lacking)
                break
            visit(rank, action, needed)
            at[rank] += 1
            left = result(action)
            done.add(left)
            ready += waiting.pop(left, ())
    path = [stuck[min(stuck)]] if stuck else []
    maker = {result(action): rank for rank, row in enumerate(rows) for action in row}
    while path:
        following = stuck.get(maker.get(path[-1].needs, -1))
        if following is None:
            return (path[-1],)
        if following in path:
            return tuple(path[path.index(following) :])
        path.append(following)
    return ()


def tell_deadlock(schedule: Schedule, circle: Sequence[Waiting]) -> str:
    """Return the sentence about the ranks that wait for one another, or for what nobody does."""
    made = {result(action): str(action) for rank in range(schedule.ranks) for action in schedule.actions_of(rank)}
    return f"{schedule.name} deadlocks: " + ", ".join(
        f"rank {one.rank} waits with {one.action} for "
        + made.get(one.needs, "{}{}{}, which nobody runs".format(*one.needs))
        for one in circle
    )
