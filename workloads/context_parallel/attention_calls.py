"""The communication of attention over ranks, for one layer and microbatch. Pure."""

from dataclasses import dataclass

from parbench.workloads.model.shapes import Shape


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """Equal communication calls of one layer's attention for one microbatch."""

    axis: str
    op: str
    size: str
    """An equation for the bytes of one call, as nccl-tests counts them.

    Its symbols are the keys of ``RankView.symbols``.
    """
    why: str
    """The tensors that the calls move, for reports."""
    ranks: int
    forward: int
    """The number of calls in a forward pass."""
    backward: int
    """The number of calls in a backward pass."""


def format_key_value_elements(shape: Shape) -> str:
    """Return the text of an equation for the elements of keys and values, before tp divides them.

    Latent attention (MLA) has keys and values of every query head.
    """
    if shape.latent is None:
        return "2 * tokens * kv_heads * head_size"
    return "tokens * heads * (head_size + value_size)"


def list_ring_calls(shape: Shape, axis: str, ranks: int) -> tuple[AttentionCall, ...]:
    """Return the sends of ring attention: keys and values in both passes, gradients in backward.

    A pass has a send for each hop, which is one less than the ranks. Gradients are in float32.
    """
    elements = format_key_value_elements(shape)
    keys = f"{elements} * bytes_per_element / tp"
    gradients = f"{elements} * 4 / tp"
    hops = ranks - 1
    return (
        AttentionCall(
            axis=axis,
            op="send",
            size=keys,
            why="keys and values",
            ranks=ranks,
            forward=hops,
            backward=hops,
        ),
        AttentionCall(
            axis=axis,
            op="send",
            size=gradients,
            why="gradients of keys and values in float32",
            ranks=ranks,
            forward=0,
            backward=hops,
        ),
    )


def list_gather_calls(shape: Shape, axis: str, ranks: int) -> tuple[AttentionCall, ...]:
    """Return the all_gather of keys and values in both passes and the gradients' reduce_scatter."""
    size = f"{format_key_value_elements(shape)} * bytes_per_element * cp / tp"
    return (
        AttentionCall(
            axis=axis,
            op="all_gather",
            size=size,
            why="keys and values",
            ranks=ranks,
            forward=1,
            backward=1,
        ),
        AttentionCall(
            axis=axis,
            op="reduce_scatter",
            size=size,
            why="gradients of keys and values",
            ranks=ranks,
            forward=0,
            backward=1,
        ),
    )


def list_head_calls(shape: Shape, axis: str, ranks: int) -> tuple[AttentionCall, ...]:
    """Return the all_to_alls of Ulysses, each with the equation of its bytes.

    One moves queries, keys and values from shards of tokens to shards of heads. The other moves the
    results back. Each is called once in forward and once in backward.
    """
    queries = "tokens * heads * head_size"
    inputs = f"({queries} + {format_key_value_elements(shape)}) * bytes_per_element / tp"
    output = "tokens * heads * value_size * bytes_per_element / tp"
    sizes = {"queries, keys and values": inputs, "results": output}
    return tuple(
        AttentionCall(
            axis=axis, op="all_to_all", size=size, why=why, ranks=ranks, forward=1, backward=1
        )
        for why, size in sizes.items()
    )
