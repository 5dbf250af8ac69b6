"""The token dispatchers: how tokens reach the ranks of their experts and return. Pure.

To add a dispatcher, add its calls to ``DISPATCHERS`` and its exchange to ``dispatch.py``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

COUNT_BYTES = 8
"""Bytes of a number of tokens, int64."""
INDEX_BYTES = 4
"""Bytes of the index of an expert, int32."""

Direction = Literal["to_experts", "from_experts"]
"""``to_experts`` dispatches tokens, and gradients of results. ``from_experts`` returns results."""


@dataclass(frozen=True, kw_only=True)
class DispatchCall:
    """A collective of one layer and microbatch, for balanced routing.

    ``size`` is the text of an equation whose symbols are keys of ``RankView.symbols``.
    """

    op: str
    direction: Direction
    size: str  # bytes as nccl-tests counts them
    purpose: str  # what is sent
    forward: int  # calls in a forward pass
    backward: int  # calls in a backward pass
    depends_on_routing: bool = False  # True if the number of rows depends on the routing
    ends_forward: bool = False
    """True if no saved tensor of the routed experts depends on the result of the call."""

    def is_recomputed(self, has_shared_experts: bool) -> bool:
        """Return True if full checkpointing repeats the call. It stops at the last saved tensor."""
        return has_shared_experts or not self.ends_forward


def list_all_to_all_calls(tokens: str, ranks: str) -> tuple[DispatchCall, ...]:
    """Return uneven exchanges with a row for each pair of token and expert (arXiv 2006.16668)."""
    rows = f"{tokens} * top_k * hidden * bytes_per_element"
    return (
        DispatchCall(
            op="all_to_all",
            direction="to_experts",
            size=f"experts * {COUNT_BYTES}",
            purpose="rows of each expert",
            forward=1,
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


def list_allgather_calls(tokens: str, ranks: str) -> tuple[DispatchCall, ...]:
    """Return the gathers of all tokens and the sums of results, as in Megatron Core's AllGather."""
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


DISPATCHERS: Mapping[str, Callable[[str, str], tuple[DispatchCall, ...]]] = {
    "all_to_all": list_all_to_all_calls,
    "allgather": list_allgather_calls,
}
"""The function that lists the calls of a dispatcher, by its name.

Its arguments are the number of tokens of a rank and the number of ranks, as texts of equations.
"""
