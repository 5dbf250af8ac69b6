"""Who meets whom: enough rounds to tell, and suspects with good partners only."""

import itertools

import pytest

from bench.rounds import Pair, parse_pairs
from slurm.screen_rounds import Turns, confirmation, tournament

CASES: list[tuple[int, set[int], set[Pair]]] = [
    (3, {2}, set()),
    (4, {3}, set()),
    (4, set(), {(0, 3)}),
    (4, {1}, {(0, 3)}),
    (5, {0, 4}, set()),
    (8, {1, 2}, {(0, 3), (0, 5)}),
    (16, {5}, set()),
    (16, {1, 2, 3, 4, 5, 6, 7}, set()),
]


def met(n: int, turns: Turns) -> list[tuple[Pair, ...]]:
    assert turns.parameter == "pairs"
    return [parse_pairs(text, n) for text in turns.values]


@pytest.mark.parametrize(
    ("n", "rounds", "num_values", "repeats"),
    [(3, 5, 3, 4), (4, 5, 3, 2), (4, 3, 3, 1), (4, 7, 3, 3), (5, 5, 5, 1), (8, 5, 5, 1), (64, 5, 5, 1), (6, 12, 5, 3)],
)
def test_a_small_tournament_is_whole_and_repeated_and_of_a_large_one_some_rounds(
    n: int, rounds: int, num_values: int, repeats: int
) -> None:
    turns = tournament(n, rounds)
    assert (len(turns.values), turns.repeats) == (num_values, repeats)
    assert len(turns) == num_values * repeats >= rounds
    assert turns.values == tuple(map(str, range(num_values)))


def test_repeats_are_outermost_so_that_a_round_comes_at_different_times() -> None:
    assert tournament(4, 5).settings() == ["repeat=0,1", "round=0,1,2"]


@pytest.mark.parametrize(("n", "nodes", "links"), CASES)
def test_every_suspect_node_meets_several_good_ones_and_no_other_suspect(
    n: int, nodes: set[int], links: set[Pair]
) -> None:
    good = set(range(n)) - nodes
    pairs = [pair for turn in met(n, confirmation(n, nodes, links, 5)) for pair in turn]
    for node in nodes:
        partners = {sum(pair) - node for pair in pairs if node in pair}
        assert partners <= good
        assert len(partners) == min(5, len(good))


@pytest.mark.parametrize(("n", "nodes", "links"), CASES)
def test_good_nodes_meet_beside_the_suspects_or_between(n: int, nodes: set[int], links: set[Pair]) -> None:
    turns = confirmation(n, nodes, links, 5)
    good = [pair for turn in met(n, turns) for pair in turn if not nodes & set(pair) and pair not in links]
    assert len(good) * turns.repeats >= 3
    assert len(set(good)) >= min(2, n - len(nodes) - 1)


@pytest.mark.parametrize(("n", "nodes", "links"), [case for case in CASES if case[2]])
def test_a_suspect_link_meets_and_so_do_its_ends_with_others(n: int, nodes: set[int], links: set[Pair]) -> None:
    pairs = [pair for turn in met(n, confirmation(n, nodes, links, 5)) for pair in turn]
    for link in links:
        assert link in pairs
        for end in link:
            assert any(end in pair and pair != link and not nodes & set(pair) for pair in pairs)


@pytest.mark.parametrize(
    ("n", "links"), [(4, {(0, 3)}), (8, {(0, 3), (0, 5)}), (64, {(2 * i, 2 * i + 1) for i in range(11)})]
)
def test_a_suspect_link_meets_often_enough_for_chance_not_to_blame_it(n: int, links: set[Pair]) -> None:
    turns = confirmation(n, set(), links, 5)
    for link in links:
        assert sum(link in turn for turn in met(n, turns)) * turns.repeats >= 4


@pytest.mark.parametrize(("n", "nodes", "links"), CASES)
def test_no_round_is_measured_twice_under_one_name(n: int, nodes: set[int], links: set[Pair]) -> None:
    turns = confirmation(n, nodes, links, 5)
    assert len(set(turns.values)) == len(turns.values)
    assert all(turns.values)


def test_four_nodes_with_one_suspect_by_hand() -> None:
    turns = confirmation(4, {3}, set(), 5)
    assert turns.values == ("0-3 1-2", "0-2 1-3", "0-1 2-3")
    assert turns.settings() == ["repeat=0,1", "pairs=0-3 1-2,0-2 1-3,0-1 2-3"]


def test_one_that_nobody_suspects_is_left_alone_with_the_others() -> None:
    turns = met(16, confirmation(16, {5}, set(), 5))
    assert len(turns) == 5
    for turn in turns:
        ranks = list(itertools.chain.from_iterable(turn))
        assert sorted(ranks) == list(range(16))
