"""When each action of a schedule starts and stops, given how long each takes and how long a message is on its way."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from bench.results.details import Action
from bench.text import UserError
from workloads.pipeline_parallel.actions import Result, needs, result
from workloads.pipeline_parallel.schedules import Schedule

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
    """All actions of one step, measured or simulated; each rank's stand in the order in which they ran."""

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
        return self._busy[rank]

    def span(self, rank: int) -> float:
        """Return the seconds from the first start to the last stop of ``rank``."""
        mine = self.of(rank)
        return max(ran.stop for ran in mine) - mine[0].start if mine else 0.0

    @cached_property
    def idle(self) -> float:
        """Rank-seconds in which a rank ran nothing between the first start and the last stop of all."""
        return self.ranks * self.makespan - sum(self._busy)

    @cached_property
    def _by_rank(self) -> tuple[tuple[Ran, ...], ...]:
        rows: list[list[Ran]] = [[] for _ in range(self.ranks)]
        for ran in self.ran:
            rows[ran.rank].append(ran)
        return tuple(tuple(sorted(row, key=lambda ran: ran.start)) for row in rows)

    @cached_property
    def _busy(self) -> tuple[float, ...]:
        return tuple(_covered(row) for row in self._by_rank)


def _covered(row: tuple[Ran, ...]) -> float:
    seconds, reached = 0.0, float("-inf")
    for ran in row:
        seconds += max(0.0, ran.stop - max(ran.start, reached))
        reached = max(reached, ran.stop)
    return seconds


def simulate(
    schedule: Schedule,
    seconds: Callable[[Action], float],
    latency: Latency | None = None,
    *,
    rendezvous: bool = False,
) -> Timeline:
    """Run ``schedule`` from 0: each rank in its order, each action once its rank is free and what it needs has come.

    What comes from another rank takes ``latency(from_rank, to_rank)`` seconds more, none if not given; links do not
    queue. With ``rendezvous`` it does not set out before its receiver is free and asks for it, as on gloo, whose
    sender waits for that. ``UserError`` where the orders deadlock, with the ranks that wait for one another.
    """
    between = _as_function(latency)
    rows: list[list[Ran]] = [[] for _ in range(schedule.ranks)]
    came: dict[Result, Ran] = {}

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

    deadlock = walk(schedule, run)
    if deadlock:
        raise UserError(tell_deadlock(schedule, deadlock))
    return Timeline(ran=tuple(ran for row in rows for ran in row), ranks=schedule.ranks)


def _as_function(latency: Latency | None) -> Callable[[int, int], float]:
    if latency is None:
        return lambda source, target: 0.0
    if isinstance(latency, Mapping):
        return lambda source, target: latency.get((source, target), 0.0)
    return latency


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """A rank that can go no further: its next action, and what that needs."""

    rank: int
    action: Action
    needs: Result


def walk(schedule: Schedule, visit: Callable[[int, Action, Sequence[Result]], None]) -> tuple[Waiting, ...]:
    """Visit every action with what it needs, in some order that can run; return the ranks that never finish."""
    rows = [schedule.actions_of(rank) for rank in range(schedule.ranks)]
    at = [0] * schedule.ranks
    done: set[Result] = set()
    waiting: dict[Result, list[Waiting]] = {}
    ready = list(range(schedule.ranks))
    while ready:
        rank = ready.pop()
        while at[rank] < len(rows[rank]):
            action = rows[rank][at[rank]]
            needed = needs(action, schedule.num_stages)
            lacking = next((need for need in needed if need not in done), None)
            if lacking is not None:
                waiting.setdefault(lacking, []).append(Waiting(rank=rank, action=action, needs=lacking))
                break
            visit(rank, action, needed)
            at[rank] += 1
            left = result(action)
            done.add(left)
            if left in waiting:
                ready += [other.rank for other in waiting.pop(left)]
    return tuple(sorted((each for group in waiting.values() for each in group), key=lambda each: each.rank))


def tell_deadlock(schedule: Schedule, deadlock: Sequence[Waiting]) -> str:
    """Return the sentence about the ranks that wait for one another; the first one named is the first to blame."""
    return f"{schedule.name} deadlocks: " + ", ".join(
        f"rank {each.rank} waits with {each.action} for {_name(schedule, each.needs)}"
        for each in cycle_of(schedule, deadlock)
    )


def cycle_of(schedule: Schedule, deadlock: Sequence[Waiting]) -> tuple[Waiting, ...]:
    """Return the ranks that wait for one another in a circle, or the one that waits for what nobody does."""
    stuck = {each.rank: each for each in deadlock}
    maker = {result(action): rank for rank in range(schedule.ranks) for action in schedule.actions_of(rank)}
    path = [deadlock[0]]
    while True:
        rank = maker.get(path[-1].needs)
        if rank not in stuck:
            return (path[-1],)
        if stuck[rank] in path:
            return tuple(path[path.index(stuck[rank]) :])
        path.append(stuck[rank])


def _name(schedule: Schedule, need: Result) -> str:
    """Return the action that leaves ``need`` behind as it is written in the schedule."""
    stage, kind, microbatch = need
    names = [action for rank in range(schedule.ranks) for action in schedule.actions_of(rank) if result(action) == need]
    return str(names[0]) if names else f"{stage}{kind}{microbatch}, which nobody runs"
