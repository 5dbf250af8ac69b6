"""Slow nodes and links are found from exchange times, and good ones are not blamed."""

import math
import random
from collections.abc import Mapping

import pytest

from parbench.bench.plan.groups import Pair, round_pairs
from parbench.slurm.screen.fit import (
    Exchange,
    Rule,
    Slow,
    confirm,
    find_slow,
)
from parbench.slurm.screen.run import tournament
from tests.studies.screen_study import Cluster, rates, simulate


def make_exchanges(
    num_nodes: int,
    nodes: Mapping[int, float] | None = None,
    links: Mapping[Pair, float] | None = None,
    *,
    slow_round: int | None = None,
) -> list[Exchange]:
    """Build a tournament without noise from the slowdown factors of nodes and links.

    A pair takes as long as the slower of its nodes, or its link. All pairs of ``slow_round`` take
    three times as long.
    """
    exchanges = []
    repeats = 4 if num_nodes == 3 else 2
    for repeat in range(repeats):
        for index in range(num_nodes - 1 + num_nodes % 2):
            for pair in round_pairs(num_nodes, index):
                node_factor = max((nodes or {}).get(rank, 1.0) for rank in pair)
                factor = max(node_factor, (links or {}).get(pair, 1.0))
                seconds = 0.3 * factor if index == slow_round else 0.1 * factor
                exchange = Exchange(turn=f"{index} {repeat}", pair=pair, seconds=seconds)
                exchanges.append(exchange)
    return exchanges


def find_slow_in(
    num_nodes: int,
    nodes: Mapping[int, float] | None = None,
    links: Mapping[Pair, float] | None = None,
    *,
    slow_round: int | None = None,
) -> Slow:
    return find_slow(make_exchanges(num_nodes, nodes, links, slow_round=slow_round))


@pytest.mark.parametrize("factor", [1.2, 8.0])
@pytest.mark.parametrize(("num_nodes", "rank"), [(3, 0), (5, 2), (16, 8)])
def test_find_slow_node(num_nodes: int, rank: int, factor: float) -> None:
    slow = find_slow_in(num_nodes, {rank: factor})
    assert slow.ranks == {rank}
    assert slow.pairs == set()
    assert slow.nodes[0].factor == pytest.approx(factor)
    assert len(slow.nodes[0].partners) == num_nodes - 1


@pytest.mark.parametrize(("num_nodes", "pair"), [(4, (0, 2)), (5, (1, 4)), (16, (3, 9))])
def test_find_slow_link(num_nodes: int, pair: Pair) -> None:
    slow = find_slow_in(num_nodes, links={pair: 2.0})
    assert slow.ranks == set()
    assert slow.pairs == {pair}
    assert slow.links[0].factor == pytest.approx(2.0)


@pytest.mark.parametrize("num_nodes", [3, 5, 16])
def test_find_nothing_in_a_good_cluster(num_nodes: int) -> None:
    assert find_slow_in(num_nodes) == Slow()
    assert find_slow_in(num_nodes, slow_round=1).ranks == set()


@pytest.mark.parametrize(
    ("num_nodes", "nodes", "links", "slow_ranks", "slow_pairs"),
    [
        (8, {2: 4.0}, {(0, 5): 2.0}, {2}, {(0, 5)}),
        (8, {2: 1.5}, {(2, 5): 4.0}, {2}, set()),
        (4, {}, {(0, 1): 2.0, (0, 2): 2.0}, set(), {(0, 1), (0, 2)}),
    ],
    ids=["apart", "link-of-slow-node", "two-of-three-links"],
)
def test_find_slow_nodes_and_links(
    num_nodes: int,
    nodes: dict[int, float],
    links: dict[Pair, float],
    slow_ranks: set[int],
    slow_pairs: set[Pair],
) -> None:
    slow = find_slow_in(num_nodes, nodes, links)
    assert slow.ranks == slow_ranks
    assert slow.pairs == slow_pairs


def test_find_at_most_half_of_the_nodes() -> None:
    assert find_slow_in(6, {0: 2.0, 1: 2.0, 2: 2.0, 3: 2.0}).ranks == set()
    assert find_slow_in(6, {0: 16.0, 1: 8.0, 2: 4.0, 3: 2.0}).ranks == {0, 1, 2}


def test_find_nothing_below_the_threshold() -> None:
    assert not find_slow([])
    assert find_slow_in(16, {3: 1.04}).ranks == set()
    assert find_slow_in(16, {3: 1.06}).ranks == {3}
    assert find_slow(make_exchanges(16, {3: 1.06}), Rule(alpha=0.05, floor=0.10)).ranks == set()


def test_interval_contains_the_factor_and_grows_with_noise() -> None:
    widths = []
    for noise in (0.01, 0.1):
        cluster = Cluster(n=16, nodes={4: 0.5}, noise=noise)
        slow = find_slow(simulate(cluster, tournament(16, 5), random.Random(3)))
        effect = next(effect for effect in slow.nodes if effect.ranks == (4,))
        assert effect.low < 2.0 < effect.high
        widths.append(math.log(effect.high / effect.low))
    assert widths[1] > 3 * widths[0]
    reach = math.log(effect.high / effect.factor)
    assert math.log(effect.least) > 1.2 * reach, "the threshold allows for 16 comparisons"


SUSPECT_NODES = find_slow_in(6, {2: 4.0, 3: 4.0})
SUSPECT_LINK = find_slow_in(6, links={(0, 4): 4.0})


def test_confirm_a_node_only_with_good_partners() -> None:
    assert confirm(make_exchanges(6, {2: 1.06}), SUSPECT_NODES).ranks == set()
    assert confirm(make_exchanges(6, links={(2, 3): 5.0}), SUSPECT_NODES).ranks == set()
    [effect] = confirm(make_exchanges(6, {2: 2.0}), SUSPECT_NODES).nodes
    assert effect.ranks == (2,)
    assert effect.partners == (0, 1, 4, 5)


def test_confirm_a_link_relative_to_its_nodes() -> None:
    assert confirm(make_exchanges(6, links={(0, 4): 2.0}), SUSPECT_LINK).pairs == {(0, 4)}
    assert confirm(make_exchanges(6), SUSPECT_LINK).pairs == set()
    assert confirm(make_exchanges(6, {4: 2.0}), SUSPECT_LINK).pairs == set()
    [effect] = confirm(make_exchanges(6, {4: 1.5}, {(0, 4): 6.0}), SUSPECT_LINK).links
    assert effect.factor == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("cluster", "min_found", "max_blamed"),
    [
        (Cluster(n=4, noise=0.05, drift=0.2), 1.0, 0.0),
        (Cluster(n=4, noise=0.05, nodes={1: 0.5}), 0.96, 0.04),
        # Over 1000 trials with spikes, 1.6 % blame a good node.
        pytest.param(Cluster(n=16, noise=0.05, spikes=0.1), 0.0, 0.04, marks=pytest.mark.full),
        pytest.param(Cluster(n=16, noise=0.03, nodes={1: 0.9}), 0.7, 0.04, marks=pytest.mark.full),
    ],
    ids=["4-drift", "4-slow", "16-spikes", "16-slightly-slow"],
)
def test_error_rates_on_simulated_clusters(
    cluster: Cluster, min_found: float, max_blamed: float
) -> None:
    trials = 25 if cluster.nodes else 100
    shares = rates(cluster, trials, seed=3)
    assert shares.exactly >= min_found
    assert shares.blamed <= max_blamed
