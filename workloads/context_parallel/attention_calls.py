"""The communication of attention over ranks, for one layer and microbatch. Pure."""

from dataclasses import dataclass

from parbench.workloads.model.shapes import Shape


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """Equal communication calls of one layer's attention for one microbatch.

    ``size`` is the text of an equation for the bytes of a call, as nccl-tests count them. Its words
    are those of ``RankView.symbols``.
    """

    axis: str
    op: str
    size: str
    why: str
    ranks: int
    forward: int
    """Calls of a forward pass."""
    backward: int


def format_key_value_elements(shape: Shape) -> str:
    """Return the elements of keys and values before tp divides them. MLA has keys of every head."""
    if shape.latent is None:
        return "2 * tokens * kv_heads * head_size"
    return "tokens * heads * (head_size + value_size)"


def list_ring_calls(shape: Shape, axis: str, ranks: int) -> tuple[AttentionCall, ...]:
    """Return the hops of a ring: keys and values in both passes, and gradients in float32."""
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
    """Return an all_gather of keys and values for each pass, and a reduce_scatter of gradients."""
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
    """Return the all_to_alls from tokens to heads and back: 2 b (s/c) h e (1 + g) (c-1)/c bytes."""
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
