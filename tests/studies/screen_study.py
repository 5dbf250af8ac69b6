"""Error rates of ``parbench slurm screen`` on simulated clusters of several sizes.

python -m tests.studies.screen_study [--trials 200] [--noise 0.05] [--rounds 5]

Prints how often a screening blames a good node or link, with the upper end of the 95 % interval,
and how often it finds exactly the slow node or link. tests/slurm/screen/test_fit.py runs a small
part.
"""

import argparse
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from scipy.stats import binomtest  # type: ignore[import-untyped]

from parbench.bench.plan.groups import Pair, parse_pairs, round_pairs
from parbench.slurm.screen.fit import Exchange, Slow, confirm, find_slow
from parbench.slurm.screen.run import Turns, confirmation, tournament

DEFAULT_ROUNDS = 5
NODE_COUNTS = (4, 16, 64)
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
                pairs = round_pairs(cluster.num_nodes, int(text))
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


def screen_cluster(cluster: Cluster, rng: random.Random, num_rounds: int) -> Slow:
    """Return the suspects of a tournament that a second run confirms."""
    turns = tournament(cluster.num_nodes, num_rounds)
    suspects = find_slow(simulate(cluster, turns, rng))
    if not suspects:
        return suspects
    turns = confirmation(cluster.num_nodes, suspects.ranks, suspects.pairs, num_rounds)
    return confirm(simulate(cluster, turns, rng), suspects)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Shares of trials by their result."""

    blamed: float  # a good node or link was called slow
    exact: float  # exactly the slow nodes and links were called slow


def estimate_rates(
    cluster: Cluster, trials: int, seed: int, num_rounds: int = DEFAULT_ROUNDS
) -> Rates:
    rng = random.Random(seed)
    slow_ranks = set(cluster.node_speeds)
    slow_pairs = set(cluster.link_speeds)
    num_blamed = 0
    num_exact = 0
    for _ in range(trials):
        result = screen_cluster(cluster, rng, num_rounds)
        if not (result.ranks <= slow_ranks and result.pairs <= slow_pairs):
            num_blamed += 1
        if result.ranks == slow_ranks and result.pairs == slow_pairs:
            num_exact += 1
    return Rates(blamed=num_blamed / trials, exact=num_exact / trials)


def upper_bound(rate: float, trials: int) -> float:
    """Return the upper end of a rate's 95 % Wilson interval."""
    interval = binomtest(round(rate * trials), trials).proportion_ci(method="wilson")
    return float(interval.high)


def example_clusters(num_nodes: int, noise: float) -> dict[str, Cluster]:
    rank = num_nodes // 2
    pair = round_pairs(num_nodes, 0)[0]
    good = Cluster(num_nodes=num_nodes, noise=noise)
    slow_node = replace(good, node_speeds={rank: 0.5})
    return {
        "good": good,
        "good, rounds differ by 20 %": replace(good, drift=0.2),
        "good, 10 % of exchanges spike": replace(good, spike_share=0.1),
        "node at 0.5": slow_node,
        "node at 0.8": replace(good, node_speeds={rank: 0.8}),
        "node at 0.9": replace(good, node_speeds={rank: 0.9}),
        "node at 0.5, 10 % spike": replace(slow_node, spike_share=0.1),
        "link at 0.5": replace(good, link_speeds={pair: 0.5}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--noise", type=float, default=0.05)
    parser.add_argument("--rounds", type=int, default=DEFAULT_ROUNDS)
    options = parser.parse_args()
    noise_percent = 100 * options.noise
    print(f"{options.trials} trials, {noise_percent:g} % noise, {options.rounds} rounds")
    row = "{:>5} {:32}{:>17}{:>7}"
    print(row.format("nodes", "cluster", "blamed", "exact"))
    for num_nodes in NODE_COUNTS:
        for name, cluster in example_clusters(num_nodes, options.noise).items():
            rates = estimate_rates(cluster, options.trials, seed=1, num_rounds=options.rounds)
            bound = upper_bound(rates.blamed, options.trials)
            blamed = f"{rates.blamed:.3f} (<{bound:.3f})"
            print(row.format(num_nodes, name, blamed, f"{rates.exact:.2f}"), flush=True)


if __name__ == "__main__":
    main()
