"""Closed forms of what context-parallel attention sends: bytes per rank by axis, forward and backward.

s b are sequence and microbatch, d a head's size, c all ranks, u those of the Ulysses axis, p = c/u those of the ring,
e the bytes of an element. X = b a_kv (s/c) d is one rank's part of the keys; gradients that are summed on their way
round travel in float32.
"""

from dataclasses import dataclass

from workloads.costs.communication_pattern import sent_bytes

_SUM_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class AttentionSizes:
    """The sizes of one layer's attention over one microbatch of whole sequences."""

    microbatch: int
    sequence: int
    heads: int
    kv_heads: int
    head_size: int
    element_bytes: int


@dataclass(frozen=True, kw_only=True)
class AttentionBytes:
    """Bytes that one rank sends for one layer and microbatch, by axis."""

    forward: dict[str, float]
    backward: dict[str, float]

    def step(self, layers: int, microbatches: int, *, forwards: int = 1) -> dict[str, float]:
        """Return those of a step; ``forwards`` is 2 where backward computes a layer's forward pass again."""
        times = layers * microbatches
        return {axis: times * (forwards * sent + self.backward[axis]) for axis, sent in self.forward.items()}


def attention_bytes(method: str, sizes: AttentionSizes, ranks: int, ulysses: int) -> AttentionBytes:
    """Return the bytes of a method; ``ulysses`` is 1 but for ulysses and usp."""
    if method == "ulysses":
        return _both_ways("cp", _exchanged(sizes, ranks, ranks))
    if method == "allgather_kv":
        return _gathered(sizes, ranks)
    if method == "usp":
        around, exchanged = _around(sizes, ranks, ranks // ulysses, "ring"), _exchanged(sizes, ranks, ulysses)
        across = _both_ways("ulysses", exchanged)
        return AttentionBytes(
            forward={**around.forward, **across.forward}, backward={**around.backward, **across.backward}
        )
    return _around(sizes, ranks, ranks, "cp")


def crossover_ranks(heads: int, kv_heads: int) -> float:
    """Return the ranks above which Ulysses sends less forward than a ring: 1 + 1/g, g = a_kv / a."""
    return 1 + heads / kv_heads


def _both_ways(axis: str, sent: float) -> AttentionBytes:
    return AttentionBytes(forward={axis: sent}, backward={axis: sent})


def _around(sizes: AttentionSizes, ranks: int, hops: int, axis: str) -> AttentionBytes:
    """2 X e a hop, p - 1 hops; backward both again and their gradients: (p - 1) 2 X (e + 4)."""
    both = 2 * _keys(sizes, ranks)
    return AttentionBytes(
        forward={axis: float((hops - 1) * both * sizes.element_bytes)},
        backward={axis: float((hops - 1) * both * (sizes.element_bytes + _SUM_BYTES))},
    )


def _gathered(sizes: AttentionSizes, ranks: int) -> AttentionBytes:
    """An all_gather of K and V, (c - 1) 2 X e; backward gathers again and reduce-scatters the gradients."""
    whole = 2 * _keys(sizes, ranks) * ranks * sizes.element_bytes
    gather, scatter = sent_bytes("all_gather", whole, ranks), sent_bytes("reduce_scatter", whole, ranks)
    return AttentionBytes(forward={"cp": gather}, backward={"cp": gather + scatter})


def _exchanged(sizes: AttentionSizes, ranks: int, ulysses: int) -> float:
    """All_to_alls of q, k, v and of the output: (2 + 2g) b (s/c) h e (u-1)/u."""
    elements = sizes.microbatch * (sizes.sequence // ranks) * sizes.head_size * (2 * sizes.heads + 2 * sizes.kv_heads)
    return sent_bytes("all_to_all", elements * sizes.element_bytes, ulysses)


def _keys(sizes: AttentionSizes, ranks: int) -> int:
    return sizes.microbatch * sizes.kv_heads * (sizes.sequence // ranks) * sizes.head_size
