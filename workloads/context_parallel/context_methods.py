"""All methods of context parallelism. To add one, add it to ``_ALL_METHODS``. Pure.

A method is an order of tokens, a way to reach the keys of other parts of the sequence, and a number
of ranks that exchange tokens for heads within a part. A part is contiguous, or in a zigzag it is
two chunks, one from the front and one from the back, so that all parts have about as much work.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from parbench.bench.plan.params import Param, choice
from parbench.bench.text import UserError, format_choices
from parbench.workloads.context_parallel.attention_calls import (
    Calls,
    list_gather_calls,
    list_head_calls,
    list_ring_calls,
)
from parbench.workloads.model.shapes import Shape


@dataclass(frozen=True, kw_only=True, eq=False)
class ContextMethod:
    """A way to compute attention over a sequence that several ranks share."""

    name: str
    is_zigzag: bool = False
    keys: Literal["ring", "gather", "local"] = "ring"
    """The way in which queries reach the keys of other parts. ``local`` means a single part."""
    head_axis: str = "cp"
    """The name of the axis on which ranks exchange tokens for heads."""
    part_axis: str = "cp"
    """The name of the axis on which ranks exchange keys and values of parts."""

    @property
    def is_ring(self) -> bool:
        """True if ranks send directly to each other, which gloo cannot do with CUDA tensors."""
        return self.keys == "ring"

    @property
    def hides_communication(self) -> bool:
        """True if all communication runs during the computation of another block."""
        return self.is_ring and self.head_axis == self.part_axis

    def compute_ulysses(self, ranks: int, requested: int) -> int:
        """Return the number of ranks that exchange tokens for heads. 0 requests the default."""
        if self.keys == "local":
            return ranks
        if self.head_axis == self.part_axis:
            return 1
        return requested or max(1, ranks // 2)

    def list_calls(self, shape: Shape, ranks: int, ulysses: int) -> Calls:
        """Return the communication of one layer and microbatch on ``ranks`` ranks."""
        calls: Calls = ()
        if ulysses > 1:
            calls = list_head_calls(shape, self.head_axis, ulysses)
        if self.keys == "local":
            return calls
        list_key_calls = list_ring_calls if self.is_ring else list_gather_calls
        return (*calls, *list_key_calls(shape, self.part_axis, ranks // ulysses))

    def list_axis_groups(self, ranks: Sequence[int], ulysses: int) -> dict[str, list[list[int]]]:
        """Return the groups of ranks within one ``cp`` group, keyed by axis of attention.

        ``ulysses`` is the number of ranks that exchange heads.
        """
        if self.head_axis == self.part_axis:
            return {self.part_axis: [list(ranks)]}
        rows = [list(ranks[start : start + ulysses]) for start in range(0, len(ranks), ulysses)]
        columns = [list(ranks[offset::ulysses]) for offset in range(ulysses)]
        return {self.head_axis: rows, self.part_axis: columns}

    def find_broken_rule(self, shape: Shape, *, ranks: int, ulysses: int = 0, tp: int = 1) -> str:
        """Return the equation that a shape or the ranks do not satisfy, otherwise empty.

        ``ulysses`` 0 means the default. ``tp`` is the number of ranks that split the heads first.
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
        if shape.sequence % ranks:
            return f"sequence({shape.sequence}) % cp({ranks}) != 0"
        parts = ranks // head_ranks
        if self.is_zigzag and shape.sequence % (2 * parts):
            divisor = f"(2 * {self.part_axis}({parts}))"
            reason = f"{self.name} gives each rank 2 chunks"
            return f"sequence({shape.sequence}) % {divisor} != 0: {reason}"
        return ""


_ALL_METHODS = (
    # Liu et al., arXiv 2310.01889
    ContextMethod(name="ring"),
    ContextMethod(name="zigzag", is_zigzag=True),
    # Llama 3, arXiv 2407.21783, section 3.3.2
    ContextMethod(name="allgather_kv", is_zigzag=True, keys="gather"),
    # DeepSpeed-Ulysses, arXiv 2309.14509
    ContextMethod(name="ulysses", keys="local"),
    # Ulysses within a ring, arXiv 2405.07719
    ContextMethod(name="usp", is_zigzag=True, head_axis="ulysses", part_axis="ring"),
)
CONTEXT_METHODS: Mapping[str, ContextMethod] = {method.name: method for method in _ALL_METHODS}

CP_METHOD = choice("cp_method", "context-parallel algorithm", *CONTEXT_METHODS)
ULYSSES = Param(
    name="ulysses",
    kind="int",
    default=0,
    minimum=0,
    optional=True,
    help="ranks that share heads, in usp; 0 = half",
)


def find_context_method(name: str) -> ContextMethod:
    """Return the method with a name. Raises ``UserError`` with the allowed names."""
    if name not in CONTEXT_METHODS:
        allowed = format_choices(tuple(CONTEXT_METHODS), name)
        raise UserError(f"cp_method({name}) is not {allowed}")
    return CONTEXT_METHODS[name]
