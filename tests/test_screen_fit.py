"""A slow node is found and nobody innocent is blamed, whatever else disturbs the rounds."""

import itertools
import math
import random
from collections.abc import Set

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from screen_study import Cluster, rates, simulate

from bench.rounds import Pair, round_pairs
from slurm.screen_fit import (
    BLAME,
    SUSPECT,
    Effect,
    Exchange,
    Rule,
    Slow,
    confirm,
    find_slow,
    hodges_lehmann,
    link_effects,
    node_effects,
    scale,
)
from slurm.screen_rounds import tournament


def exact(
    n: int, factors: dict[int, float], links: dict[Pair, float] | None = None, repeats: int = 2
) -> list[Exchange]:
    """Return a whole tournament without noise: a pair takes as long as its slower end, or its link."""
    rounds = [round_pairs(n, index) for index in range(n - 1 + n % 2)]
    return [
        Exchange(
            turn=f"{index} {repeat}",
            pair=pair,
            seconds=0.1 * max(factors.get(pair[0], 1.0), factors.get(pair[1], 1.0), (links or {}).get(pair, 1.0)),
        )
        for repeat in range(repeats)
        for index, pairs in enumerate(rounds)
        for pair in pairs
    ]


def slow(nodes: Set[int], links: Set[Pair] = frozenset()) -> Slow:
    """Return suspects of whom nothing but their ranks is known."""

    def effect(ranks: tuple[int, ...]) -> Effect:
        return Effect(ranks=ranks, factor=2.0, low=2.0, high=2.0, least=1.0, partners=(), turns=1, is_slow=True)

    return Slow(nodes=tuple(effect((rank,)) for rank in nodes), links=tuple(effect(pair) for pair in links))


@pytest.mark.parametrize("n", [3, 4, 5, 6, 8, 9, 16])
@pytest.mark.parametrize("factor", [1.2, 8.0])
def test_one_slow_node_is_found_and_nothing_else(n: int, factor: float) -> None:
    for rank in (0, n // 2, n - 1):
        found = find_slow(exact(n, {rank: factor}, repeats=4 if n == 3 else 2))
        assert (found.ranks, found.pairs) == ({rank}, set())
        assert found.nodes[0].factor == pytest.approx(factor)
        assert found.nodes[0].partners == tuple(other for other in range(n) if other != rank)


@pytest.mark.parametrize("n", [3, 4, 5, 8, 16])
def test_a_fine_cluster_has_nothing_slow(n: int) -> None:
    found = find_slow(exact(n, {}))
    assert not found
    assert (found.nodes, found.links) == ((), ())


@pytest.mark.parametrize("n", [4, 5, 8, 16])
def test_a_slow_link_is_told_from_a_slow_node(n: int) -> None:
    for pair in itertools.islice(itertools.combinations(range(n), 2), 1, 12, 4):
        found = find_slow(exact(n, {}, {pair: 2.0}))
        assert (found.ranks, found.pairs) == (set(), {pair})
        assert found.links[0].factor == pytest.approx(2.0)


def test_two_slow_nodes_are_found_even_if_they_meet() -> None:
    for pair in itertools.islice(itertools.combinations(range(8), 2), 0, None, 5):
        found = find_slow(exact(8, {pair[0]: 2.0, pair[1]: 3.0}))
        assert (found.ranks, found.pairs) == (set(pair), set())
        assert [effect.ranks[0] for effect in found.nodes] == [pair[1], pair[0]], "strongest first"


def test_a_slow_node_and_a_slow_link_elsewhere_are_both_found() -> None:
    found = find_slow(exact(8, {2: 4.0}, {(0, 5): 2.0}))
    assert (found.ranks, found.pairs) == ({2}, {(0, 5)})


def test_a_slow_link_of_a_slow_node_does_not_hide_it() -> None:
    found = find_slow(exact(8, {2: 1.5}, {(2, 5): 4.0}))
    assert found.ranks == {2}


@pytest.mark.parametrize("n", [4, 8, 16])
def test_a_slow_round_blames_nobody(n: int) -> None:
    exchanges = [
        Exchange(turn=e.turn, pair=e.pair, seconds=e.seconds * (3 if e.turn == "1 0" else 1)) for e in exact(n, {})
    ]
    assert not find_slow(exchanges).ranks


def test_where_rounds_have_enough_pairs_a_slow_one_changes_no_factor() -> None:
    exchanges = [
        Exchange(turn=e.turn, pair=e.pair, seconds=e.seconds * (3 if e.turn.startswith("1") else 1))
        for e in exact(16, {5: 2.0})
    ]
    found = find_slow(exchanges)
    assert (found.ranks, found.pairs) == ({5}, set())
    assert found.nodes[0].factor == pytest.approx(2.0)


def test_a_node_that_is_fast_with_one_is_not_slow() -> None:
    exchanges = exact(4, {}, {(0, 1): 2.0, (0, 2): 2.0})
    found = find_slow(exchanges)
    assert (found.ranks, found.pairs) == (set(), {(0, 1), (0, 2)})


def test_half_of_the_nodes_are_never_called_slow_beside_the_other_half() -> None:
    found = find_slow(exact(6, {0: 2.0, 1: 2.0, 2: 2.0, 3: 2.0}))
    assert not found.ranks
    unequal = find_slow(exact(6, {0: 16.0, 1: 8.0, 2: 4.0, 3: 2.0}))
    assert unequal.ranks == {0, 1, 2}, "the rest is no longer most of the nodes"


def test_what_is_below_the_floor_is_not_slow() -> None:
    assert not find_slow(exact(16, {3: 1.04}))
    assert find_slow(exact(16, {3: 1.06})).ranks == {3}
    assert not find_slow(exact(16, {3: 1.06}), Rule(alpha=0.05, floor=0.10))


def test_a_cluster_that_is_too_small_to_tell_says_nothing() -> None:
    exchanges = [Exchange(turn=str(i), pair=(0, 1), seconds=0.1) for i in range(6)]
    assert not find_slow(exchanges)
    assert node_effects(exchanges, Slow(), SUSPECT) == {}
    assert link_effects(exchanges, Slow(), SUSPECT) == {}
    assert not find_slow([])


def test_the_interval_holds_the_factor_and_is_wider_with_more_noise() -> None:
    widths = []
    for noise in (0.01, 0.1):
        cluster = Cluster(n=16, nodes={4: 0.5}, noise=noise)
        exchanges = simulate(cluster, tournament(16, 5), random.Random(3))
        effect = next(e for e in find_slow(exchanges).nodes if e.ranks == (4,))
        assert effect.low < 2.0 < effect.high
        widths.append(math.log(effect.high / effect.low))
    assert widths[1] > 3 * widths[0]


def test_a_suspect_is_confirmed_by_good_partners_alone() -> None:
    assert confirm(exact(6, {2: 2.0}), slow({2})).ranks == {2}
    assert confirm(exact(6, {}), slow({2})).ranks == set()
    with_each_other_only = exact(6, {}, {(2, 3): 5.0})
    assert confirm(with_each_other_only, slow({2, 3})).ranks == set()
    [found] = confirm(exact(6, {2: 2.0}), slow({2, 3})).nodes
    assert (found.ranks, found.partners) == ((2,), (0, 1, 4, 5))


def test_a_suspect_link_is_confirmed_against_what_its_ends_do_with_others() -> None:
    assert confirm(exact(6, {}, {(0, 4): 2.0}), slow(set(), {(0, 4)})).pairs == {(0, 4)}
    assert confirm(exact(6, {}), slow(set(), {(0, 4)})).pairs == set()
    assert confirm(exact(6, {4: 2.0}), slow(set(), {(0, 4)})).pairs == set(), "it is the node's, not the link's"


def test_a_slow_link_is_as_slow_as_it_is_beyond_the_slower_of_its_ends() -> None:
    [found] = confirm(exact(6, {4: 1.5}, {(0, 4): 6.0}), slow(set(), {(0, 4)})).links
    assert found.factor == pytest.approx(4.0)


def test_blame_asks_for_more_than_suspicion() -> None:
    assert BLAME.alpha < SUSPECT.alpha
    assert BLAME.floor > SUSPECT.floor
    assert not confirm(exact(6, {2: 1.06}), slow({2}))


@pytest.mark.parametrize(
    ("values", "expected"), [([3.0], 3.0), ([0.0, 1.0], 0.5), ([0.0, 1.0, 2.0], 1.0), ([0.1, 0.1, 0.1, 0.1, 9.0], 0.1)]
)
def test_hodges_and_lehmann_by_hand(values: list[float], expected: float) -> None:
    assert hodges_lehmann(values) == pytest.approx(expected)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=9), st.floats(-3, 3))
def test_hodges_and_lehmann_moves_with_the_values(values: list[float], shift: float) -> None:
    moved = hodges_lehmann([value + shift for value in values])
    assert moved == pytest.approx(hodges_lehmann(values) + shift, abs=1e-9)
    assert min(values) <= hodges_lehmann(values) <= max(values)


def test_far_residuals_are_pulled_in_and_none_is_no_noise_at_all() -> None:
    calm = [0.01, -0.01] * 20
    assert scale(calm, 40) == pytest.approx(0.01)
    assert scale([*calm, 5.0], 40) < 0.02
    assert 0 < scale([0.0] * 10, 9) < 0.01


@settings(deadline=None, max_examples=20)
@given(st.permutations(range(6)), st.integers(0, 5))
def test_names_of_nodes_and_the_order_of_exchanges_do_not_matter(order: list[int], rank: int) -> None:
    exchanges = [
        Exchange(turn=e.turn, pair=_ordered(order[e.pair[0]], order[e.pair[1]]), seconds=e.seconds)
        for e in reversed(exact(6, {rank: 2.0}))
    ]
    assert find_slow(exchanges).ranks == {order[rank]}


def _ordered(one: int, other: int) -> Pair:
    return min(one, other), max(one, other)


@pytest.mark.parametrize("n", [4, 16])
@pytest.mark.parametrize(("drift", "spikes"), [(0.0, 0.0), (0.2, 0.0), (0.0, 0.1)])
def test_simulated_nobody_is_blamed_in_a_fine_cluster(n: int, drift: float, spikes: float) -> None:
    assert rates(Cluster(n=n, noise=0.05, drift=drift, spikes=spikes), 25, seed=2).blamed == 0.0


@pytest.mark.parametrize("n", [4, 16])
def test_simulated_a_node_of_half_the_speed_is_found_alone(n: int) -> None:
    found = rates(Cluster(n=n, noise=0.05, nodes={1: 0.5}), 25, seed=3)
    assert found.exactly >= 0.96
    assert found.blamed <= 0.04


def test_simulated_a_node_ten_per_cent_slower_is_mostly_found_with_three_per_cent_noise() -> None:
    found = rates(Cluster(n=16, noise=0.03, nodes={1: 0.9}), 25, seed=4)
    assert found.exactly >= 0.7
    assert found.blamed <= 0.04
