"""Slow nodes and rails are found from exchange times, and good ones are not blamed."""

import random
from collections.abc import Mapping

import pytest

from parbench.slurm.screen.ratios import Endpoint, Exchange, confirm_slow, find_slow
from parbench.slurm.screen.rounds import plan_tournament
from tests.support.slurm.screening import Cluster, estimate_rates, simulate

NOTHING: dict[Endpoint, float] = {}


def make_exchanges(
    num_nodes: int,
    factors: Mapping[Endpoint, float] = NOTHING,
    *,
    rails: int = 1,
) -> list[Exchange]:
    """Build a tournament without noise from the slowdown factors of nodes and rails."""
    speeds = {endpoint: 1 / factor for endpoint, factor in factors.items()}
    cluster = Cluster(num_nodes=num_nodes, rails=rails, speeds=speeds, noise=0.0)
    return simulate(cluster, plan_tournament(num_nodes, num_nodes), random.Random(0))


@pytest.mark.parametrize("factor", [1.2, 8.0])
@pytest.mark.parametrize(
    ("num_nodes", "node"),
    [
        (3, 0),
        (4, 3),
        (5, 2),
        (16, 8),
    ],
)
def test_find_slow_node(num_nodes: int, node: int, factor: float) -> None:
    [ratio] = find_slow(make_exchanges(num_nodes, {Endpoint(node): factor}))
    assert ratio.endpoint == Endpoint(node)
    assert ratio.ratio == pytest.approx(factor)
    assert len(ratio.partners) == num_nodes - 1


def test_find_several_slow_nodes_and_rails() -> None:
    nodes = [Endpoint(0), Endpoint(1), Endpoint(7)]
    rail = Endpoint(2, 1)
    factors = dict.fromkeys(nodes, 8.0)
    slow = find_slow(make_exchanges(16, {**factors, rail: 2.0}, rails=2))
    assert [ratio.endpoint for ratio in slow] == [*nodes, rail]


def test_find_nothing_below_the_threshold() -> None:
    assert find_slow(make_exchanges(16, {Endpoint(3): 1.04})) == []
    [ratio] = find_slow(make_exchanges(16, {Endpoint(3): 1.06}))
    assert ratio.threshold == 1.05


def test_confirm_a_node_only_with_good_partners() -> None:
    suspects = find_slow(make_exchanges(16, {Endpoint(2): 4.0, Endpoint(3): 4.0}))
    assert len(suspects) == 2
    assert confirm_slow(make_exchanges(16), suspects) == []
    [ratio] = confirm_slow(make_exchanges(16, {Endpoint(2): 2.0}), suspects)
    assert ratio.endpoint == Endpoint(2)
    assert len(ratio.partners) == 14
    assert 3 not in ratio.partners


@pytest.mark.parametrize(
    ("cluster", "exact"),
    [
        (Cluster(num_nodes=4, drift=0.2), 1.0),
        (Cluster(num_nodes=4, speeds={Endpoint(1): 0.5}, noise=0.05), 0.96),
        (Cluster(num_nodes=16, speeds={Endpoint(2): 0.9}), 0.95),
        (Cluster(num_nodes=16, rails=8, speeds={Endpoint(2, 3): 0.9}), 0.95),
        (Cluster(num_nodes=16, spike_share=0.1), 0.96),
    ],
    ids=["drift", "node-of-4", "node-of-16", "rail-of-16", "spikes"],
)
def test_simulated_screening_is_exact(cluster: Cluster, exact: float) -> None:
    """The study tests/studies/screening.py has the rates of more clusters."""
    rates = estimate_rates(cluster, trials=50, seed=3)
    assert rates.exact >= exact
    assert rates.blamed <= 0.02
