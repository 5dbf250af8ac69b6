"""What the records of context-parallel steps tell: who attends how, what attention sends, and what is exposed. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from bench.results.records import Record
from bench.text import UserError
from reports.breakdown import by_axis
from reports.summary import Row

_RINGS = ("ring", "striped", "zigzag")
_GRADIENTS = "dp"


class Hop(msgspec.Struct, frozen=True, kw_only=True, rename={"num_bytes": "bytes"}):
    """One communication of attention in a step: ``count`` times ``num_bytes``, exposed on the rank with most of it."""

    direction: str
    step: int
    what: str
    num_bytes: int
    count: int
    comm_seconds: float
    exposed_seconds: float
    wait_seconds: float
    pairs_by_rank: tuple[int, ...] = ()


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a record says of its attention as a whole; None is unknown."""

    method: str
    mask: str
    sequence: int
    tokens_per_rank: int
    axes: dict[str, dict[str, int]]
    crossover_ranks: float | None = None
    attention_steps: tuple[Hop, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Context:
    """A context-parallel step's row with what its first telling launch adds."""

    row: Row
    facts: Facts

    @property
    def ranks(self) -> int:
        """The ranks that share a sequence."""
        return self.facts.sequence // self.facts.tokens_per_rank

    @property
    def method(self) -> str:
        """The method; of usp with the ranks that share heads."""
        heads = self.facts.axes.get("ulysses", {}).get("ranks")
        return self.facts.method if heads is None else f"{self.facts.method} ulysses={heads}"

    @property
    def is_ring(self) -> bool:
        """Whether keys and values go round all ranks."""
        return self.facts.method in _RINGS

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that attention communicates on, which gradients do not."""
        return tuple(axis for axis in self.facts.axes if axis != _GRADIENTS)

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
    return tuple(found for row in rows if isinstance(found := _tried(row), Context))


def unreadable_contexts(rows: Iterable[Row]) -> tuple[str, ...]:
    """Return why the facts of context-parallel rows cannot be read, a sentence each."""
    return tuple(f"No context facts: {found}." for row in rows if isinstance(found := _tried(row), UserError))


def read_context(row: Row) -> Context | None:
    """Return a row's context-parallel step, None if it is none; ``UserError`` if its facts contradict themselves.

    The first launch that tells its attention step by step tells it all, else the first that tells anything.
    """
    telling = [record for record in row.measured if isinstance(record.details.get("attention_bytes"), Mapping)]
    if not telling:
        return None
    record = next((one for one in telling if one.details.get("attention_steps")), telling[0])
    return Context(row=row, facts=_facts(row, record))


def hops(found: Iterable[Context]) -> tuple[Hopped, ...]:
    """Return each communication of each step in order."""
    return tuple(Hopped(context=one, hop=hop) for one in found for hop in one.facts.attention_steps)


def _facts(row: Row, record: Record) -> Facts:
    try:
        facts = msgspec.convert(record.details, Facts)
    except msgspec.ValidationError as error:
        raise UserError(f"the attention of {row.case.label} is not as it should be: {error}") from error
    if facts.tokens_per_rank < 1 or facts.sequence % facts.tokens_per_rank:
        both = f"sequence({facts.sequence}) % tokens_per_rank({facts.tokens_per_rank}) != 0"
        raise UserError(f"the attention of {row.case.label} is not as it should be: {both}")
    return facts


def _tried(row: Row) -> Context | UserError | None:
    try:
        return read_context(row)
    except UserError as error:
        return error
