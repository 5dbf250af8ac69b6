"""Every rank meets every other once, in rounds of disjoint pairs."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.errors import UserError
from bench.rounds import format_pairs, num_rounds, pairs_of, parse_pairs, round_pairs


def tournament(n: int) -> list[tuple[tuple[int, int], ...]]:
    return [round_pairs(n, index) for index in range(num_rounds(n))]


@given(st.integers(2, 40))
def test_every_pair_meets_exactly_once(n: int) -> None:
    met = [pair for pairs in tournament(n) for pair in pairs]
    assert sorted(met) == list(itertools.combinations(range(n), 2))


@given(st.integers(2, 40))
def test_in_a_round_nobody_is_in_two_pairs_and_at_most_one_rests(n: int) -> None:
    for pairs in tournament(n):
        ranks = [rank for pair in pairs for rank in pair]
        assert len(set(ranks)) == len(ranks) == n - n % 2


@pytest.mark.parametrize("n", [3, 5, 7, 9])
def test_of_an_odd_number_every_rank_rests_once(n: int) -> None:
    resting = [set(range(n)) - {rank for pair in pairs for rank in pair} for pairs in tournament(n)]
    assert sorted(rank for ranks in resting for rank in ranks) == list(range(n))


@pytest.mark.parametrize(("n", "rounds"), [(1, 1), (2, 1), (3, 3), (4, 3), (5, 5), (8, 7)])
def test_there_is_one_round_less_than_ranks_or_as_many_where_they_are_odd(n: int, rounds: int) -> None:
    assert num_rounds(n) == rounds


def test_four_ranks_by_hand() -> None:
    assert tournament(4) == [((0, 3), (1, 2)), ((0, 2), (1, 3)), ((0, 1), (2, 3))]
    assert tournament(1) == [()]


@pytest.mark.parametrize("n", [6, 8, 16, 64])
def test_any_three_rounds_in_a_row_tell_nodes_apart(n: int) -> None:
    """Rounds in a row whose pairs made a bipartite graph could not tell one side's slowness from the other's."""
    for first in range(num_rounds(n) - 2):
        sides = {0: 1}
        pairs = [pair for index in range(first, first + 3) for pair in round_pairs(n, index)]
        for _ in range(n):
            for one, other in [*pairs, *[pair[::-1] for pair in pairs]]:
                if one in sides:
                    sides.setdefault(other, -sides[one])
        assert len(sides) == n, "every rank is reached"
        assert any(sides[one] == sides[other] for one, other in pairs)


def test_a_round_that_there_is_not_is_refused_with_the_numbers() -> None:
    with pytest.raises(UserError, match="round 3 is not one of the 3 rounds of 4 ranks, 0 to 2"):
        round_pairs(4, 3)
    with pytest.raises(UserError, match="round -1 is not one"):
        round_pairs(4, -1)


def test_pairs_are_read_and_written() -> None:
    assert parse_pairs("3-0  1-2", 4) == ((0, 3), (1, 2))
    assert format_pairs(((0, 3), (1, 2))) == "0-3 1-2"
    assert parse_pairs("", 4) == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0-4", r"pairs '0-4': rank 4 is not one of the 4 ranks"),
        ("0-1 1-2", "rank 1 is named twice; a rank meets one other in a round"),
        ("2-2", "rank 2 is named twice"),
        ("0:1", "'0:1' is no pair; write two ranks as 0-3"),
        ("0-1-2", "'0-1-2' is no pair"),
    ],
)
def test_pairs_that_cannot_be_are_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_pairs(text, 4)


def test_given_pairs_come_before_a_round() -> None:
    assert pairs_of(4, 0, "0-1") == ((0, 1),)
    assert pairs_of(4, 2, " ") == round_pairs(4, 2)
