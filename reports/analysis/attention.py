"""What the records of context-parallel steps tell: who attends how, what attention sends, and what is exposed. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.machine.world_spec import FUNCTIONAL_ONLY
from bench.results.details import Attention, AttentionSteps, Hop, Mesh, read
from bench.results.metrics import MetricValue
from reports import cells
from reports.analysis.labels import differences
from reports.analysis.step_parts import by_axis
from reports.analysis.summary import Row, readable

_RINGS = ("ring", "striped", "zigzag")
_GRADIENTS = "dp"


@dataclass(frozen=True, kw_only=True)
class Context:
    """A context-parallel step's row with what its first telling launch adds."""

    row: Row
    facts: Attention
    mesh: Mapping[str, Mapping[str, int]]
    hops: tuple[Hop, ...]

    @property
    def ranks(self) -> int:
        """The ranks that share a sequence."""
        return self.facts.sequence // self.facts.tokens_per_rank

    @property
    def method(self) -> str:
        """The method; of usp with the ranks that share heads."""
        heads = self.mesh.get("ulysses", {}).get("ranks")
        return self.facts.method if heads is None else f"{self.facts.method} ulysses={heads}"

    @property
    def is_ring(self) -> bool:
        """Whether keys and values go round all ranks."""
        return self.facts.method in _RINGS

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that attention communicates on, which gradients do not."""
        return tuple(axis for axis in self.mesh if axis != _GRADIENTS)

    def sent_bytes(self, direction: str = "") -> float | None:
        """Return what a rank's attention sends in a step, or ``forward`` or ``backward`` in a microbatch."""
        return self._sum("bytes_sent", f".{direction}" if direction else "")

    def bytes_ratio(self, direction: str = "") -> float | None:
        """Return bytes sent over the closed form's on the axis where they differ most; None if all are unknown."""
        suffix = f".{direction}" if direction else ""
        ratios = [self.row.value(f"bytes_ratio.{axis}{suffix}") for axis in self.axes]
        return max((one for one in ratios if one is not None), key=lambda one: abs(one - 1), default=None)

    @property
    def exposed_seconds(self) -> float | None:
        """Attention's communication of the traced step that no computation hides."""
        return self._sum("exposed_comm", "")

    @property
    def exposed_part(self) -> float | None:
        """The transfers' exposed time over what they take alone; above 1 where they are slower beside computation."""
        exposed, alone = self.row.value("attention_exposed"), self.row.value("attention_comm")
        return exposed / alone if exposed is not None and alone else None

    def _sum(self, name: str, suffix: str) -> float | None:
        found = by_axis(self.row, name)
        values = [found.get(f"{axis}{suffix}") for axis in self.axes]
        known = [value for value in values if value is not None]
        return sum(known) if known and len(known) == len(values) else None


@dataclass(frozen=True, kw_only=True)
class Hopped:
    """A hop with the step that it belongs to."""

    context: Context
    hop: Hop


def contexts(rows: Iterable[Row]) -> tuple[Context, ...]:
    """Return the rows that are context-parallel steps and whose facts can be read."""
    return readable(rows, read_context)


def read_context(row: Row) -> Context | str | None:
    """Return a row's context-parallel step, None if it is none; why its facts cannot be read, if they cannot.

    The first launch that tells its attention step by step tells it all, else the first that tells anything.
    """
    telling = [record for record in row.measured if Attention.known_by in record.details]
    if not telling:
        return None
    record = next((one for one in telling if one.details.get(AttentionSteps.known_by)), telling[0])
    facts, mesh, steps = read(record, Attention), read(record, Mesh), read(record, AttentionSteps)
    for one in (facts, mesh, steps):
        if isinstance(one, str):
            return one
    if not isinstance(facts, Attention) or not isinstance(mesh, Mesh):
        return None
    hops = steps.attention_steps if isinstance(steps, AttentionSteps) else ()
    return Context(row=row, facts=facts, mesh=mesh.axes, hops=hops)


def hops(found: Iterable[Context]) -> tuple[Hopped, ...]:
    """Return each communication of each step in order."""
    return tuple(Hopped(context=one, hop=hop) for one in found for hop in one.hops)


# what says how attention is shared out, and over what: the rest is the model
_OF_METHOD = ("method", "ulysses", "sequence", "mask")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Methods for one model under one mask on as many ranks, at one sequence length or at several."""

    title: str
    contexts: tuple[Context, ...]
    sentences: tuple[str, ...]

    @property
    def lines(self) -> dict[str, tuple[Context, ...]]:
        """The steps of each method, by sequence length."""
        methods = dict.fromkeys(one.method for one in self.contexts)
        return {name: tuple(sorted(_of(self.contexts, name), key=_sequence)) for name in methods}


def compared(found: Sequence[Context], notes: Sequence[str] = ()) -> tuple[Comparison, ...]:
    """Return the methods of each model, mask and number of ranks that has two; ``notes`` are the whole run's."""
    groups: dict[object, list[Context]] = {}
    for one in found:
        groups.setdefault(_group(one), []).append(one)
    models = differences([one.row for one in found], _OF_METHOD)
    return tuple(
        _comparison(group, models[group[0].row.case.id], notes)
        for group in groups.values()
        if len({one.method for one in group}) > 1
    )


def verdict(found: Sequence[Context], notes: Sequence[str] = ()) -> str:
    """Return which method of several at one sequence length is the fastest, and whether its interval stands apart."""
    first, *others = sorted((one for one in found if _time(one.row) is not None), key=lambda one: _seconds(one.row))
    where = f"At sequence {first.facts.sequence}, cp = {first.ranks}, {first.facts.mask} mask, on this machine"
    if any(note.startswith(FUNCTIONAL_ONLY) for one in found for note in (*notes, *one.row.notes)):
        return f"{where}: no method is called the fastest, for these steps are {FUNCTIONAL_ONLY}."
    ahead = _seconds(others[0].row) / _seconds(first.row) - 1
    told = f"{first.method} is the fastest of {1 + len(others)}, by {cells.percent(ahead)} before {others[0].method}"
    return f"{where}: {told}{_doubt(first, others)}."


def crossover(found: Sequence[Context]) -> str:
    """Return above how many ranks Ulysses sends less than a ring, and what these ranks sent; empty if unknown."""
    known = next((one for one in found if one.facts.crossover_ranks is not None), None)
    if known is None or known.facts.crossover_ranks is None:
        return ""
    at, ranks = known.facts.crossover_ranks, known.ranks
    here = "as much" if ranks == at else "less" if ranks > at else "more"
    rule = f"Forward, Ulysses sends less than a ring above 1 + 1/g = {at:.4g} ranks, g = kv_heads / heads"
    return f"{rule}: {here} on cp = {ranks}{_counted(found)}."


def _comparison(group: Sequence[Context], model: str, notes: Sequence[str]) -> Comparison:
    facts = group[0].facts
    told = f", {model}" if model else ""
    sentences = [verdict(at, notes) for at in _by_sequence(group) if len({one.method for one in at}) > 1]
    return Comparison(
        title=f"Methods compared: cp = {group[0].ranks}, {facts.mask} mask{told}",
        contexts=tuple(group),
        sentences=tuple(one for one in (*sentences, crossover(group)) if one),
    )


def _group(one: Context) -> object:
    """Return what methods must share to be compared: ranks, mask and the model."""
    model = {name: value for name, value in one.row.case.params.items() if name not in _OF_METHOD}
    world = one.row.world
    return one.row.case.name, one.ranks, world.size, world.nodes, one.facts.mask, tuple(sorted(model.items()))


def _by_sequence(group: Sequence[Context]) -> list[list[Context]]:
    """Return those with a time by sequence length, the shortest first."""
    timed = [one for one in group if _time(one.row) is not None]
    return [[one for one in timed if _sequence(one) == n] for n in sorted({_sequence(one) for one in timed})]


def _counted(found: Sequence[Context]) -> str:
    """Say what Ulysses and a ring of this run sent at the same sequence length, where both are there."""
    for one in found:
        for other in found:
            sent, round_ = one.sent_bytes("forward"), other.sent_bytes("forward")
            alike = _sequence(one) == _sequence(other)
            if one.facts.method == "ulysses" and other.is_ring and alike and sent is not None and round_ is not None:
                both = f"{cells.quantity(sent, 'B')} beside {other.method}'s {cells.quantity(round_, 'B')}"
                return f" (counted at sequence {_sequence(one)}: {both} a microbatch)"
    return ""


def _doubt(first: Context, others: Sequence[Context]) -> str:
    """Say from whom the fastest does not stand apart; empty if its interval ends before all others begin."""
    mine, known = _interval(first), {one.method: _interval(one) for one in others}
    if mine is None or None in known.values():
        return " (an interval is unknown: no difference shown)"
    close = [name for name, found in known.items() if found and found[0] <= mine[1]]
    return f" (its interval overlaps that of {_and(close)}: no difference shown)" if close else ""


def _interval(one: Context) -> tuple[float, float] | None:
    metric = _time(one.row)
    return None if metric is None or metric.low is None or metric.high is None else (metric.low, metric.high)


def _time(row: Row) -> MetricValue | None:
    metric = row.metrics.get(row.headline)
    return metric if metric is not None and metric.value else None


def _seconds(row: Row) -> float:
    metric = _time(row)
    assert metric is not None
    assert metric.value is not None
    return metric.value


def _sequence(one: Context) -> int:
    return one.facts.sequence


def _of(found: Sequence[Context], method: str) -> list[Context]:
    return [one for one in found if one.method == method]


def _and(names: Sequence[str]) -> str:
    return " and ".join((*((", ".join(names[:-1]),) if names[1:] else ()), names[-1]))


_OF_LENGTH = ("method", "ulysses", "mask")


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
        groups.setdefault(_group_of_length(one), []).append(one)
    models = differences([one.row for one in found], (*_OF_LENGTH, "sequence"))
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


def _group_of_length(one: Context) -> object:
    model = {name: value for name, value in one.row.case.params.items() if name not in _OF_LENGTH}
    return one.row.case.name, one.facts.sequence, one.facts.mask, tuple(sorted(model.items()))
