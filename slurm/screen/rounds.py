"""Rounds in which the nodes of a cluster exchange data in pairs, all pairs at once.

Local rank i of a node exchanges with local rank i of the other node, so that a rail (a GPU and its
NIC) only meets the same rail of other nodes.
"""

from collections.abc import Collection, Sequence

from parbench.bench.plan.groups import Pair, count_rounds, list_round_pairs

Round = tuple[Pair, ...]
"""The pairs of nodes that exchange data at the same time.

A pair has the indices of two nodes, the smaller first. Each node is in at most one pair.
"""
_MIN_ROUNDS_OF_THREE = 12
"""The least number of rounds of three nodes, because a round of three nodes has a single pair."""


def plan_tournament(num_nodes: int, min_rounds: int) -> list[Round]:
    """Return at least ``min_rounds`` rounds, in each of which ``num_nodes`` nodes form pairs.

    With an odd number of nodes, one node pauses in each round. No pair occurs again until every
    node has met every other node. If the rounds repeat after that, their number is rounded up, so
    that all pairs occur equally often. Three nodes get at least 12 rounds, because each round then
    has a single pair.
    """
    available = count_rounds(num_nodes)
    if num_nodes == 3:
        min_rounds = max(min_rounds, _MIN_ROUNDS_OF_THREE)
    count = min_rounds
    if available < min_rounds:
        count = -(-min_rounds // available) * available
    return [list_round_pairs(num_nodes, index % available) for index in range(count)]


def plan_confirmation(num_nodes: int, suspects: Collection[int], min_rounds: int) -> list[Round]:
    """Return rounds of pairs of nodes for a second measurement of the nodes that looked slow.

    Each suspect exchanges data with changing good nodes in at least ``min_rounds`` rounds (with
    three nodes in at least 12). The remaining good nodes exchange data with each other. The
    durations of the suspects are compared with those of these good pairs.

    Args:
        num_nodes: the number of all nodes.
        suspects: the indices of the nodes that looked slow. All other nodes are good.
        min_rounds: the least number of rounds for each suspect.
    """
    tested = sorted(suspects)
    good = [node for node in range(num_nodes) if node not in suspects]
    batch_size = max(1, min(len(tested), len(good) - 2))
    if num_nodes == 3:
        min_rounds = max(min_rounds, _MIN_ROUNDS_OF_THREE)
    rounds = []
    for index in range(min_rounds):
        shift = index % len(good)
        partners = good[shift:] + good[:shift]
        for start in range(0, len(tested), batch_size):
            batch = tested[start : start + batch_size]
            pairs = list(zip(batch, partners, strict=False))
            rounds.append(_sort_pairs(pairs + _pair_up(partners[len(batch) :])))
            if len(partners) < len(batch) + 2:
                rounds.append(_sort_pairs(_pair_up(partners)))
    return rounds


def _pair_up(nodes: Sequence[int]) -> list[Pair]:
    """Return pairs of successive nodes. The last node of an odd number is left out."""
    return list(zip(nodes[::2], nodes[1::2], strict=False))


def _sort_pairs(pairs: Collection[Pair]) -> Round:
    """Return a round of these pairs in ascending order, the smaller index of each pair first."""
    return tuple(sorted((min(pair), max(pair)) for pair in pairs))
