"""Routing against capacity, one atlas for each scope: what a way of routing costs, and how much of it drops. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from reports import cells
from reports.columns import Column, figure, known, words
from reports.labels import differences
from reports.parallel.experts import Mixture

# what an atlas lays out on its two sides: the rest is the model, and the way that tokens take
_SIDES = ("routing", "capacity", "ep")

Place = tuple[float | None, int]
"""Capacity (None is dropless) and expert-parallel ranks."""


@dataclass(frozen=True, kw_only=True)
class Atlas:
    """The steps of one scope and model by routing and place; cases that did not run are not among them."""

    title: str
    scope: str
    routings: tuple[str, ...]
    places: tuple[Place, ...]
    cells: Mapping[tuple[str, Place], Mixture]

    def value(self, routing: str, place: Place, name: str) -> float | None:
        """Return a metric of a cell; ``time`` is its headline."""
        one = self.cells.get((routing, place))
        return None if one is None else one.row.value(one.row.headline if name == "time" else name)

    def name_of(self, place: Place) -> str:
        """Return a place's capacity, with its ranks where places differ in them."""
        capacity, ep = place
        told = "dropless" if capacity is None else f"capacity {capacity:g}"
        return told if len({ranks for _, ranks in self.places}) == 1 else f"{told}, EP {ep}"


def atlases(found: Sequence[Mixture]) -> tuple[Atlas, ...]:
    """Return an atlas for each scope and model that was measured under two routings."""
    groups: dict[object, list[Mixture]] = {}
    for one in found:
        groups.setdefault(_group(one), []).append(one)
    models = differences([one.row for one in found], _SIDES)
    made = [_atlas(group, models[group[0].row.case.id]) for group in groups.values()]
    return tuple(one for one in made if len(one.routings) > 1)


def atlas_columns(atlas: Atlas) -> tuple[Column[str], ...]:
    """Return the columns of an atlas, whose rows are its routings: time, slow-down and drop rate of each place."""
    kinds = [column for place in atlas.places for column in _of_place(atlas, place)]
    return (words("routing", cells.visible, "how experts are chosen"), *known(kinds, atlas.routings))


def _atlas(group: Sequence[Mixture], model: str) -> Atlas:
    told = f", {model}" if model else ""
    return Atlas(
        title=f"Routing x capacity: {group[0].scope}{told}",
        scope=group[0].scope,
        routings=tuple(dict.fromkeys(one.routing for one in group)),
        places=tuple(sorted({_place(one) for one in group}, key=lambda place: (place[1], place[0] or 0.0))),
        cells={(one.routing, _place(one)): one for one in group},
    )


def _group(one: Mixture) -> object:
    model = {name: value for name, value in one.row.case.params.items() if name not in _SIDES}
    return one.scope, one.row.world.size, one.row.world.nodes, tuple(sorted(model.items()))


def _place(one: Mixture) -> Place:
    return one.capacity, one.ep


def _of_place(atlas: Atlas, place: Place) -> tuple[Column[str], ...]:
    name = atlas.name_of(place)

    def time(routing: str) -> str:
        one = atlas.cells.get((routing, place))
        return cells.UNKNOWN if one is None else cells.measured(one.row.metrics.get(one.row.headline))

    def value(metric: str) -> Callable[[str], float | None]:
        return lambda routing: atlas.value(routing, place, metric)

    slow_help = f"{name}: the step over the same under balanced routes, in turns"
    return (
        Column(title=f"{name}: time", text=time, sort=value("time"), help=f"{name}: median with its 95 % interval"),
        figure(f"{name}: slow-down", value("imbalance_slowdown"), cells.formatted("{:.2f}x"), slow_help, 1),
        figure(f"{name}: dropped", value("drop_rate"), cells.percent, f"{name}: pairs dropped over pairs routed", 2),
    )
