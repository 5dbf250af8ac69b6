"""Routes are a function of generator, seed, step and token alone, and their loads are the closed form."""

import math
import timeit
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
    BURST_PERIOD,
    GENERATORS,
    NOWHERE,
    ROUTER,
    Generator,
    capacity,
    expected_drop_rate,
    expected_loads,
    imbalance,
    inclusion,
    parse_routing,
    popularity,
    refuse_routing,
    routes,
    run_tokens,
    source_share,
)

BURST_STEP = BURST_PERIOD - 1


def made(name: str, **changes: Any) -> Generator:
    name, strength = parse_routing(name)
    usual = Generator(name=name, strength=strength, seed=0, experts=8, top_k=2, parts=4, tokens=256)
    return replace(usual, **changes)


def loads_of(generator: Generator, step: int = 0, tokens: int = 256, first: int = 0) -> list[int]:
    taken = Counter(expert for of in routes(generator, step, first, tokens) for expert in of)
    return [taken[expert] for expert in range(generator.experts)]


def rank_loads(loads: list[int], ranks: int) -> list[int]:
    block = len(loads) // ranks
    return [sum(loads[rank * block : (rank + 1) * block]) for rank in range(ranks)]


def dropped(loads: list[int], slots: int) -> float:
    return sum(max(0, load - slots) for load in loads) / sum(loads)


def test_a_strength_may_follow_a_name_and_else_is_the_usual_one() -> None:
    assert [parse_routing(name)[0] for name in GENERATORS] == list(GENERATORS)
    asked = {"zipf:1.5": 1.5, "hot_rank": 3.0, "ragged:1": 1.0, ROUTER: 0.0}
    assert {name: parse_routing(name)[1] for name in asked} == asked


def test_what_is_no_name_or_no_strength_is_refused() -> None:
    texts = ("zipf:", "zipf:x", "zipf:0", "zipf:nan", "hot_rank:-1", "lognormal:inf")
    refused = dict.fromkeys(texts, "the strength of .* is a number above 0$")
    refused |= dict.fromkeys(("balanced:1", "router:2", "idle_rank:1"), "has no strength")
    refused["ragged:1.5"] = "the strength of ragged is a number above 0 and at most 1"
    refused["zip"] = r"'zip' is not known: routing is router, balanced, .* did you mean 'zipf'"
    for text, words in refused.items():
        with pytest.raises(UserError, match=words):
            parse_routing(text)


def test_too_few_experts_that_are_not_idle_are_refused_by_equation() -> None:
    assert refuse_routing(made("idle_rank", top_k=6)) is None
    assert refuse_routing(made("idle_rank", experts=1, top_k=1)) == "top_k(1) > experts(1) - idle(1)"
    assert refuse_routing(made("idle_rank", top_k=7)) == "top_k(7) > experts(8) - idle(2)"


def test_shares_of_all_experts_are_one_and_inclusions_are_k() -> None:
    for name in GENERATORS:
        for step in (0, BURST_STEP):
            assert sum(popularity(made(name), step)) == pytest.approx(1), name
            assert sum(inclusion(made(name), step)) == pytest.approx(2), name


def test_zipf_shares_fall_as_the_power_of_their_rank_and_lognormal_ones_scatter_as_they_are_told() -> None:
    shares = sorted(popularity(made("zipf:2"), 0), reverse=True)
    assert [shares[0] / share for share in shares] == pytest.approx([rank**2 for rank in range(1, 9)])
    logs = [math.log(share) for share in popularity(made("lognormal:0.5", experts=4096), 0)]
    mean = sum(logs) / len(logs)
    assert math.sqrt(sum((log - mean) ** 2 for log in logs) / len(logs)) == pytest.approx(0.5, rel=0.05)


def test_a_drawn_popularity_is_the_seeds_and_not_the_steps() -> None:
    for name in ("zipf", "lognormal", "hot_experts", "spread_hot"):
        assert popularity(made(name, experts=64), 0) == popularity(made(name, experts=64), 5)
        assert popularity(made(name, experts=64), 0) != popularity(made(name, experts=64, seed=1), 0)


def test_a_hot_rank_holds_the_first_experts_and_its_load_is_its_closed_form() -> None:
    """S times as popular as R - 1 others: max / mean is S R / (S + R - 1)."""
    assert popularity(made("hot_rank:3"), 0) == pytest.approx([3 / 12] * 2 + [1 / 12] * 6)
    for parts, strength in ((2, 3.0), (4, 3.0), (4, 2.0)):
        loads = expected_loads(made("hot_rank", parts=parts, strength=strength), 0, 256)
        whole = [round(load * 3000) for load in loads]
        assert imbalance(rank_loads(whole, parts)) == pytest.approx(strength * parts / (strength + parts - 1), rel=1e-4)


def test_hot_experts_are_an_eighth_or_one_of_every_rank_which_leaves_ranks_even() -> None:
    shares = popularity(made("hot_experts:4", experts=32), 0)
    assert sorted(Counter(round(share / min(shares)) for share in shares).items()) == [(1, 28), (4, 4)]
    shares = popularity(made("spread_hot", experts=32), 0)
    assert [sum(shares[first : first + 8]) for first in range(0, 32, 8)] == pytest.approx([0.25] * 4)
    assert max(shares) / min(shares) == pytest.approx(4)


def test_an_idle_rank_gets_nothing_a_hotspot_moves_on_each_step_and_a_burst_comes_every_fourth() -> None:
    loads = loads_of(made("idle_rank"))
    assert rank_loads(loads, 4)[3] == 0
    assert min(loads[:6]) > 0
    hottest = [rank_loads(loads_of(made("rotating"), step), 4) for step in range(5)]
    assert [loads.index(max(loads)) for loads in hottest] == [0, 1, 2, 3, 0]
    uneven = [len(set(inclusion(made("burst"), step))) > 1 for step in range(8)]
    assert uneven == [False, False, False, True] * 2
    for name in ("hot_rank", "idle_rank", "rotating"):  # one rank has hot and idle experts too
        assert len(set(popularity(made(name, parts=1), 0))) == 2, name


def test_no_token_takes_an_expert_twice_however_popular_it_is() -> None:
    generator = made("hot_rank:100", top_k=3)
    shares = inclusion(generator, 0)
    assert shares[:2] == (1.0, 1.0)
    assert shares[2:] == pytest.approx([1 / 6] * 6)
    assert all({0, 1} < set(of) for of in routes(generator, 0, 0, 64))


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
def test_each_token_has_k_different_experts_or_none(
    name: str, experts: int, top_k: int, parts: int, step: int, first: int, count: int
) -> None:
    generator = made(name, experts=experts, top_k=min(top_k, experts), parts=parts)
    if refuse_routing(generator):
        return
    found = routes(generator, step, first, count)
    assert len(found) == count
    for of in found:
        assert len(of) == generator.top_k
        assert set(of) == {NOWHERE} or (len(set(of)) == len(of) and all(0 <= expert < experts for expert in of))


def test_routes_are_the_same_however_the_batch_is_cut_and_others_in_other_steps_and_seeds() -> None:
    """A layout asks for its own part, and gets what every other would get for it."""
    for name in GENERATORS:
        generator = made(name, tokens=100)
        whole = routes(generator, 1, 0, 400)
        assert [of for first in range(0, 400, 25) for of in routes(generator, 1, first, 25)] == whole, name
        assert routes(generator, 1, 37, 101) == whole[37:138], name
        assert routes(generator, 0, 0, 400) != whole, name
        assert routes(replace(generator, seed=1), 1, 0, 400) != whole, name


def test_loads_are_the_closed_form_to_within_a_token_a_run() -> None:
    runs, sizes = 8, [(8, 2, 4), (6, 2, 2), (8, 1, 2), (16, 4, 4), (5, 3, 2)]
    for name, (experts, top_k, parts), step in product(GENERATORS, sizes, (0, BURST_STEP)):
        if name == "ragged":  # not all of its tokens go anywhere
            continue
        generator, tokens = made(name, experts=experts, top_k=top_k, parts=parts), runs * run_tokens(experts)
        pairs = zip(loads_of(generator, step, tokens), expected_loads(generator, step, tokens), strict=True)
        apart = max(abs(found - expected) for found, expected in pairs)
        assert apart <= min(runs, 0.05 * tokens), (name, experts, step)


def test_balanced_loads_are_even_exactly_any_two_experts_meet_and_a_part_of_a_run_is_spread_as_the_whole() -> None:
    for experts, top_k in ((8, 2), (6, 4), (64, 8), (5, 3), (7, 7)):
        tokens = 3 * run_tokens(experts)
        loads = loads_of(made(BALANCED, experts=experts, top_k=top_k), tokens=tokens)
        assert loads == [tokens * top_k // experts] * experts
    pairs = {tuple(sorted(of)) for of in routes(made(BALANCED), 0, 0, 4096)}
    assert len(pairs) == 8 * 7 // 2
    loads = loads_of(made(BALANCED), tokens=16)
    assert max(loads) - min(loads) <= 2


def test_ragged_sources_send_shares_of_their_tokens() -> None:
    generator = made("ragged:0.25")
    sent = [
        sum(of[0] != NOWHERE for of in routes(generator, 0, source * generator.tokens, generator.tokens))
        for source in range(4)
    ]
    assert sent == [64, 128, 192, 256]
    assert [source_share(generator, source) for source in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert source_share(made("ragged", parts=1), 0) == 1.0
    assert loads_of(generator) == [16] * 8


@pytest.mark.full
@pytest.mark.measures
def test_64k_tokens_are_drawn_in_a_fifth_of_a_second() -> None:
    generator = made("zipf", experts=64, tokens=8192)
    assert min(timeit.repeat(lambda: routes(generator, 0, 0, 1 << 16), number=1, repeat=3)) < 0.2


def test_loads_are_held_against_their_mean_and_capacity_is_rounded_up() -> None:
    assert (imbalance([1, 1, 4]), imbalance([0, 0])) == (2.0, None)
    # but not for roundings of its factor
    sizes = ((1.0, 2, 64), (1.25, 2, 61), (0.1 * 3, 2, 40), (0.001, 2, 64))
    assert [capacity(*of, 8) for of in sizes] == [16, 20, 3, 1]


def test_drop_rates_are_the_closed_form() -> None:
    """Each source's microbatch by itself; loads are off by a token a run at most."""
    for name, factor in product(GENERATORS, (0.5, 1.0, 1.5, 4.0)):
        generator, slots, runs = made(name, tokens=256), capacity(factor, 2, 256, 8), 4
        loads = [load for source in range(4) for load in loads_of(generator, 3, first=source * 256)]
        expected = expected_drop_rate(generator, 3, 256, slots)
        assert dropped(loads, slots) == pytest.approx(expected, abs=8 * runs / 512), (name, factor)
    for factor, rate in ((1.0, 0.0), (0.5, 0.5), (0.25, 0.75)):
        slots = capacity(factor, 2, 256, 8)
        assert expected_drop_rate(made(BALANCED), 0, 256, slots) == pytest.approx(rate)
        assert dropped(loads_of(made(BALANCED)), slots) == rate
    hot = made("hot_rank:3", parts=2)
    # half of the experts have 3/4 of 512 pairs, 96 each, and 64 slots: 32 each of 4 drop
    assert expected_drop_rate(hot, 0, 256, 64) == pytest.approx(128 / 512) == dropped(loads_of(hot), 64)
