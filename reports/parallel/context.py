"""What the records of context-parallel steps tell: who attends how, what attention sends, and what is exposed. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bench.results.details import Attention, AttentionSteps, Hop, Mesh, read
from reports.breakdown import by_axis
from reports.summary import Row, readable

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
