"""Ways to attend against the number of ranks, over several runs: for one model, mask and sequence length. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from reports.labels import differences
from reports.parallel.context import Context

_OF_METHOD = ("method", "ulysses", "mask")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Steps of one model at one sequence length on several numbers of ranks; where a ring and Ulysses send as much."""

    title: str
    contexts: tuple[Context, ...]
    crossover_ranks: float | None

    @property
    def lines(self) -> dict[str, tuple[Context, ...]]:
        """The steps of each method, the fewest ranks first."""
        methods = dict.fromkeys(one.method for one in self.contexts)
        return {name: tuple(one for one in self.contexts if one.method == name) for name in methods}


def sizes(found: Sequence[Context]) -> tuple[Sizes, ...]:
    """Return the steps of each model, mask and length that ran on two numbers of ranks or more."""
    groups: dict[object, list[Context]] = {}
    for one in found:
        groups.setdefault(_group(one), []).append(one)
    models = differences([one.row for one in found], (*_OF_METHOD, "sequence"))
    return tuple(
        _sizes(group, models[group[0].row.case.id])
        for group in groups.values()
        if len({one.ranks for one in group}) > 1
    )


def _sizes(group: Sequence[Context], model: str) -> Sizes:
    facts = group[0].facts
    known = [one.facts.crossover_ranks for one in group if one.facts.crossover_ranks is not None]
    return Sizes(
        title=f"Methods against cp: sequence {facts.sequence}, {facts.mask} mask{f', {model}' if model else ''}",
        contexts=tuple(sorted(group, key=lambda one: one.ranks)),
        crossover_ranks=known[0] if known else None,
    )


def _group(one: Context) -> object:
    model = {name: value for name, value in one.row.case.params.items() if name not in _OF_METHOD}
    return one.row.case.name, one.facts.sequence, one.facts.mask, tuple(sorted(model.items()))
