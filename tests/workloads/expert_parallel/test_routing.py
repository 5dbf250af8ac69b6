"""Routes are a function of generator, seed, step and token alone, and their loads are the analytical ones."""

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parbench.bench.text import UserError
from parbench.workloads.expert_parallel.routing import (
    BALANCED,
    GENERATORS,
    ROUTER,
    Generator,
    capacity,
    expected_drop_rate,
    expected_loads,
    imbalance,
    inclusion,
    parse_routing,
    popularity,
    routes,
    run_tokens,
)


def make_generator(routing: str, **changes: Any) -> Generator:
    name, strength = parse_routing(routing)
    usual = Generator(name=name, strength=strength, seed=0, experts=8, top_k=2, parts=4)
    return replace(usual, **changes)


def count_loads(generator: Generator, step: int = 0, tokens: int = 256) -> list[int]:
    taken = Counter(expert for experts in routes(generator, step, 0, tokens) for expert in experts)
    return [taken[expert] for expert in range(generator.experts)]


def dropped(loads: list[int], slots: int) -> float:
    return sum(max(0, load - slots) for load in loads) / sum(loads)


def test_parse_routing_reads_name_and_strength() -> None:
    expected = {"zipf:1.5": 1.5, "hot_rank": 3.0, BALANCED: 0.0, ROUTER: 0.0}
    assert {text: parse_routing(text)[1] for text in expected} == expected
    refused = dict.fromkeys(
        ("zipf:", "zipf:x", "zipf:0", "zipf:nan", "hot_rank:-1", "zipf:inf"), "a number above 0$"
    )
    refused |= dict.fromkeys(("balanced:1", "router:2"), "has no strength")
    refused["zip"] = r"'zip' is not known: routing is router, balanced, .* did you mean 'zipf'"
    for text, words in refused.items():
        with pytest.raises(UserError, match=words):
            parse_routing(text)


def test_popularity_of_each_generator() -> None:
    shares = sorted(popularity(make_generator("zipf:2")), reverse=True)
    assert [shares[0] / share for share in shares] == pytest.approx(
        [rank**2 for rank in range(1, 9)]
    )
    assert popularity(make_generator("zipf")) != popularity(make_generator("zipf", seed=1))
    assert popularity(make_generator("hot_rank:3")) == pytest.approx([3 / 12] * 2 + [1 / 12] * 6)
    assert (
        len(set(popularity(make_generator("hot_rank", parts=1)))) == 2
    )  # one rank has hot and cold experts too
    for name in GENERATORS:
        assert sum(popularity(make_generator(name))) == pytest.approx(1), name
        assert sum(inclusion(make_generator(name))) == pytest.approx(2), name


def test_routes_take_no_expert_twice() -> None:
    generator = make_generator("hot_rank:100", top_k=3)
    assert inclusion(generator) == pytest.approx((1.0, 1.0, *[1 / 6] * 6))
    assert all({0, 1} < set(experts) for experts in routes(generator, 0, 0, 64))


@given(
    st.sampled_from(GENERATORS),
    st.integers(1, 40),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(0, 9),
    st.integers(0, 999),
    st.integers(1, 99),
)
@settings(max_examples=50, deadline=None)
def test_routes_have_k_different_experts(
    name: str, experts: int, top_k: int, parts: int, step: int, first: int, count: int
) -> None:
    generator = make_generator(name, experts=experts, top_k=min(top_k, experts), parts=parts)
    found = routes(generator, step, first, count)
    assert len(found) == count
    for chosen in found:
        assert len(set(chosen)) == len(chosen) == generator.top_k
        assert all(0 <= expert < experts for expert in chosen)


def test_routes_do_not_depend_on_how_a_batch_is_split() -> None:
    for name in GENERATORS:
        generator = make_generator(name)
        whole = routes(generator, 1, 0, 400)
        parts = [
            experts for first in range(0, 400, 25) for experts in routes(generator, 1, first, 25)
        ]
        assert parts == whole, name
        assert routes(generator, 1, 37, 101) == whole[37:138], name
        assert routes(generator, 0, 0, 400) != whole, name
        assert routes(replace(generator, seed=1), 1, 0, 400) != whole, name


def test_loads_agree_with_expected_loads() -> None:
    """One token per run is the most that they differ by."""
    runs = 8
    for name, (experts, top_k, parts) in product(
        GENERATORS, [(8, 2, 4), (6, 2, 2), (16, 4, 4), (5, 3, 2)]
    ):
        generator = make_generator(name, experts=experts, top_k=top_k, parts=parts)
        tokens = runs * run_tokens(experts)
        pairs = zip(
            count_loads(generator, 1, tokens), expected_loads(generator, tokens), strict=True
        )
        assert max(abs(load - expected) for load, expected in pairs) <= runs, (name, experts)


def test_balanced_loads_are_even() -> None:
    for experts, top_k in ((8, 2), (6, 4), (5, 3), (7, 7)):
        tokens = 3 * run_tokens(experts)
        loads = count_loads(make_generator(BALANCED, experts=experts, top_k=top_k), tokens=tokens)
        assert loads == [tokens * top_k // experts] * experts
    pairs = {tuple(sorted(experts)) for experts in routes(make_generator(BALANCED), 0, 0, 4096)}
    assert len(pairs) == 8 * 7 // 2  # any two experts meet
    loads = count_loads(make_generator(BALANCED), tokens=16)
    assert max(loads) - min(loads) <= 2


def test_imbalance_and_capacity() -> None:
    assert (imbalance([1, 1, 4]), imbalance([0, 0])) == (2.0, None)
    sizes = (
        (1.0, 2, 64),
        (1.25, 2, 61),
        (0.1 * 3, 2, 40),
        (0.001, 2, 64),
    )  # 0.1 * 3 is more than 0.3
    assert [capacity(*size, 8) for size in sizes] == [16, 20, 3, 1]


def test_drop_rate_agrees_with_expected_drop_rate() -> None:
    for name, factor in product(GENERATORS, (0.5, 1.0, 1.5)):
        generator, slots = make_generator(name), capacity(factor, 2, 256, 8)
        found = dropped(count_loads(generator, 3), slots)
        assert found == pytest.approx(expected_drop_rate(generator, 256, slots), abs=8 * 4 / 512), (
            name,
            factor,
        )
    hot = make_generator("hot_rank:3", parts=2)
    # Half of the experts have 3/4 of 512 pairs, 96 each, and 64 slots: 32 each of 4 drop.
    assert (
        expected_drop_rate(hot, 256, 64)
        == pytest.approx(128 / 512)
        == dropped(count_loads(hot), 64)
    )
