"""Whether a schedule can run and does all the work once; where it cannot, what is wrong and where it stands."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NoReturn

from bench.results.details import Action, ActionKind
from bench.text import UserError
from workloads.pipeline_parallel.actions import Order, needs, result
from workloads.pipeline_parallel.schedules import Schedule
from workloads.pipeline_parallel.simulate import cycle_of, tell_deadlock, walk

_COLUMNS_ASIDE = 10

Place = tuple[int, int]  # rank and step


def check(schedule: Schedule) -> None:
    """Raise ``UserError`` unless every action of every stage and microbatch comes once, and all of them can run.

    The error's first line is the rule that is broken, with the action and where it stands; below it a grid of ranks
    and steps has that action in ``> <``. An action that lacks is drawn at the end of its rank.
    """
    if len(schedule.order) != schedule.ranks:
        raise UserError(f"{schedule.name} has rows({len(schedule.order)}) != ranks({schedule.ranks})")
    places: dict[Action, Place] = {}
    holders: dict[int, Place] = {}
    for place, action in _cells(schedule.order):
        _refuse_out_of_range(schedule, action, place)
        _refuse_twice(schedule, action, place, places)
        _refuse_second_rank(schedule, action, place, holders)
        places[action] = place
    _refuse_mixed(schedule, places)
    _refuse_lacking(schedule, places, holders)
    _refuse_too_early(schedule, places)
    _refuse_deadlock(schedule, places)


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Return by rank the most chunks whose activations are held at once: from F until the end of B or W.

    A chunk is one stage's activations of one microbatch, 1/v of a rank's.
    """
    return tuple(_peak(schedule.actions_of(rank)) for rank in range(schedule.ranks))


def _peak(actions: Sequence[Action]) -> int:
    held = peak = 0
    for action in actions:
        if action.kind == "F":
            held += 1
            peak = max(peak, held)
        elif action.kind in ("B", "W"):
            held -= 1
    return peak


def draw_grid(order: Order, marked: Sequence[Place]) -> str:
    """Return ranks by steps as text, the marked places in ``> <``, around the first of them."""
    at = marked[0][1]
    steps = range(max(0, at - _COLUMNS_ASIDE), min(max(len(row) for row in order), at + _COLUMNS_ASIDE + 1))
    rows = [["step", *map(str, steps)]]
    for rank, row in enumerate(order):
        cells = [_cell(row[step] if step < len(row) else None, (rank, step) in marked) for step in steps]
        rows.append([f"rank {rank}", *cells])
    head = max(len(row[0]) for row in rows)
    width = max(len(cell) for row in rows for cell in row[1:])
    return "\n".join(f"{row[0]:<{head}} " + " ".join(f"{cell:^{width}}" for cell in row[1:]).rstrip() for row in rows)


def _cell(action: Action | None, is_marked: bool) -> str:
    text = "." if action is None else str(action)
    return f">{text}<" if is_marked else text


def _cells(order: Order) -> Iterator[tuple[Place, Action]]:
    for rank, row in enumerate(order):
        for step, action in enumerate(row):
            if action is not None:
                yield (rank, step), action


def _refuse(schedule: Schedule, sentence: str, *marked: Place, order: Order | None = None) -> NoReturn:
    raise UserError(f"{schedule.name}: {sentence}\n{draw_grid(order or schedule.order, marked)}")


def _at(place: Place) -> str:
    return f"rank {place[0]}, step {place[1]}"


def _refuse_out_of_range(schedule: Schedule, action: Action, place: Place) -> None:
    if action.stage >= schedule.num_stages:
        _refuse(schedule, f"{action} at {_at(place)} has stage({action.stage}) >= stages({schedule.num_stages})", place)
    if action.microbatch >= schedule.microbatches:
        found = f"microbatch({action.microbatch}) >= microbatches({schedule.microbatches})"
        _refuse(schedule, f"{action} at {_at(place)} has {found}", place)


def _refuse_twice(schedule: Schedule, action: Action, place: Place, places: dict[Action, Place]) -> None:
    if action in places:
        _refuse(schedule, f"{action} comes twice, at {_at(places[action])} and at {_at(place)}", place)


def _refuse_second_rank(schedule: Schedule, action: Action, place: Place, holders: dict[int, Place]) -> None:
    held = holders.setdefault(action.stage, place)
    if held[0] != place[0]:
        found = f"rank {held[0]} has stage {action.stage} too, and a stage lies on one rank"
        _refuse(schedule, f"{action} at {_at(place)}: {found}", place)


def _refuse_mixed(schedule: Schedule, places: dict[Action, Place]) -> None:
    for action, place in places.items():
        whole = Action(action.stage, "B", action.microbatch)
        if action.kind in ("I", "W") and whole in places:
            found = f"{whole} at {_at(places[whole])}: a backward is either whole (B) or in two parts (I and W)"
            _refuse(schedule, f"{action} at {_at(place)} comes beside {found}", place)


def _refuse_lacking(schedule: Schedule, places: dict[Action, Place], holders: dict[int, Place]) -> None:
    for stage, microbatch in product(range(schedule.num_stages), range(schedule.microbatches)):
        parts: tuple[ActionKind, ...] = ("I", "W")
        is_split = any(Action(stage, kind, microbatch) in places for kind in parts)
        kinds: tuple[ActionKind, ...] = ("F", *parts) if is_split else ("F", "B")
        for kind in kinds:
            action = Action(stage, kind, microbatch)
            if action not in places:
                _refuse_one_lacking(schedule, action, holders)


def _refuse_one_lacking(schedule: Schedule, action: Action, holders: dict[int, Place]) -> NoReturn:
    rank = holders[action.stage][0] if action.stage in holders else action.stage % schedule.ranks
    order = tuple((*row, action) if at == rank else row for at, row in enumerate(schedule.order))
    rule = f"stages({schedule.num_stages}) x microbatches({schedule.microbatches}) each need F and B, or F, I and W"
    _refuse(schedule, f"{action} lacks on rank {rank}: {rule}", (rank, len(order[rank]) - 1), order=order)


def _refuse_too_early(schedule: Schedule, places: dict[Action, Place]) -> None:
    made = {result(action): (place, action) for action, place in places.items()}
    for action, place in places.items():
        for need in needs(action, schedule.num_stages):
            other, source = made[need]
            if other[0] == place[0] and other[1] > place[1]:
                _refuse(schedule, f"{action} at {_at(place)} needs {source}, which comes later, at {_at(other)}", place)


def _refuse_deadlock(schedule: Schedule, places: dict[Action, Place]) -> None:
    deadlock = walk(schedule, lambda rank, action, needed: None)
    if deadlock:
        circle = [places[each.action] for each in cycle_of(schedule, deadlock)]
        raise UserError(f"{tell_deadlock(schedule, deadlock)}\n{draw_grid(schedule.order, circle)}")
