"""The token dispatchers: how tokens reach the ranks of their experts and return. Pure.

To add a dispatcher, add an object to ``_ALL_DISPATCHERS`` and its exchange to ``dispatch.py``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

COUNT_BYTES = 8
"""Bytes of a number of tokens, int64."""
INDEX_BYTES = 4
"""Bytes of the index of an expert, int32."""

Direction = Literal["to_experts", "from_experts"]
"""Calls to experts dispatch tokens and the gradients of their results. The others combine."""


@dataclass(frozen=True, kw_only=True)
class DispatchCall:
    """A collective of one layer and microbatch, for balanced routing.

    ``size`` is the text of an equation with the words of ``costs.step_spec.RankView.symbols``.
    """

    op: str
    direction: Direction
    size: str  # bytes as nccl-tests counts them
    purpose: str  # what is sent
    forward: int  # calls in a forward pass
    backward: int  # calls in a backward pass
    depends_on_routing: bool = False  # ranks send as many rows as their routing requires
    ends_forward: bool = False
    """No saved tensor of the routed experts depends on its result."""

    def is_recomputed(self, has_shared_experts: bool) -> bool:
        """Return whether full checkpointing repeats the call; it stops at the last saved tensor."""
        return has_shared_experts or not self.ends_forward


@dataclass(frozen=True, kw_only=True, eq=False)
class Dispatcher:
    """A way to bring tokens to their experts, and what follows from it."""

    name: str
    label: str
    source: str  # where the method was published
    can_chunk: bool  # parts of a microbatch may be sent during the compute of others
    list_calls: Callable[[str, str, int], tuple[DispatchCall, ...]]
    """The calls for ``tokens`` of each of ``ranks``, both texts of equations, in chunks."""


def list_all_to_all_calls(tokens: str, ranks: str, chunks: int = 1) -> tuple[DispatchCall, ...]:
    """List a row for each pair of token and expert, and the number of rows of each expert."""
    rows = f"{tokens} * top_k * hidden * bytes_per_element"
    return (
        DispatchCall(
            op="all_to_all",
            direction="to_experts",
            size=f"experts * {COUNT_BYTES}",
            purpose="rows of each expert",
            forward=chunks,
            backward=0,
        ),
        DispatchCall(
            op="all_to_all",
            direction="to_experts",
            size=rows,
            purpose="tokens to experts",
            forward=1,
            backward=1,
            depends_on_routing=True,
        ),
        DispatchCall(
            op="all_to_all",
            direction="from_experts",
            size=rows,
            purpose="results of experts",
            forward=1,
            backward=1,
            depends_on_routing=True,
        ),
    )


def list_allgather_calls(tokens: str, ranks: str, chunks: int = 1) -> tuple[DispatchCall, ...]:
    """List all tokens, weights and expert indices of all ranks, and the sums of their results."""
    all_tokens = f"{ranks} * {tokens}"
    rows = f"{all_tokens} * hidden * bytes_per_element"
    weights = f"{all_tokens} * top_k * bytes_per_element"
    return (
        DispatchCall(
            op="all_gather",
            direction="to_experts",
            size=f"{all_tokens} * top_k * {INDEX_BYTES}",
            purpose="expert indices",
            forward=1,
            backward=0,
        ),
        DispatchCall(
            op="all_gather",
            direction="to_experts",
            size=rows,
            purpose="tokens to experts",
            forward=1,
            backward=1,
        ),
        DispatchCall(
            op="all_gather",
            direction="to_experts",
            size=weights,
            purpose="weights of experts",
            forward=1,
            backward=0,
        ),
        DispatchCall(
            op="reduce_scatter",
            direction="from_experts",
            size=rows,
            purpose="results of experts",
            forward=1,
            backward=1,
            ends_forward=True,
        ),
        DispatchCall(
            op="reduce_scatter",
            direction="from_experts",
            size=weights,
            purpose="gradients of weights",
            forward=0,
            backward=1,
        ),
    )


ALL_TO_ALL = Dispatcher(
    name="all_to_all",
    label="uneven all_to_all of the rows of each expert",
    source="arXiv 2006.16668",
    can_chunk=True,
    list_calls=list_all_to_all_calls,
)
ALLGATHER = Dispatcher(
    name="allgather",
    label="all_gather of all tokens, reduce_scatter of results",
    source="Megatron Core, MoEAllGatherTokenDispatcher",
    can_chunk=False,
    list_calls=list_allgather_calls,
)
_ALL_DISPATCHERS = (ALL_TO_ALL, ALLGATHER)
DISPATCHERS = {dispatcher.name: dispatcher for dispatcher in _ALL_DISPATCHERS}
