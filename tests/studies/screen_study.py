"""Which nodes and links ``parbench slurm screen`` finds and which it imagines, on simulated clusters.

python -m tests.studies.screen_study [--trials 200] [--noise 0.05] prints, for clusters of several sizes: how often
anything innocent is blamed, with the upper end of that rate's 95 % interval, and how often exactly the one slow node
or link is found, at first sight and after confirmation. A script, not a test:
tests/slurm/screen/test_fit.py holds a small part.
"""

import argparse
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from parbench.bench.plan.groups import Pair, parse_pairs, round_pairs
from parbench.slurm.screen.fit import Exchange, Slow, confirm, find_slow
from parbench.slurm.screen.run import Turns, confirmation, tournament
from tests.studies.gate_study import compute_upper_bound

ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Simulated nodes: the speed of slow ones and of slow links as a share, noise as standard deviations of logs.

    A share of ``spikes`` of all exchanges takes up to three times as long; whole rounds differ by ``drift``.
    """

    n: int
    nodes: Mapping[int, float] = field(default_factory=dict)
    links: Mapping[Pair, float] = field(default_factory=dict)
    noise: float = 0.05
    drift: float = 0.0
    spikes: float = 0.0


def simulate(cluster: Cluster, turns: Turns, rng: random.Random) -> list[Exchange]:
    """Return the exchanges of all turns: a pair is as fast as the slowest of its ends and its link."""
    exchanges = []
    for repeat in range(turns.repeats):
        for text in turns.values:
            pairs = (
                round_pairs(cluster.n, int(text))
                if turns.parameter == "round"
                else parse_pairs(text, cluster.n)
            )
            level = rng.gauss(0, cluster.drift)
            for pair in pairs:
                speed = min(
                    *(cluster.nodes.get(rank, 1.0) for rank in pair), cluster.links.get(pair, 1.0)
                )
                spike = rng.uniform(0, math.log(3)) if rng.random() < cluster.spikes else 0.0
                seconds = 0.1 / speed * math.exp(level + rng.gauss(0, cluster.noise) + spike)
                exchanges.append(Exchange(turn=f"{text} {repeat}", pair=pair, seconds=seconds))
    return exchanges


def screened(cluster: Cluster, rng: random.Random, rounds: int = ROUNDS) -> tuple[Slow, Slow]:
    suspects = find_slow(simulate(cluster, tournament(cluster.n, rounds), rng))
    if not suspects:
        return suspects, suspects
    again = confirmation(cluster.n, suspects.ranks, suspects.pairs, rounds)
    return suspects, confirm(simulate(cluster, again, rng), suspects)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Shares of trials: anything innocent suspected, or blamed; exactly the guilty suspected, or blamed."""

    suspected: float
    blamed: float
    suspected_exactly: float
    exactly: float


def rates(cluster: Cluster, trials: int, seed: int, rounds: int = ROUNDS) -> Rates:
    rng = random.Random(seed)
    guilty = (set(cluster.nodes), set(cluster.links))
    counts = [0, 0, 0, 0]
    for _ in range(trials):
        for place, found in enumerate(screened(cluster, rng, rounds)):
            told = (found.ranks, found.pairs)
            counts[place] += bool(told[0] - guilty[0] or told[1] - guilty[1])
            counts[2 + place] += told == guilty
    first, last, first_exactly, exactly = (count / trials for count in counts)
    return Rates(suspected=first, blamed=last, suspected_exactly=first_exactly, exactly=exactly)


def clusters(n: int, noise: float) -> dict[str, Cluster]:
    return {
        "all fine": Cluster(n=n, noise=noise),
        "all fine, rounds differ by 20 %": Cluster(n=n, noise=noise, drift=0.2),
        "all fine, 10 % of exchanges spike": Cluster(n=n, noise=noise, spikes=0.1),
        "a node at 0.5": Cluster(n=n, noise=noise, nodes={n // 2: 0.5}),
        "a node at 0.8": Cluster(n=n, noise=noise, nodes={n // 2: 0.8}),
        "a node at 0.9": Cluster(n=n, noise=noise, nodes={n // 2: 0.9}),
        "a node at 0.5, 10 % spike": Cluster(n=n, noise=noise, nodes={n // 2: 0.5}, spikes=0.1),
        "a link at 0.5": Cluster(n=n, noise=noise, links={round_pairs(n, 0)[0]: 0.5}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--noise", type=float, default=0.05)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    print(
        f"{options.trials} clusters each, {100 * options.noise:g} % noise, {options.rounds} rounds"
    )
    heads = f"{'innocent suspected':>20}{'blamed (at most)':>20}{'exactly: at first':>20}{'confirmed':>11}"
    print(f"{'nodes':>5} {'cluster':36}{heads}")
    for n in (4, 16, 64):
        for name, cluster in clusters(n, options.noise).items():
            found = rates(cluster, options.trials, 1, options.rounds)
            blamed = (
                f"{found.blamed:.3f} (<{compute_upper_bound(found.blamed, options.trials):.3f})"
            )
            told = f"{found.suspected:20.3f}{blamed:>20}{found.suspected_exactly:20.2f}{found.exactly:11.2f}"
            print(f"{n:5} {name:36}{told}", flush=True)


if __name__ == "__main__":
    main()
