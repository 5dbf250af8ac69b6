"""Screenings of simulated clusters, and how often they blame the right nodes and links."""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from parbench.bench.plan.groups import Pair, list_round_pairs, parse_pairs
from parbench.slurm.screen.fit import Exchange, Slow, confirm, find_slow
from parbench.slurm.screen.run import Turns, confirmation, tournament

NUM_ROUNDS = 5
BASE_SECONDS = 0.1
MAX_SPIKE_FACTOR = 3.0


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Simulated nodes. Speeds are relative to a good node or link.

    Attributes:
        node_speeds: the speeds of slow nodes by rank.
        link_speeds: the speeds of slow links by pair.
        noise: the standard deviation of the logarithm of an exchange's time.
        drift: the standard deviation of the logarithm of a round's time.
        spike_share: the share of exchanges that take up to three times as long.
    """

    num_nodes: int
    node_speeds: Mapping[int, float] = field(default_factory=dict)
    link_speeds: Mapping[Pair, float] = field(default_factory=dict)
    noise: float = 0.05
    drift: float = 0.0
    spike_share: float = 0.0

    def pair_speed(self, pair: Pair) -> float:
        """Return the speed of the slowest of two nodes and their link."""
        speeds = [self.node_speeds.get(rank, 1.0) for rank in pair]
        return min(*speeds, self.link_speeds.get(pair, 1.0))


def simulate(cluster: Cluster, turns: Turns, rng: random.Random) -> list[Exchange]:
    """Return the exchanges of all turns."""
    exchanges = []
    for repeat in range(turns.repeats):
        for text in turns.values:
            if turns.parameter == "round":
                pairs = list_round_pairs(cluster.num_nodes, int(text))
            else:
                pairs = parse_pairs(text, cluster.num_nodes)
            drift = rng.gauss(0, cluster.drift)
            for pair in pairs:
                has_spike = rng.random() < cluster.spike_share
                spike = rng.uniform(0, math.log(MAX_SPIKE_FACTOR)) if has_spike else 0.0
                noise = rng.gauss(0, cluster.noise)
                seconds = (
                    BASE_SECONDS / cluster.pair_speed(pair) * math.exp(drift + noise + spike)
                )
                exchanges.append(Exchange(turn=f"{text} {repeat}", pair=pair, seconds=seconds))
    return exchanges


def screen_cluster(cluster: Cluster, rng: random.Random) -> Slow:
    """Return the suspects of a tournament that a second run confirms."""
    turns = tournament(cluster.num_nodes, NUM_ROUNDS)
    suspects = find_slow(simulate(cluster, turns, rng))
    if not suspects:
        return suspects
    turns = confirmation(cluster.num_nodes, suspects.ranks, suspects.pairs, NUM_ROUNDS)
    return confirm(simulate(cluster, turns, rng), suspects)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Shares of trials by their result."""

    blamed: float  # a good node or link was called slow
    exact: float  # exactly the slow nodes and links were called slow


def estimate_rates(cluster: Cluster, trials: int, seed: int) -> Rates:
    rng = random.Random(seed)
    slow_ranks = set(cluster.node_speeds)
    slow_pairs = set(cluster.link_speeds)
    num_blamed = 0
    num_exact = 0
    for _ in range(trials):
        result = screen_cluster(cluster, rng)
        if not (result.ranks <= slow_ranks and result.pairs <= slow_pairs):
            num_blamed += 1
        if result.ranks == slow_ranks and result.pairs == slow_pairs:
            num_exact += 1
    return Rates(blamed=num_blamed / trials, exact=num_exact / trials)
