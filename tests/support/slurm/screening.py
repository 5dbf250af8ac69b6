"""Screenings of simulated clusters, and how often they blame the right nodes and rails."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from parbench.slurm.screen.ratios import Endpoint, Exchange, confirm_slow, find_slow
from parbench.slurm.screen.rounds import Round, plan_confirmation, plan_tournament

NUM_ROUNDS = 5
BASE_SECONDS = 0.1
MAX_SPIKE_FACTOR = 3.0


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Simulated nodes.

    Attributes:
        speeds: the speeds of slow nodes and rails relative to good ones.
        noise: the standard deviation of the logarithm of an exchange's duration.
        drift: the standard deviation of the logarithm of a round's duration.
        spike_share: the share of exchanges that take up to three times as long.
    """

    num_nodes: int
    rails: int = 1
    speeds: Mapping[Endpoint, float] = field(default_factory=dict)
    noise: float = 0.03
    drift: float = 0.0
    spike_share: float = 0.0

    def exchange_speed(self, nodes: Sequence[int], rail: int) -> float:
        """Return the speed of the slowest of two nodes and their rails."""
        speeds = [1.0]
        for node in nodes:
            speeds += [self.speeds.get(Endpoint(node), 1.0)]
            speeds += [self.speeds.get(Endpoint(node, rail), 1.0)]
        return min(speeds)


def simulate(cluster: Cluster, rounds: Sequence[Round], rng: random.Random) -> list[Exchange]:
    """Return the exchanges of all rounds."""
    exchanges = []
    for number, pairs in enumerate(rounds):
        drift = rng.gauss(0, cluster.drift)
        for nodes in pairs:
            for rail in range(cluster.rails):
                has_spike = rng.random() < cluster.spike_share
                spike = rng.uniform(0, math.log(MAX_SPIKE_FACTOR)) if has_spike else 0.0
                noise = rng.gauss(0, cluster.noise)
                seconds = BASE_SECONDS / cluster.exchange_speed(nodes, rail)
                seconds *= math.exp(drift + noise + spike)
                exchanges.append(
                    Exchange(round=number, nodes=nodes, rail=rail, seconds=seconds)
                )
    return exchanges


def screen_cluster(cluster: Cluster, rng: random.Random) -> set[Endpoint]:
    """Return the suspects of a tournament that a second measurement confirms."""
    rounds = plan_tournament(cluster.num_nodes, NUM_ROUNDS)
    suspects = find_slow(simulate(cluster, rounds, rng))
    if not suspects:
        return set()
    tested = {ratio.endpoint.node for ratio in suspects}
    rounds = plan_confirmation(cluster.num_nodes, tested, NUM_ROUNDS)
    confirmed = confirm_slow(simulate(cluster, rounds, rng), suspects)
    return {ratio.endpoint for ratio in confirmed}


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Shares of trials by their result."""

    blamed: float  # a good node or rail was called slow
    exact: float  # exactly the slow nodes and rails were called slow


def estimate_rates(cluster: Cluster, trials: int, seed: int) -> Rates:
    rng = random.Random(seed)
    slow = set(cluster.speeds)
    results = [screen_cluster(cluster, rng) for _ in range(trials)]
    num_blamed = sum(not result <= slow for result in results)
    num_exact = sum(result == slow for result in results)
    return Rates(blamed=num_blamed / trials, exact=num_exact / trials)
