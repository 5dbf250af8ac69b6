"""All methods of context parallelism. To add one, add it to ``_ALL_METHODS``. Pure.

A method is an order of tokens, a way to reach the keys of other parts of the sequence, and a number
of ranks that exchange tokens for heads within a part (Ulysses). A part is contiguous, or in a
zigzag it is two chunks, one from the front and one from the back, so that all parts have about as
much work.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from parbench.bench.plan.params import Param, choice
from parbench.bench.text import UserError, format_list
from parbench.workloads.context_parallel.attention_calls import (
    Calls,
    list_gather_calls,
    list_head_calls,
    list_ring_calls,
)
from parbench.workloads.model.shapes import Shape


@dataclass(frozen=True, kw_only=True, eq=False)
class ContextMethod:
    """A method of context parallelism: attention over a sequence that the ranks of ``cp`` share.

    The sequence is split into parts. A part is on one rank, or on several ranks that exchange
    tokens for heads in attention (Ulysses).
    """

    name: str
    """The name that users write as ``cp_method``, such as ``zigzag``."""
    is_zigzag: bool = False
    """True if a part is two ranges of tokens, as far from the sequence's start as from its end."""
    keys: Literal["ring", "gather", "local"] = "ring"
    """The way in which a rank gets the keys and values of other parts.

    ``ring``: they are sent from rank to rank around a ring. ``gather``: each rank all-gathers them.
    ``local``: there is only one part, so that they need not be sent.
    """
    head_axis: str = "cp"
    """The name of the axis on which ranks exchange tokens for heads.

    If it equals ``part_axis``, only one of the two exchanges is used.
    """
    part_axis: str = "cp"
    """The name of the axis on which ranks exchange the keys and values of parts."""

    @property
    def is_ring(self) -> bool:
        """True if keys and values are sent around a ring of ranks.

        Such sends from rank to rank are not possible with gloo and CUDA tensors.
        """
        return self.keys == "ring"

    @property
    def hides_communication(self) -> bool:
        """True if all communication of attention can run during computation on other keys."""
        return self.is_ring and self.head_axis == self.part_axis

    def compute_ulysses(self, ranks: int, requested: int) -> int:
        """Return the number of ranks that exchange tokens for heads (Ulysses), 1 for none.

        ``ranks`` is the size of ``cp``. With the method ``ulysses``, all ranks exchange tokens for
        heads, and the result is ``ranks``. With ``usp``, which also exchanges keys and values, the
        result is ``requested``, the number that the user sets. 0 means half of ``ranks``, at least
        1. With the other methods the result is 1, and ``requested`` has no effect.
        """
        if self.keys == "local":
            return ranks
        if self.head_axis == self.part_axis:
            return 1
        return requested or max(1, ranks // 2)

    def list_calls(self, shape: Shape, ranks: int, ulysses: int) -> Calls:
        """Return the communication calls of one attention layer and microbatch.

        ``ranks`` is the size of ``cp``, and ``ulysses`` the number of ranks that exchange tokens
        for heads.
        """
        calls: Calls = ()
        if ulysses > 1:
            calls = list_head_calls(shape, self.head_axis, ulysses)
        if self.keys == "local":
            return calls
        list_key_calls = list_ring_calls if self.is_ring else list_gather_calls
        return (*calls, *list_key_calls(shape, self.part_axis, ranks // ulysses))

    def list_axis_groups(self, ranks: Sequence[int], ulysses: int) -> dict[str, list[list[int]]]:
        """Return the groups into which one ``cp`` group is split, keyed by name of the axis.

        ``ranks`` are the global ranks of the ``cp`` group in order, and ``ulysses`` is the number
        of ranks that exchange tokens for heads. The keys are ``head_axis`` and ``part_axis``. Each
        value is a list of groups, which together contain all of ``ranks``.
        """
        if self.head_axis == self.part_axis:
            return {self.part_axis: [list(ranks)]}
        rows = [list(ranks[start : start + ulysses]) for start in range(0, len(ranks), ulysses)]
        columns = [list(ranks[offset::ulysses]) for offset in range(ulysses)]
        return {self.head_axis: rows, self.part_axis: columns}

    def find_broken_rule(self, shape: Shape, *, ranks: int, ulysses: int = 0, tp: int = 1) -> str:
        """Return the first reason why the ranks cannot split a model's sequence, empty if they can.

        The text is the violation: ``sequence(100) % cp(3) != 0`` means that 3 ranks cannot share
        100 tokens. ``ranks`` is the size of ``cp``. ``ulysses`` is the number of ranks that
        exchange tokens for heads, 0 for the default of ``compute_ulysses``. ``tp`` is the number of
        ranks that split the heads first.
        """
        head_ranks = self.compute_ulysses(ranks, ulysses)
        if ulysses not in (0, head_ranks):
            text = f"ulysses = {ulysses} is not possible with cp_method = {self.name}"
            return f"{text}: leave it out, or use cp_method=usp"
        if ranks % head_ranks:
            return f"cp({ranks}) % ulysses({head_ranks}) != 0"
        for name, heads in (("heads", shape.heads), ("kv_heads", shape.kv_heads)):
            if heads // tp % head_ranks:
                return f"{name}({heads}) / tp({tp}) % {self.head_axis}({head_ranks}) != 0"
        if shape.sequence % ranks:
            return f"sequence({shape.sequence}) % cp({ranks}) != 0"
        parts = ranks // head_ranks
        if self.is_zigzag and shape.sequence % (2 * parts):
            return f"sequence({shape.sequence}) % (2 * {self.part_axis}({parts})) != 0"
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
"""All methods of context parallelism by name."""

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
    """Return the method of context parallelism with a name.

    Raises ``UserError`` with the allowed names.
    """
    if name not in CONTEXT_METHODS:
        raise UserError(
            f"cp_method = {name!r} is not allowed: choose {format_list(CONTEXT_METHODS)}"
        )
    return CONTEXT_METHODS[name]
