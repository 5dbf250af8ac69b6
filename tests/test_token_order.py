"""Every token is dealt to one rank, in ascending order, as many to each, and finds its way back."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.context.token_order import ORDERS, indivisible, inverse, positions

each_order = pytest.mark.parametrize("order", ORDERS)
SIZES = st.tuples(st.sampled_from(ORDERS), st.integers(1, 9), st.integers(1, 6))


@pytest.mark.parametrize(
    ("order", "dealt"),
    [
        ("contiguous", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("striped", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("zigzag", [[0, 1, 6, 7], [2, 3, 4, 5]]),
    ],
)
def test_eight_tokens_on_two_ranks(order: str, dealt: list[list[int]]) -> None:
    assert [positions(order, 8, rank, 2) for rank in range(2)] == dealt


def test_zigzag_pairs_each_chunk_with_its_mirror() -> None:
    assert [positions("zigzag", 6, rank, 3) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]


@given(SIZES)
def test_every_token_is_dealt_once_and_ascending(size: tuple[str, int, int]) -> None:
    order, ranks, each = size
    sequence = ranks * each * 2
    dealt = [positions(order, sequence, rank, ranks) for rank in range(ranks)]
    assert sorted(position for part in dealt for position in part) == list(range(sequence))
    assert all(part == sorted(part) and len(part) == 2 * each for part in dealt)


@given(SIZES)
def test_the_inverse_brings_every_token_back(size: tuple[str, int, int]) -> None:
    order, ranks, each = size
    dealt = [p for rank in range(ranks) for p in positions(order, ranks * each * 2, rank, ranks)]
    assert [dealt[index] for index in inverse(dealt)] == list(range(len(dealt)))


@each_order
def test_one_rank_holds_all(order: str) -> None:
    assert positions(order, 6, 0, 1) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("order", "sequence", "ranks", "told"),
    [
        ("contiguous", 10, 4, "sequence(10) % cp(4) != 0"),
        ("striped", 10, 4, "sequence(10) % cp(4) != 0"),
        ("zigzag", 128, 3, "sequence(128) % (2 * cp(3)) != 0: zigzag gives each rank two chunks"),
        ("zigzag", 9, 3, "sequence(9) % (2 * cp(3)) != 0: zigzag gives each rank two chunks"),
        ("spiral", 9, 3, "order(spiral) is none of contiguous, striped, zigzag"),
        ("contiguous", 9, 3, None),
        ("zigzag", 12, 3, None),
    ],
)
def test_what_does_not_divide_is_told_by_equation(order: str, sequence: int, ranks: int, told: str | None) -> None:
    assert indivisible(order, sequence, ranks) == told
    if told is not None:
        with pytest.raises(ValueError, match=re.escape(told)):
            positions(order, sequence, 0, ranks)


def test_the_equation_names_the_axis() -> None:
    assert indivisible("striped", 9, 2, "ring") == "sequence(9) % ring(2) != 0"
