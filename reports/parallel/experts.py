"""What the records of expert-parallel steps tell: scope, routing, and the loads of experts and ranks. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from bench.results.records import Record
from bench.text import UserError
from reports.summary import Row

Loads = tuple[tuple[int, ...], ...]
_DROPLESS = 0.0
_AFTER_CHOICE = ("capacity", "variant", "chunks")


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a record says of its loads: tokens that chose each expert, and pairs that each rank got, by layer."""

    expert_load: Loads
    rank_load: Loads
    axes: dict[str, dict[str, int]] = {}


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """An expert-parallel step's row with what its first telling launch adds; ``capacity`` None drops nothing."""

    row: Row
    facts: Facts
    scope: str
    routing: str
    capacity: float | None
    variant: str

    @property
    def ep(self) -> int:
        """The ranks that experts are dealt out to."""
        return self.facts.axes.get("ep", {}).get("ranks", 1)

    @property
    def experts(self) -> int:
        """Routed experts of a layer."""
        return len(self.facts.expert_load[0])

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers to show: the first alone where all are alike, as generators make them."""
        both = list(zip(self.facts.expert_load, self.facts.rank_load, strict=True))
        return (0,) if all(layer == both[0] for layer in both) else tuple(range(len(both)))

    @property
    def claim(self) -> str:
        """What the scope may be used to claim, empty if the row does not say."""
        return next((note for note in self.row.notes if note.startswith(f"{self.scope}:")), "")


@dataclass(frozen=True, kw_only=True)
class Share:
    """A rank's experts in one layer: how many tokens chose each, and the pairs kept, over all copies of the experts."""

    mixture: Mixture
    layer: int
    rank: int
    first_expert: int
    chosen: tuple[int, ...]
    kept: int

    @property
    def of_mean(self) -> float | None:
        """The rank's tokens over an even share."""
        total = sum(self.mixture.facts.expert_load[self.layer])
        return sum(self.chosen) * self.mixture.ep / total if total else None


def mixtures(rows: Iterable[Row]) -> tuple[Mixture, ...]:
    """Return the rows that are expert-parallel steps and whose facts can be read."""
    return tuple(found for row in rows if isinstance(found := _tried(row), Mixture))


def unreadable_mixtures(rows: Iterable[Row]) -> tuple[str, ...]:
    """Return why the facts of expert-parallel rows cannot be read, a sentence each."""
    return tuple(f"No expert facts: {found}." for row in rows if isinstance(found := _tried(row), UserError))


def read_mixture(row: Row) -> Mixture | None:
    """Return a row's mixture, None if it tells no loads; ``UserError`` if its facts contradict themselves."""
    record = next((one for one in row.measured if "expert_load" in one.details), None)
    if record is None:
        return None
    params = row.case.params
    capacity = params.get("capacity")
    return Mixture(
        row=row,
        facts=_facts(row, record),
        scope=row.case.name.partition(".")[2] or row.case.name,
        routing=str(params.get("routing", "")),
        capacity=float(capacity) if isinstance(capacity, int | float) and capacity != _DROPLESS else None,
        variant=str(params.get("variant", "")),
    )


def distinct(found: Iterable[Mixture]) -> tuple[Mixture, ...]:
    """Return the first mixture of each scope, model and routing: capacity and the way there change no choices."""
    firsts: dict[object, Mixture] = {}
    for one in found:
        chosen_by = {name: value for name, value in one.row.case.params.items() if name not in _AFTER_CHOICE}
        firsts.setdefault((one.scope, tuple(sorted(chosen_by.items()))), one)
    return tuple(firsts.values())


def shares(found: Iterable[Mixture]) -> tuple[Share, ...]:
    """Return every rank's experts of each mixture, layer by layer."""
    return tuple(_share(one, layer, rank) for one in found for layer in one.layers for rank in range(one.ep))


def _share(one: Mixture, layer: int, rank: int) -> Share:
    each = one.experts // one.ep
    chosen = one.facts.expert_load[layer][rank * each : (rank + 1) * each]
    kept = sum(one.facts.rank_load[layer][rank :: one.ep])
    return Share(mixture=one, layer=layer, rank=rank, first_expert=rank * each, chosen=chosen, kept=kept)


def _facts(row: Row, record: Record) -> Facts:
    try:
        facts = msgspec.convert(record.details, Facts)
        _check(facts)
    except ValueError as error:
        raise UserError(f"the experts of {row.case.label} are not as they should be: {error}") from error
    return facts


def _check(facts: Facts) -> None:
    """Refuse loads that cannot be of one model; ``UserError`` by equation."""
    ep = facts.axes.get("ep", {}).get("ranks", 1)
    if ep < 1:
        raise UserError(f"ep({ep}) < 1")
    layers = (len(facts.expert_load), len(facts.rank_load))
    if layers[0] != layers[1] or not layers[0]:
        raise UserError(f"layers of expert_load({layers[0]}) != layers of rank_load({layers[1]}), or there are none")
    for name, loads in (("experts", facts.expert_load), ("ranks", facts.rank_load)):
        for load in loads:
            if len(load) != len(loads[0]) or not load or len(load) % ep:
                raise UserError(f"{name}({len(load)}) % ep({ep}) != 0, or layers differ in them")


def _tried(row: Row) -> Mixture | UserError | None:
    try:
        return read_mixture(row)
    except UserError as error:
        return error
