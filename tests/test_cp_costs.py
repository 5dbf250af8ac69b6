"""Bytes of context-parallel attention: against the papers' formulas, and one method against another."""

import pytest

from workloads.context.cp_costs import AttentionBytes, AttentionSizes, attention_bytes, crossover_ranks

GQA = AttentionSizes(microbatch=3, sequence=240, heads=8, kv_heads=2, head_size=16, element_bytes=4)
MHA = AttentionSizes(microbatch=3, sequence=240, heads=8, kv_heads=8, head_size=16, element_bytes=4)
NARROW = AttentionSizes(microbatch=3, sequence=240, heads=8, kv_heads=2, head_size=16, element_bytes=2)
RINGS = ["ring", "striped", "zigzag", "torch_cp"]


def sent(method: str, sizes: AttentionSizes, c: int, ulysses: int = 1) -> AttentionBytes:
    return attention_bytes(method, sizes, c, ulysses)


@pytest.mark.parametrize("c", [1, 2, 4, 8])
@pytest.mark.parametrize("method", RINGS)
def test_a_ring_sends_keys_and_values_c_less_1_times(method: str, c: int) -> None:
    """2 (s/c) b h_kv (c-1) e, backward twice that in float32."""
    forward = 2 * (240 / c) * 3 * (2 * 16) * (c - 1) * 4
    assert sent(method, GQA, c) == AttentionBytes(forward={"cp": forward}, backward={"cp": 2 * forward})


def test_sums_of_gradients_travel_in_float32_whatever_the_elements() -> None:
    wide, narrow = sent("ring", GQA, 4), sent("ring", NARROW, 4)
    assert narrow.forward["cp"] == wide.forward["cp"] / 2
    assert narrow.backward["cp"] == narrow.forward["cp"] + wide.forward["cp"]


@pytest.mark.parametrize("sizes", [GQA, MHA, NARROW])
def test_gathering_sends_a_rings_bytes_forward_and_twice_as_much_backward(sizes: AttentionSizes) -> None:
    found = sent("allgather_kv", sizes, 4)
    assert found.forward == sent("ring", sizes, 4).forward
    assert found.backward["cp"] == 2 * found.forward["cp"]


@pytest.mark.parametrize("sizes", [GQA, MHA, NARROW])
@pytest.mark.parametrize("c", [1, 2, 4, 8])
def test_ulysses_exchanges_everything_once_each_way(sizes: AttentionSizes, c: int) -> None:
    """(2 + 2g) b s h e / c (c-1)/c."""
    g, h = sizes.kv_heads / sizes.heads, 8 * 16
    expected = (2 + 2 * g) * 3 * 240 * h * sizes.element_bytes / c * (c - 1) / c
    found = sent("ulysses", sizes, c, c)
    assert found.forward == found.backward
    assert found.forward["cp"] == pytest.approx(expected)


def test_usp_is_ulysses_at_one_end_and_a_ring_at_the_other() -> None:
    assert sent("usp", GQA, 4, 1).forward == {"ring": sent("ring", GQA, 4).forward["cp"], "ulysses": 0.0}
    assert sent("usp", GQA, 4, 4).forward == {"ring": 0.0, "ulysses": sent("ulysses", GQA, 4, 4).forward["cp"]}


def test_usp_rings_over_fewer_hops_and_exchanges_among_fewer_ranks() -> None:
    found, one_part = sent("usp", GQA, 8, 2), 3 * 2 * (240 // 8) * 16 * 4
    assert found.forward["ring"] == 2 * one_part * (4 - 1)
    assert found.backward["ring"] == 2 * found.forward["ring"]
    assert found.forward["ulysses"] == found.backward["ulysses"] == (2 + 2 / 4) * 3 * (240 / 8) * 128 * 4 / 2


@pytest.mark.parametrize(("sizes", "crossover"), [(MHA, 2.0), (GQA, 5.0)])
def test_ulysses_sends_less_forward_than_a_ring_above_the_crossover_alone(
    sizes: AttentionSizes, crossover: float
) -> None:
    assert crossover_ranks(sizes.heads, sizes.kv_heads) == crossover
    for c in (2, 3, 4, 5, 6, 8, 10, 16):
        ring, ulysses = (sent(m, sizes, c, u).forward["cp"] for m, u in (("ring", 1), ("ulysses", c)))
        if c == crossover:
            assert ulysses == pytest.approx(ring)
        else:
            assert (ulysses < ring) == (c > crossover), c


def test_a_step_has_all_layers_and_microbatches_and_what_is_computed_again() -> None:
    one = AttentionBytes(forward={"cp": 10.0}, backward={"cp": 25.0})
    assert one.step(3, 2) == {"cp": 6 * 35.0}
    assert one.step(3, 2, forwards=2) == {"cp": 6 * 45.0}
    assert one.step(1, 1, forwards=0) == one.backward
