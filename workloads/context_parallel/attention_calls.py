"""The communication of attention over ranks, for one layer and microbatch. Pure."""

from functools import partial

from parbench.workloads.model.layer_call import LayerCall
from parbench.workloads.model.shapes import Shape

Calls = tuple[LayerCall, ...]
"""The communication of one attention layer for one microbatch."""


def format_key_value_elements(shape: Shape) -> str:
    """Return an equation, as text, for the number of elements of a layer's keys and values.

    They are the keys and values of the tokens that a rank has in a microbatch, for all heads:
    ``tp`` does not divide the number. Latent attention (MLA) has keys and values for every query
    head.
    """
    if shape.latent is None:
        return "2 * tokens * kv_heads * head_size"
    return "tokens * heads * (head_size + value_size)"


def list_ring_calls(shape: Shape, axis: str, ranks: int) -> Calls:
    """Return the sends of ring attention in one layer and microbatch.

    ``axis`` is the name of the axis with ``ranks`` ranks, along which the ring runs. A forward and
    a backward pass each have ``ranks`` - 1 hops. In each hop, a rank sends a block of keys and
    values to the next rank. Backward also sends the gradients of the block, in float32.
    """
    send = partial(LayerCall, axis, ranks, "send")
    elements = format_key_value_elements(shape)
    keys = f"{elements} * bytes_per_element / tp"
    hops = ranks - 1
    return (
        send(keys, "keys and values", forward=hops, backward=hops),
        send(f"{elements} * 4 / tp", "gradients of keys and values in float32", backward=hops),
    )


def list_gather_calls(shape: Shape, axis: str, ranks: int) -> Calls:
    """Return the collectives of attention that gathers all keys, in one layer and microbatch.

    ``axis`` is the name of the axis with ``ranks`` ranks, which gather keys from each other.
    Forward and backward each have an all_gather of keys and values. Backward also has a
    reduce_scatter of their gradients.
    """
    call = partial(LayerCall, axis, ranks)
    size = f"{format_key_value_elements(shape)} * bytes_per_element * cp / tp"
    return (
        call("all_gather", size, "keys and values", forward=1, backward=1),
        call("reduce_scatter", size, "gradients of keys and values", backward=1),
    )


def list_head_calls(shape: Shape, axis: str, ranks: int) -> Calls:
    """Return the two all_to_alls of Ulysses in one layer and microbatch.

    ``axis`` is the name of the axis with ``ranks`` ranks. The first all_to_all exchanges tokens for
    heads: a rank sends the queries, keys and values of its tokens, and receives those of its heads
    for all tokens. The second exchanges the attention results back. Each is called once in forward
    and once in backward.
    """
    exchange = partial(LayerCall, axis, ranks, "all_to_all", forward=1, backward=1)
    inputs = f"(tokens * heads * head_size + {format_key_value_elements(shape)})"
    return (
        exchange(f"{inputs} * bytes_per_element / tp", "queries, keys and values"),
        exchange("tokens * heads * value_size * bytes_per_element / tp", "results"),
    )
