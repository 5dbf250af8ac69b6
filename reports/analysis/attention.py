"""What the records of context-parallel steps tell: who attends how, and what attention sends. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

from parbench.bench.results.details import AttentionDetails, MeshDetails, read_details
from parbench.bench.results.formatting import format_quantity
from parbench.reports.analysis.frame import group_rows
from parbench.reports.analysis.labels import differences
from parbench.reports.analysis.steps import furthest_from_one, share_of_traced, total
from parbench.reports.analysis.summary import Row, readable


@dataclass(frozen=True, kw_only=True)
class Context:
    """A context-parallel step's row with what its first telling repetition adds."""

    row: Row
    facts: AttentionDetails
    mesh: Mapping[str, Mapping[str, int]]

    @property
    def ranks(self) -> int:
        return self.facts.sequence // self.facts.tokens_per_rank

    @property
    def method(self) -> str:
        """The method; of usp with the ranks that share heads."""
        heads = self.mesh.get("ulysses", {}).get("ranks")
        return self.facts.method if heads is None else f"{self.facts.method} ulysses={heads}"

    @property
    def is_ring(self) -> bool:
        return self.facts.method in ("ring", "zigzag")

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that attention communicates on, which gradients do not."""
        return tuple(axis for axis in self.mesh if axis != "dp")

    def _by_axis(self, metric: str, direction: str = "") -> dict[str, float | None]:
        return {
            axis: self.row.value(f"{metric}.{axis}{f'.{direction}' * bool(direction)}")
            for axis in self.axes
        }

    def sent_bytes(self, direction: str = "") -> float | None:
        """Return what a rank's attention sends in a step, or ``forward`` or ``backward`` in a microbatch."""
        return total(self._by_axis("bytes_sent", direction).values())

    def bytes_ratio(self, direction: str = "") -> float | None:
        """Return bytes sent over the closed form's on the axis where they differ most; None if all are unknown."""
        found = furthest_from_one(self._by_axis("bytes_ratio", direction))
        return found[1] if found else None

    @property
    def exposed_share(self) -> float | None:
        """The share of the traced step in which attention's communication is exposed."""
        return share_of_traced(self.row, total(self._by_axis("exposed_comm").values()))


def read_context(row: Row) -> Context | str | None:
    """Return the step, None if it is none; why its facts cannot be read, if they cannot."""
    record = next(
        (record for record in row.measured if AttentionDetails.key in record.details), None
    )
    if record is None:
        return None
    facts, mesh = read_details(record, AttentionDetails), read_details(record, MeshDetails)
    for one in (facts, mesh):
        if isinstance(one, str):
            return one
    if not isinstance(facts, AttentionDetails) or not isinstance(mesh, MeshDetails):
        return None
    return Context(row=row, facts=facts, mesh=mesh.axes)


contexts: Callable[[Iterable[Row]], tuple[Context, ...]] = partial(readable, read=read_context)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Steps of one model by several methods; ``crossover`` is a sentence, empty if unknown."""

    title: str
    contexts: tuple[Context, ...]
    crossover: str

    @property
    def lines(self) -> dict[str, tuple[Context, ...]]:
        """The steps of each method, the shortest sequence first."""
        ordered = sorted(self.contexts, key=lambda one: one.facts.sequence)
        methods = dict.fromkeys(one.method for one in self.contexts)
        return {name: tuple(one for one in ordered if one.method == name) for name in methods}


# what says how attention is shared out, and over what: the rest is the model
OF_METHOD = ("cp_method", "ulysses", "sequence")


def compared(found: Sequence[Context]) -> tuple[Comparison, ...]:
    """Return the steps of each model and number of ranks that ran with two methods or more."""
    groups = group_rows(
        found,
        lambda one: one.row.case,
        without=OF_METHOD,
        by=lambda one: (one.ranks, one.row.world),
    )
    models = differences([one.row for one in found], OF_METHOD)
    comparisons = []
    for group in groups:
        first = group[0]
        if len({one.method for one in group}) > 1:
            model = models[first.row.case.id]
            title = f"Methods compared: cp = {first.ranks}{model and f', {model}'}"
            comparisons.append(
                Comparison(title=title, contexts=tuple(group), crossover=crossover(group))
            )
    return tuple(comparisons)


def crossover(found: Sequence[Context]) -> str:
    """Return above how many ranks Ulysses sends less than a ring, and what these ranks sent; empty if unknown."""
    known = [(at, one.ranks) for one in found if (at := one.facts.crossover_ranks) is not None]
    if not known:
        return ""
    at, ranks = known[0]
    here = "as much" if ranks == at else "less" if ranks > at else "more"
    counted = ""
    for one, other in product(found, found):
        sent, round_ = one.sent_bytes("forward"), other.sent_bytes("forward")
        alike = (
            one.facts.method == "ulysses"
            and other.is_ring
            and one.facts.sequence == other.facts.sequence
        )
        if alike and not counted and sent is not None and round_ is not None:
            both = f"{format_quantity(sent, 'B')} beside {other.method}'s {format_quantity(round_, 'B')}"
            counted = f" (counted at sequence {one.facts.sequence}: {both} a microbatch)"
    rule = f"Forward, Ulysses sends less than a ring above 1 + 1/g = {at:.4g} ranks, g = kv_heads / heads"
    return f"{rule}: {here} on cp = {ranks}{counted}."
