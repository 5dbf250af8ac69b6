"""The rounds in which nodes meet."""

from collections import Counter

import pytest

from parbench.bench.plan.groups import Pair
from parbench.slurm.screen.rounds import plan_confirmation, plan_tournament


@pytest.mark.parametrize(
    ("num_nodes", "num_rounds"),
    [
        (3, 12),
        (4, 6),
        (64, 5),
    ],
)
def test_tournament_has_enough_rounds(num_nodes: int, num_rounds: int) -> None:
    rounds = plan_tournament(num_nodes, 5)
    assert len(rounds) == num_rounds
    counts = Counter(pair for pairs in rounds for pair in pairs)
    assert len(set(counts.values())) == 1, "all pairs meet equally often"


@pytest.mark.parametrize(
    ("num_nodes", "suspects"),
    [
        (3, {2}),
        (5, {0, 4}),
        (16, {1, 2, 3, 4, 5, 6, 7}),
    ],
)
def test_confirmation_pairs_suspects_with_good_nodes(
    num_nodes: int, suspects: set[int]
) -> None:
    rounds = plan_confirmation(num_nodes, suspects, 5)
    counts: Counter[Pair] = Counter()
    for pairs in rounds:
        nodes = [node for pair in pairs for node in pair]
        assert len(set(nodes)) == len(nodes)
        counts.update(pairs)
    for suspect in suspects:
        partners = {sum(pair) - suspect for pair in counts if suspect in pair}
        assert not partners & suspects
        assert len(partners) == min(5, num_nodes - len(suspects))
    good = sum(count for pair, count in counts.items() if suspects.isdisjoint(pair))
    assert good >= 3, "suspects are compared with good pairs"
