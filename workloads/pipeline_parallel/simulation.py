"""A schedule run on paper: whether it can run and does all the work once, and when each action starts and stops."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple, NoReturn

from parbench.bench.results.details import Action, ActionKind
from parbench.bench.text import UserError
from parbench.workloads.pipeline_parallel.schedules import Order, Result, Schedule, needs, result

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

    if circle := _walk(schedule, run):
        raise UserError(_tell_deadlock(schedule, circle))
    return Timeline(ran=tuple(ran for row in rows for ran in row), ranks=schedule.ranks)


def simulate_even(schedule: Schedule) -> Timeline:
    """Run it where F = I = W, so that a whole backward takes twice as long as a forward."""
    return simulate(schedule, lambda action: 2.0 if action.kind == "B" else 1.0)


class _Waiting(NamedTuple):
    rank: int
    action: Action
    needs: Result


def _walk(schedule: Schedule, visit: Callable[[int, Action, Sequence[Result]], object]) -> tuple[_Waiting, ...]:
    """Visit every action with what it needs, in some order that can run.

    Where some can not, return the ranks that wait for one another in a circle, or one that waits for what nobody does.
    """
    rows = [schedule.actions_of(rank) for rank in range(schedule.ranks)]
    at = [0] * schedule.ranks
    done: set[Result] = set()
    stuck: dict[int, _Waiting] = {}
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
                stuck[rank] = _Waiting(rank, action, lacking)
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


def _tell_deadlock(schedule: Schedule, circle: Sequence[_Waiting]) -> str:
    made = {result(action): str(action) for rank in range(schedule.ranks) for action in schedule.actions_of(rank)}
    return f"{schedule.name} deadlocks: " + ", ".join(
        f"rank {one.rank} waits with {one.action} for "
        + made.get(one.needs, "{}{}{}, which nobody runs".format(*one.needs))
        for one in circle
    )


class _Place(NamedTuple):
    rank: int
    step: int

    def __str__(self) -> str:
        return f"rank {self.rank}, step {self.step}"


def check(schedule: Schedule) -> None:
    """Raise ``UserError`` unless every action of every stage and microbatch comes once, and all of them can run.

    The error's first line is the rule that is broken, with the action and where it stands; below it a grid of ranks
    and steps has that action in ``> <``. An action that lacks is drawn at the end of its rank.
    """
    if len(schedule.order) != schedule.ranks:
        raise UserError(f"{schedule.name} has rows({len(schedule.order)}) != ranks({schedule.ranks})")
    places = _places(schedule)
    for action, place in places.items():
        whole = Action(action.stage, "B", action.microbatch)
        if action.kind in ("I", "W") and whole in places:
            rule = "a backward is either whole (B) or in two parts (I and W)"
            _refuse(schedule, f"{action} at {place} comes beside {whole} at {places[whole]}: {rule}", place)
    _refuse_lacking(schedule, places)
    made = {result(action): (place, action) for action, place in places.items()}
    for action, place in places.items():
        for other, source in (made[need] for need in needs(action, schedule.num_stages)):
            if other.rank == place.rank and other.step > place.step:
                _refuse(schedule, f"{action} at {place} needs {source}, which comes later, at {other}", place)
    if circle := _walk(schedule, lambda rank, action, needed: None):
        grid = draw_grid(schedule.order, [places[each.action] for each in circle])
        raise UserError(f"{_tell_deadlock(schedule, circle)}\n{grid}")


def _places(schedule: Schedule) -> dict[Action, _Place]:
    """Return where each action stands; ``UserError`` unless it can be there, and comes once."""
    places: dict[Action, _Place] = {}
    holders: dict[int, int] = {}
    cells = [(_Place(rank, step), action) for rank, row in enumerate(schedule.order) for step, action in enumerate(row)]
    for place, action in cells:
        if action is None:
            continue
        found = None
        if action.stage >= schedule.num_stages:
            found = f"{action} at {place} has stage({action.stage}) >= stages({schedule.num_stages})"
        elif action.microbatch >= schedule.microbatches:
            found = f"{action} at {place} has microbatch({action.microbatch}) >= microbatches({schedule.microbatches})"
        elif action in places:
            found = f"{action} comes twice, at {places[action]} and at {place}"
        elif (holder := holders.setdefault(action.stage, place.rank)) != place.rank:
            found = f"{action} at {place}: rank {holder} has stage {action.stage} too, and a stage lies on one rank"
        if found:
            _refuse(schedule, found, place)
        places[action] = place
    return places


def _refuse_lacking(schedule: Schedule, places: Mapping[Action, _Place]) -> None:
    holders = {action.stage: place.rank for action, place in places.items()}
    whole: tuple[ActionKind, ...] = ("F", "B")
    split: tuple[ActionKind, ...] = ("F", "I", "W")
    for stage, microbatch in product(range(schedule.num_stages), range(schedule.microbatches)):
        is_split = any(Action(stage, kind, microbatch) in places for kind in split[1:])
        for action in (Action(stage, kind, microbatch) for kind in (split if is_split else whole)):
            if action not in places:
                rank = holders.get(stage, stage % schedule.ranks)
                order = tuple((*row, action) if at == rank else row for at, row in enumerate(schedule.order))
                all_of_it = f"stages({schedule.num_stages}) x microbatches({schedule.microbatches})"
                rule = f"{all_of_it} each need F and B, or F, I and W"
                _refuse(schedule, f"{action} lacks on rank {rank}: {rule}", _Place(rank, len(order[rank]) - 1), order)


def _refuse(schedule: Schedule, sentence: str, marked: _Place, order: Order | None = None) -> NoReturn:
    raise UserError(f"{schedule.name}: {sentence}\n{draw_grid(order or schedule.order, [marked])}")


def draw_grid(order: Order, marked: Sequence[tuple[int, int]]) -> str:
    """Return ranks by steps as text, the marked places in ``> <``, around the first of them."""
    at = marked[0][1]
    steps = range(max(0, at - 10), min(max(len(row) for row in order), at + 11))
    rows = [["step", *map(str, steps)]]
    for rank, row in enumerate(order):
        cells = [str(row[step] or ".") if step < len(row) else "." for step in steps]
        marks = (f">{cell}<" if (rank, step) in marked else cell for step, cell in zip(steps, cells, strict=True))
        rows.append([f"rank {rank}", *marks])
    head = max(len(row[0]) for row in rows)
    width = max(len(cell) for row in rows for cell in row[1:])
    return "\n".join(f"{row[0]:<{head}} " + " ".join(f"{cell:^{width}}" for cell in row[1:]).rstrip() for row in rows)
