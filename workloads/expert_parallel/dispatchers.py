"""The token dispatchers: how tokens reach the ranks of their experts and return. Pure.

To add a dispatcher, add its calls to ``DISPATCHERS`` and its exchange to ``dispatch.py``. The calls
are those of one layer and microbatch.
"""

from collections.abc import Callable, Mapping
from functools import partial

from parbench.workloads.model.layer_call import LayerCall

COUNT_BYTES = 8
"""The bytes of one count of tokens, which is sent as int64."""
INDEX_BYTES = 4
"""The bytes of one expert id, which is sent as int32."""
Calls = tuple[LayerCall, ...]
"""The communication of one MoE layer and microbatch.

An element stands for equal calls: the operation, the equation of its bytes, and the numbers of
these calls in the forward and the backward pass.
"""


def list_all_to_all_calls(axis: str, ranks: int, tokens: str) -> Calls:
    """Return the calls of a dispatcher that sends a token to each of its experts by all_to_all.

    ``axis`` is the name of the axis with ``ranks`` ranks. ``tokens`` is an equation, as text, for
    the number of a rank's tokens in a microbatch. The result has three elements: the counts of
    tokens per expert, the tokens, and the results (GShard, arXiv 2006.16668). Each is one
    all_to_all in forward. Tokens and results have one more in backward, for their gradients.
    """
    exchange = partial(LayerCall, axis, ranks, "all_to_all", forward=1)
    rows = f"{tokens} * top_k * hidden * bytes_per_element"
    return (
        exchange(f"experts * {COUNT_BYTES}", "rows of each expert"),
        exchange(rows, "tokens to experts", backward=1, pairs="sent"),
        exchange(rows, "results of experts", backward=1, pairs="received"),
    )


def list_allgather_calls(axis: str, ranks: int, tokens: str) -> Calls:
    """Return the calls of a dispatcher that gathers all tokens on all ranks and sums results.

    ``axis`` is the name of the axis with ``ranks`` ranks. ``tokens`` is an equation, as text, for
    the number of a rank's tokens in a microbatch. Megatron Core has the same dispatcher, AllGather.
    """
    gather = partial(LayerCall, axis, ranks, "all_gather", forward=1)
    scatter = partial(LayerCall, axis, ranks, "reduce_scatter", backward=1)
    all_tokens = f"{axis} * {tokens}"
    rows = f"{all_tokens} * hidden * bytes_per_element"
    weights = f"{all_tokens} * top_k * bytes_per_element"
    return (
        gather(f"{all_tokens} * top_k * {INDEX_BYTES}", "expert indices"),
        gather(rows, "tokens to experts", backward=1),
        gather(weights, "weights of experts"),
        scatter(rows, "results of experts", forward=1, ends_forward=True),
        scatter(weights, "gradients of weights"),
    )


DISPATCHERS: Mapping[str, Callable[[str, int, str], Calls]] = {
    "all_to_all": list_all_to_all_calls,
    "allgather": list_allgather_calls,
}
"""The function that lists the calls of a token dispatcher, by the dispatcher's name.

Its arguments are the name of an axis, the number of ranks of that axis, and an equation, as text,
for the number of a rank's tokens in a microbatch.
"""
