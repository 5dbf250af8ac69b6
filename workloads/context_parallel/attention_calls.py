"""The communication of attention over ranks, for one layer and microbatch. Pure."""

from functools import partial

from parbench.workloads.costs.layer_call import LayerCall
from parbench.workloads.model.shapes import Shape

Calls = tuple[LayerCall, ...]


def format_key_value_elements(shape: Shape) -> str:
    """Return the text of an equation for the elements of keys and values, before tp divides them.

    Latent attention (MLA) has keys and values of every query head.
    """
    if shape.latent is None:
        return "2 * tokens * kv_heads * head_size"
    return "tokens * heads * (head_size + value_size)"


def list_ring_calls(shape: Shape, axis: str, ranks: int) -> Calls:
    """Return the sends of ring attention: keys and values in both passes, gradients in backward.

    A pass has a send for each hop, which is one less than the ranks. Gradients are in float32.
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
    """Return the all_gather of keys and values in both passes and the gradients' reduce_scatter."""
    call = partial(LayerCall, axis, ranks)
    size = f"{format_key_value_elements(shape)} * bytes_per_element * cp / tp"
    return (
        call("all_gather", size, "keys and values", forward=1, backward=1),
        call("reduce_scatter", size, "gradients of keys and values", backward=1),
    )


def list_head_calls(shape: Shape, axis: str, ranks: int) -> Calls:
    """Return the all_to_alls of Ulysses, each with the equation of its bytes.

    One moves queries, keys and values from shards of tokens to shards of heads. The other moves the
    results back. Each is called once in forward and once in backward.
    """
    exchange = partial(LayerCall, axis, ranks, "all_to_all", forward=1, backward=1)
    inputs = f"(tokens * heads * head_size + {format_key_value_elements(shape)})"
    return (
        exchange(f"{inputs} * bytes_per_element / tp", "queries, keys and values"),
        exchange("tokens * heads * value_size * bytes_per_element / tp", "results"),
    )
