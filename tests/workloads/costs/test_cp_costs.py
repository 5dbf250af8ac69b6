"""Bytes of context-parallel attention are what papers say, and Ulysses' are fewer than a ring's above a crossover."""

import pytest

from workloads.costs.cp_costs import AttentionBytes, AttentionSizes, attention_bytes, crossover_ranks

GQA, MHA, NARROW = (
    AttentionSizes(microbatch=3, sequence=240, heads=8, kv_heads=kv_heads, head_size=16, element_bytes=element_bytes)
    for kv_heads, element_bytes in ((2, 4), (8, 4), (2, 2))
)


def sent(method: str, sizes: AttentionSizes, c: int, ulysses: int = 1) -> AttentionBytes:
    return attention_bytes(method, sizes, c, ulysses)


def test_a_ring_sends_keys_and_values_c_less_1_times_and_their_sums_back_in_float32() -> None:
    for method in ("ring", "striped", "zigzag", "torch_cp"):
        for c in (1, 2, 8):
            forward = 2 * (240 / c) * 3 * (2 * 16) * (c - 1) * 4  # 2 (s/c) b h_kv (c-1) e
            expected = AttentionBytes(forward={"cp": forward}, backward={"cp": 2 * forward})
            assert sent(method, GQA, c) == expected, (method, c)
    wide, narrow = sent("ring", GQA, 4), sent("ring", NARROW, 4)
    assert narrow.forward["cp"] == wide.forward["cp"] / 2
    assert narrow.backward["cp"] == narrow.forward["cp"] + wide.forward["cp"]


def test_ulysses_sends_less_forward_than_a_ring_above_the_crossover_alone() -> None:
    for sizes, crossover in ((MHA, 2.0), (GQA, 5.0)):
        assert crossover_ranks(sizes.heads, sizes.kv_heads) == crossover
        for c in (2, 3, 4, 5, 6, 10, 16):
            ring, ulysses = (sent(m, sizes, c, u).forward["cp"] for m, u in (("ring", 1), ("ulysses", c)))
            assert (ulysses == pytest.approx(ring)) == (c == crossover), c
            assert (ulysses < ring) == (c > crossover) or c == crossover, c


def test_a_step_has_all_layers_and_microbatches_and_what_is_computed_again() -> None:
    one = AttentionBytes(forward={"cp": 10.0}, backward={"cp": 25.0})
    assert one.step(3, 2) == {"cp": 6 * 35.0}
    assert one.step(3, 2, forwards=2) == {"cp": 6 * 45.0}
    assert one.step(1, 1, forwards=0) == one.backward
