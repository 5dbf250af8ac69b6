"""Experts depend only on generator, seed, step and token, and have analytical loads."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parbench.bench.text import UserError
from parbench.workloads.expert_parallel.routing import (
    GENERATORS,
    Generator,
    compute_inclusion,
    compute_popularity,
    count_run_tokens,
    draw_experts,
    parse_routing,
)


def make_generator(routing: str, **changes: Any) -> Generator:
    name, strength = parse_routing(routing)
    generator = Generator(name=name, strength=strength, seed=0, experts=8, top_k=2, parts=4)
    return replace(generator, **changes)


def count_loads(generator: Generator, step: int, tokens: int) -> list[int]:
    counts = Counter[int]()
    for experts in draw_experts(generator, step, 0, tokens):
        counts.update(experts)
    return [counts[expert] for expert in range(generator.experts)]


@pytest.mark.parametrize(
    ("text", "strength"), [("zipf:1.5", 1.5), ("hot_rank", 3.0), ("router", 0.0)]
)
def test_parse_routing_reads_strength(text: str, strength: float) -> None:
    assert parse_routing(text)[1] == strength


@pytest.mark.parametrize("text", ["zipf:", "zipf:0", "zipf:nan", "hot_rank:-1", "balanced:1"])
def test_parse_routing_refuses_strength(text: str) -> None:
    with pytest.raises(UserError, match=text.partition(":")[0]):
        parse_routing(text)


def test_popularity_of_generators() -> None:
    shares = sorted(compute_popularity(make_generator("zipf:2")), reverse=True)
    ratios = [shares[0] / share for share in shares]
    assert ratios == pytest.approx([rank**2 for rank in range(1, 9)])
    assert compute_popularity(make_generator("zipf")) != compute_popularity(
        make_generator("zipf", seed=1)
    )
    hot = compute_popularity(make_generator("hot_rank:3"))
    assert hot == pytest.approx([3 / 12] * 2 + [1 / 12] * 6)


@given(
    st.sampled_from(GENERATORS),
    st.integers(1, 40),
    st.integers(1, 8),
    st.integers(1, 8),
)
@settings(max_examples=40, deadline=None)
def test_tokens_have_k_different_experts(
    name: str, experts: int, top_k: int, parts: int
) -> None:
    generator = make_generator(name, experts=experts, top_k=min(top_k, experts), parts=parts)
    for chosen in draw_experts(generator, 1, 37, 50):
        assert len(chosen) == generator.top_k
        assert len(set(chosen)) == generator.top_k
        assert 0 <= min(chosen) <= max(chosen) < experts


@pytest.mark.parametrize("name", GENERATORS)
def test_experts_do_not_depend_on_batch(name: str) -> None:
    generator = make_generator(name)
    batch = draw_experts(generator, 1, 0, 400)
    assert draw_experts(generator, 1, 37, 101) == batch[37:138]
    assert draw_experts(generator, 0, 0, 400) != batch
    assert draw_experts(replace(generator, seed=1), 1, 0, 400) != batch


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (5, 3)])
def test_loads_agree_with_inclusion(name: str, experts: int, top_k: int) -> None:
    """One token per run is the most that they differ by."""
    runs = 8
    generator = make_generator(name, experts=experts, top_k=top_k)
    tokens = runs * count_run_tokens(experts)
    expected = [tokens * share for share in compute_inclusion(generator)]
    assert count_loads(generator, 1, tokens) == pytest.approx(expected, abs=runs)
