"""What the records of expert-parallel steps tell: scope, routing, and the loads of experts and ranks. Pure."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from parbench.bench.results.details import ExpertLoadDetails, MeshDetails, read_details
from parbench.reports.analysis.frame import group_rows
from parbench.reports.analysis.summary import Row, readable


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """An expert-parallel step's row with what its first telling repetition adds; ``capacity`` None drops nothing."""

    row: Row
    facts: ExpertLoadDetails
    ep: int
    scope: str
    routing: str
    capacity: float | None
    variant: str

    @property
    def experts(self) -> int:
        return len(self.facts.expert_load[0])

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers to show: the first alone where all are alike, as generators make them."""
        both = list(zip(self.facts.expert_load, self.facts.rank_load, strict=True))
        return (0,) if all(layer == both[0] for layer in both) else tuple(range(len(both)))


@dataclass(frozen=True, kw_only=True)
class Share:
    """A rank's experts in one layer: how many tokens chose each, and the pairs kept, over all copies of the experts."""

    mixture: Mixture
    layer: int
    rank: int
    first_expert: int
    chosen: Sequence[int]
    kept: int

    @property
    def of_mean(self) -> float | None:
        total = sum(self.mixture.facts.expert_load[self.layer])
        return sum(self.chosen) * self.mixture.ep / total if total else None


def read_mixture(row: Row) -> Mixture | str | None:
    """Return a row's mixture, None if it tells no loads; why its facts cannot be read, if they cannot."""
    if not (
        record := next((one for one in row.measured if ExpertLoadDetails.key in one.details), None)
    ):
        return None
    facts, mesh = read_details(record, ExpertLoadDetails), read_details(record, MeshDetails)
    if not isinstance(facts, ExpertLoadDetails):
        return facts
    if isinstance(mesh, str):
        return mesh
    ep = mesh.axes.get("ep", {}).get("ranks", 1) if mesh else 1
    for name, loads in (("experts", facts.expert_load), ("ranks", facts.rank_load)):
        if ep < 1 or len(loads[0]) % ep:
            return f"{row.case.label}: its loads cannot be read: {name}({len(loads[0])}) % ep({ep}) != 0."
    params, capacity = row.case.params, row.case.params.get("capacity")
    return Mixture(
        row=row,
        facts=facts,
        ep=ep,
        scope=row.case.short_name,
        routing=str(params.get("routing", "")),
        capacity=float(capacity) if isinstance(capacity, int | float) and capacity else None,
        variant=str(params.get("variant", "")),
    )


mixtures: Callable[[Iterable[Row]], tuple[Mixture, ...]] = partial(readable, read=read_mixture)


def distinct(found: Iterable[Mixture]) -> tuple[Mixture, ...]:
    """Return the first mixture of each scope, model and routing: capacity and the way there change no choices."""
    groups = group_rows(found, lambda one: one.row.case, without=("capacity", "variant"))
    return tuple(group[0] for group in groups)


def shares(found: Iterable[Mixture]) -> tuple[Share, ...]:
    made, places = (
        [],
        [(one, layer, rank) for one in found for layer in one.layers for rank in range(one.ep)],
    )
    for one, layer, rank in places:
        first, last = (place * one.experts // one.ep for place in (rank, rank + 1))
        chosen, kept = (
            one.facts.expert_load[layer][first:last],
            sum(one.facts.rank_load[layer][rank :: one.ep]),
        )
        made.append(
            Share(mixture=one, layer=layer, rank=rank, first_expert=first, chosen=chosen, kept=kept)
        )
    return tuple(made)
