"""Whether a schedule can run and does all the work once; where it cannot, what is wrong and where it stands."""

from collections.abc import Sequence
from itertools import product
from typing import NoReturn

from bench.results.details import Action, ActionKind
from bench.text import UserError
from workloads.pipeline_parallel.schedules import Order, Schedule, needs, result
from workloads.pipeline_parallel.simulate import tell_deadlock, walk

Place = tuple[int, int]  # rank and step


def check(schedule: Schedule) -> None:
    """Raise ``UserError`` unless every action of every stage and microbatch comes once, and all of them can run.

    The error's first line is the rule that is broken, with the action and where it stands; below it a grid of ranks
    and steps has that action in ``> <``. An action that lacks is drawn at the end of its rank.
    """
    if len(schedule.order) != schedule.ranks:
        raise UserError(f"{schedule.name} has rows({len(schedule.order)}) != ranks({schedule.ranks})")
    places, holders = _places(schedule)
    for action, place in places.items():
        whole = Action(action.stage, "B", action.microbatch)
        if action.kind in ("I", "W") and whole in places:
            rule = "a backward is either whole (B) or in two parts (I and W)"
            _refuse(schedule, f"{_at(action, place)} comes beside {_at(whole, places[whole])}: {rule}", place)
    _refuse_lacking(schedule, places, holders)
    made = {result(action): (place, action) for action, place in places.items()}
    for action, place in places.items():
        for other, source in (made[need] for need in needs(action, schedule.num_stages)):
            if other[0] == place[0] and other[1] > place[1]:
                found = f"needs {source}, which comes later, at {_where(other)}"
                _refuse(schedule, f"{_at(action, place)} {found}", place)
    if circle := walk(schedule, lambda rank, action, needed: None):
        grid = draw_grid(schedule.order, [places[each.action] for each in circle])
        raise UserError(f"{tell_deadlock(schedule, circle)}\n{grid}")


def _places(schedule: Schedule) -> tuple[dict[Action, Place], dict[int, int]]:
    """Return where each action stands, and the rank that holds each stage."""
    places: dict[Action, Place] = {}
    holders: dict[int, int] = {}
    for rank, row in enumerate(schedule.order):
        for step, action in enumerate(row):
            if action is None:
                continue
            at, found = _at(action, (rank, step)), None
            if action.stage >= schedule.num_stages:
                found = f"{at} has stage({action.stage}) >= stages({schedule.num_stages})"
            elif action.microbatch >= schedule.microbatches:
                found = f"{at} has microbatch({action.microbatch}) >= microbatches({schedule.microbatches})"
            elif action in places:
                found = f"{action} comes twice, at {_where(places[action])} and at {_where((rank, step))}"
            elif (holder := holders.setdefault(action.stage, rank)) != rank:
                found = f"{at}: rank {holder} has stage {action.stage} too, and a stage lies on one rank"
            if found:
                _refuse(schedule, found, (rank, step))
            places[action] = rank, step
    return places, holders


def _refuse_lacking(schedule: Schedule, places: dict[Action, Place], holders: dict[int, int]) -> None:
    parts: tuple[ActionKind, ...] = ("I", "W")
    for stage, microbatch in product(range(schedule.num_stages), range(schedule.microbatches)):
        is_split = any(Action(stage, kind, microbatch) in places for kind in parts)
        kinds: tuple[ActionKind, ...] = ("F", *parts) if is_split else ("F", "B")
        for action in (Action(stage, kind, microbatch) for kind in kinds):
            if action not in places:
                rank = holders.get(stage, stage % schedule.ranks)
                order = tuple((*row, action) if at == rank else row for at, row in enumerate(schedule.order))
                all_of_it = f"stages({schedule.num_stages}) x microbatches({schedule.microbatches})"
                rule = f"{all_of_it} each need F and B, or F, I and W"
                _refuse(schedule, f"{action} lacks on rank {rank}: {rule}", (rank, len(order[rank]) - 1), order=order)


def _refuse(schedule: Schedule, sentence: str, marked: Place, order: Order | None = None) -> NoReturn:
    raise UserError(f"{schedule.name}: {sentence}\n{draw_grid(order or schedule.order, [marked])}")


def _where(place: Place) -> str:
    return f"rank {place[0]}, step {place[1]}"


def _at(action: Action, place: Place) -> str:
    return f"{action} at {_where(place)}"


def draw_grid(order: Order, marked: Sequence[Place]) -> str:
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
