"""All methods of context parallelism. To add one, add it to ``_ALL_METHODS``. Pure.

A method is an order of tokens, a way to reach the keys of other parts of the sequence, and a number
of ranks that exchange tokens for heads within a part.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from parbench.bench.plan.params import Param, choice
from parbench.bench.text import UserError, format_choices
from parbench.workloads.context_parallel.key_exchange import (
    ALL_GATHER,
    LOCAL,
    RING,
    AttentionCall,
    KeyExchange,
    list_head_calls,
)
from parbench.workloads.model.shapes import Shape


def list_contiguous_tokens(sequence: int, part: int, parts: int) -> list[int]:
    size = sequence // parts
    return list(range(part * size, (part + 1) * size))


def list_striped_tokens(sequence: int, part: int, parts: int) -> list[int]:
    return list(range(part, sequence, parts))


def list_zigzag_tokens(sequence: int, part: int, parts: int) -> list[int]:
    """Return a chunk from the front and its mirror image from the back, of 2 chunks per part."""
    chunks = 2 * parts
    tokens = []
    for chunk in (part, chunks - 1 - part):
        tokens += list_contiguous_tokens(sequence, chunk, chunks)
    return tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenOrder:
    """The distribution of the tokens of a sequence over parts."""

    name: str
    list_tokens: Callable[[int, int, int], list[int]]
    """The ascending positions of a part, of (sequence, part, parts)."""
    chunks_per_part: int = 1
    is_balanced: bool = True
    """True if all parts have about as much work under a causal mask."""

    def find_broken_rule(self, sequence: int, parts: int, axis: str) -> str:
        """Return the equation that a sequence does not satisfy, empty if its parts are equal."""
        chunks = self.chunks_per_part
        if sequence % (chunks * parts) == 0:
            return ""
        if chunks == 1:
            return f"sequence({sequence}) % {axis}({parts}) != 0"
        reason = f"{self.name} gives each rank {chunks} chunks"
        return f"sequence({sequence}) % ({chunks} * {axis}({parts})) != 0: {reason}"


CONTIGUOUS = TokenOrder(name="contiguous", list_tokens=list_contiguous_tokens, is_balanced=False)
STRIPED = TokenOrder(name="striped", list_tokens=list_striped_tokens)
ZIGZAG = TokenOrder(name="zigzag", list_tokens=list_zigzag_tokens, chunks_per_part=2)


@dataclass(frozen=True, kw_only=True, eq=False)
class ContextMethod:
    """A way to compute attention over a sequence that several ranks share."""

    name: str
    label: str
    source: str
    order: TokenOrder
    keys: KeyExchange = RING
    compute_ulysses: Callable[[int, int], int] = lambda ranks, requested: 1
    """The ranks that exchange tokens for heads, of all ranks and the requested ones (0: default)."""
    head_axis: str = "cp"
    """The name of the axis on which ranks exchange tokens for heads."""
    part_axis: str = "cp"

    @property
    def is_ring(self) -> bool:
        """True if ranks send directly to each other, which gloo cannot do with CUDA tensors."""
        return self.keys is RING

    @property
    def hides_communication(self) -> bool:
        """True if all communication runs during the computation of another block."""
        return self.is_ring and self.head_axis == self.part_axis

    def list_calls(self, shape: Shape, ranks: int, ulysses: int) -> tuple[AttentionCall, ...]:
        """Return the communication of one layer and microbatch on ``ranks`` ranks."""
        calls = self.keys.list_calls(shape, self.part_axis, ranks // ulysses)
        if ulysses > 1:
            calls = (*list_head_calls(shape, self.head_axis, ulysses), *calls)
        return calls

    def list_axis_groups(self, ranks: Sequence[int], ulysses: int) -> dict[str, list[list[int]]]:
        """Return the groups of each axis of attention within the ranks of one cp group."""
        if self.head_axis == self.part_axis:
            return {self.part_axis: [list(ranks)]}
        rows = [list(ranks[start : start + ulysses]) for start in range(0, len(ranks), ulysses)]
        columns = [list(ranks[offset::ulysses]) for offset in range(ulysses)]
        return {self.head_axis: rows, self.part_axis: columns}

    def find_broken_rule(self, shape: Shape, *, ranks: int, ulysses: int = 0, tp: int = 1) -> str:
        """Return the equation that a shape or the ranks do not satisfy, otherwise empty.

        0 ``ulysses`` ranks are the default. ``tp`` ranks split the heads before.
        """
        head_ranks = self.compute_ulysses(ranks, ulysses)
        if ulysses not in (0, head_ranks):
            return f"ulysses({ulysses}) != {head_ranks}, which cp_method = {self.name} has"
        if ranks % head_ranks:
            return f"ulysses({head_ranks}) * ring({ranks // head_ranks}) != cp({ranks})"
        for name, heads in (("heads", shape.heads), ("kv_heads", shape.kv_heads)):
            if heads // tp % head_ranks:
                heads_of_rank = f"{name}({heads})" if tp == 1 else f"{name}({heads}) / tp({tp})"
                axis = f"{self.head_axis}({head_ranks})"
                return f"{heads_of_rank} % {axis} != 0: {self.name} distributes heads"
        return CONTIGUOUS.find_broken_rule(shape.sequence, ranks, "cp") or (
            self.order.find_broken_rule(shape.sequence, ranks // head_ranks, self.part_axis)
        )


_ALL_METHODS = (
    ContextMethod(name="ring", label="ring attention", source="arXiv 2310.01889", order=CONTIGUOUS),
    ContextMethod(
        name="striped", label="striped attention", source="arXiv 2311.09431", order=STRIPED
    ),
    ContextMethod(
        name="zigzag",
        label="zigzag ring attention",
        source="arXiv 2310.01889, with the order of arXiv 2407.21783, section 3.3.2",
        order=ZIGZAG,
    ),
    ContextMethod(
        name="allgather_kv",
        label="all-gather of keys and values",
        source="arXiv 2407.21783, section 3.3.2",
        order=ZIGZAG,
        keys=ALL_GATHER,
    ),
    ContextMethod(
        name="ulysses",
        label="DeepSpeed-Ulysses",
        source="arXiv 2309.14509",
        order=CONTIGUOUS,
        keys=LOCAL,
        compute_ulysses=lambda ranks, requested: ranks,
    ),
    ContextMethod(
        name="usp",
        label="USP, Ulysses within a ring",
        source="arXiv 2405.07719",
        order=ZIGZAG,
        compute_ulysses=lambda ranks, requested: requested or max(1, ranks // 2),
        head_axis="ulysses",
        part_axis="ring",
    ),
)
CONTEXT_METHODS: Mapping[str, ContextMethod] = {method.name: method for method in _ALL_METHODS}
MASKS = ("causal", "full")

CP_METHOD = choice("cp_method", "context-parallel algorithm", *CONTEXT_METHODS)
ULYSSES = Param(
    name="ulysses",
    kind="int",
    default=0,
    minimum=0,
    optional=True,
    help="ranks that share heads, in usp; 0 = half",
)
MASK = choice("mask", "keys that a query attends to", *MASKS)


def find_context_method(name: str) -> ContextMethod:
    """Return the method of a name. Raises ``UserError`` with the names that are allowed."""
    if name not in CONTEXT_METHODS:
        allowed = format_choices(tuple(CONTEXT_METHODS), name)
        raise UserError(f"cp_method({name}) is not {allowed}")
    return CONTEXT_METHODS[name]
