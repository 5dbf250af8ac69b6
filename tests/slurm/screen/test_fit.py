"""Slow nodes and links are found from exchange times, and good ones are not blamed."""

import math
import random
from collections.abc import Mapping

import pytest

from parbench.bench.plan.groups import Pair, list_round_pairs
from parbench.slurm.screen.fit import Effect, Exchange, Rule, Slow, confirm, find_slow
from parbench.slurm.screen.run import tournament
from tests.support.screening import Cluster, estimate_rates, simulate

NO_NODES: dict[int, float] = {}
NO_LINKS: dict[Pair, float] = {}


def make_exchanges(
    num_nodes: int,
    nodes: Mapping[int, float] = NO_NODES,
    links: Mapping[Pair, float] = NO_LINKS,
    *,
    slow_round: int | None = None,
) -> list[Exchange]:
    """Build a tournament without noise from the slowdown factors of nodes and links.

    A pair takes as long as the slower of its nodes, or its link. All pairs of ``slow_round`` take
    three times as long.
    """
    exchanges = []
    num_repeats = 4 if num_nodes == 3 else 2
    for repeat in range(num_repeats):
        for index in range(num_nodes - 1 + num_nodes % 2):
            seconds = 0.3 if index == slow_round else 0.1
            for pair in list_round_pairs(num_nodes, index):
                node_factors = [nodes.get(rank, 1.0) for rank in pair]
                factor = max(*node_factors, links.get(pair, 1.0))
                turn = f"{index} {repeat}"
                exchanges.append(Exchange(turn=turn, pair=pair, seconds=seconds * factor))
    return exchanges


@pytest.mark.parametrize("factor", [1.2, 8.0])
@pytest.mark.parametrize(("num_nodes", "rank"), [(3, 0), (5, 2), (16, 8)])
def test_find_slow_node(num_nodes: int, rank: int, factor: float) -> None:
    slow = find_slow(make_exchanges(num_nodes, {rank: factor}))
    [effect] = slow.nodes
    assert effect.ranks == (rank,)
    assert effect.factor == pytest.approx(factor)
    assert len(effect.partners) == num_nodes - 1
    assert slow.pairs == set()


@pytest.mark.parametrize(("num_nodes", "pair"), [(4, (0, 2)), (5, (1, 4)), (16, (3, 9))])
def test_find_slow_link(num_nodes: int, pair: Pair) -> None:
    slow = find_slow(make_exchanges(num_nodes, links={pair: 2.0}))
    [effect] = slow.links
    assert effect.ranks == pair
    assert effect.factor == pytest.approx(2.0)
    assert slow.ranks == set()


@pytest.mark.parametrize("num_nodes", [3, 5, 16])
def test_find_nothing_in_a_good_cluster(num_nodes: int) -> None:
    exchanges = make_exchanges(num_nodes)
    assert find_slow(exchanges) == Slow()
    exchanges = make_exchanges(num_nodes, slow_round=1)
    assert find_slow(exchanges).ranks == set()


def test_link_of_a_slow_node_is_not_blamed() -> None:
    nodes = {2: 1.5}
    links = {(2, 5): 4.0, (0, 1): 2.0}
    slow = find_slow(make_exchanges(8, nodes, links))
    assert slow.ranks == {2}
    assert slow.pairs == {(0, 1)}


def test_find_at_most_half_of_the_nodes() -> None:
    equally_slow = make_exchanges(6, {0: 2.0, 1: 2.0, 2: 2.0, 3: 2.0})
    assert find_slow(equally_slow).ranks == set()
    differently_slow = make_exchanges(6, {0: 16.0, 1: 8.0, 2: 4.0, 3: 2.0})
    assert find_slow(differently_slow).ranks == {0, 1, 2}


def test_find_nothing_below_the_threshold() -> None:
    exchanges = make_exchanges(16, {3: 1.04})
    assert find_slow(exchanges).ranks == set()
    exchanges = make_exchanges(16, {3: 1.06})
    assert find_slow(exchanges).ranks == {3}
    high_threshold = Rule(alpha=0.05, floor=0.10)
    assert find_slow(exchanges, high_threshold).ranks == set()


def find_slow_node(noise: float) -> Effect:
    """Return the effect of a node with half the speed in a noisy cluster."""
    cluster = Cluster(num_nodes=16, node_speeds={4: 0.5}, noise=noise)
    exchanges = simulate(cluster, tournament(16, 5), random.Random(3))
    nodes = find_slow(exchanges).nodes
    return next(effect for effect in nodes if effect.ranks == (4,))


def test_interval_contains_the_factor_and_grows_with_noise() -> None:
    precise = find_slow_node(noise=0.01)
    noisy = find_slow_node(noise=0.1)
    assert precise.low < 2.0 < precise.high
    assert noisy.low < 2.0 < noisy.high
    precise_width = math.log(precise.high / precise.low)
    noisy_width = math.log(noisy.high / noisy.low)
    assert noisy_width > 3 * precise_width
    half_width = math.log(noisy.high / noisy.factor)
    threshold = math.log(noisy.least)
    assert threshold > 1.2 * half_width, "the threshold allows for 16 comparisons"


def test_confirm_a_node_only_with_good_partners() -> None:
    suspects = find_slow(make_exchanges(6, {2: 4.0, 3: 4.0}))
    good = make_exchanges(6, {2: 1.06}, {(2, 3): 5.0})
    assert confirm(good, suspects).ranks == set()
    slow = make_exchanges(6, {2: 2.0})
    [effect] = confirm(slow, suspects).nodes
    assert effect.ranks == (2,)
    assert effect.partners == (0, 1, 4, 5)


def test_confirm_a_link_relative_to_its_nodes() -> None:
    link = (0, 4)
    suspects = find_slow(make_exchanges(6, links={link: 4.0}))
    good = make_exchanges(6)
    assert confirm(good, suspects).pairs == set()
    slow_node = make_exchanges(6, {4: 2.0})
    assert confirm(slow_node, suspects).pairs == set()
    slower_link = make_exchanges(6, {4: 1.5}, {link: 6.0})
    [effect] = confirm(slower_link, suspects).links
    assert effect.factor == pytest.approx(4.0)


def test_drift_between_rounds_blames_no_node() -> None:
    cluster = Cluster(num_nodes=4, drift=0.2)
    rates = estimate_rates(cluster, trials=100, seed=3)
    assert rates.blamed == 0.0


def test_slow_node_of_four_is_confirmed() -> None:
    cluster = Cluster(num_nodes=4, node_speeds={1: 0.5})
    rates = estimate_rates(cluster, trials=25, seed=3)
    assert rates.exact >= 0.96
    assert rates.blamed <= 0.04


@pytest.mark.full
def test_spikes_rarely_blame_a_node() -> None:
    # Over 1000 trials, 1.6 % blame a good node.
    cluster = Cluster(num_nodes=16, spike_share=0.1)
    rates = estimate_rates(cluster, trials=100, seed=3)
    assert rates.blamed <= 0.04


@pytest.mark.full
def test_slightly_slow_node_of_16_is_confirmed() -> None:
    cluster = Cluster(num_nodes=16, node_speeds={1: 0.9}, noise=0.03)
    rates = estimate_rates(cluster, trials=25, seed=3)
    assert rates.exact >= 0.7
    assert rates.blamed <= 0.04
