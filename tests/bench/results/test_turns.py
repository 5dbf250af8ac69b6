"""Where nothing is there, numbers over ranks and turns say so however many ranks; what is there, they find."""

import random
from statistics import fmean, stdev

import pytest

from parbench.bench.results.turns import (
    chosen,
    cross_fitted,
    mean_rank,
    paired_difference,
    paired_factor,
    paired_overhead,
    slowest,
)

ROUNDS = 400


def drawn(source: random.Random, ranks: int, turns: int = 4) -> list[list[float]]:
    return [[source.lognormvariate(0, 0.5) for _ in range(turns)] for _ in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 64])
def test_a_difference_of_nothing_is_zero_on_average_and_its_interval_holds_zero(ranks: int) -> None:
    source = random.Random(5)
    for over_ranks in (slowest, mean_rank):
        found = [
            paired_difference(*(over_ranks(drawn(source, ranks)) for _ in range(2)))
            for _ in range(ROUNDS)
        ]
        values = [one.value for one in found if one]
        assert abs(fmean(values)) < 0.15 * stdev(values), over_ranks
        held = [
            one.low <= 0 <= one.high
            for one in found
            if one and one.low is not None and one.high is not None
        ]
        assert len(held) == ROUNDS
        assert sum(held) > 0.92 * ROUNDS, over_ranks


@pytest.mark.parametrize("ranks", [2, 64])
def test_the_rank_with_the_most_has_no_more_than_others_where_all_are_alike(ranks: int) -> None:
    source = random.Random(7)
    found = [cross_fitted(drawn(source, ranks)).value for _ in range(ROUNDS)]
    assert fmean(found) == pytest.approx(
        fmean(source.lognormvariate(0, 0.5) for _ in range(20000)), rel=0.05
    )


def test_a_rank_is_chosen_by_the_other_half_and_one_turn_cannot_choose() -> None:
    by_rank = [[9.0, 1.0, 9.0, 2.0], [1.0, 8.0, 2.0, 8.0]]
    assert chosen(by_rank) == [1, 0, 1, 0]
    assert cross_fitted(by_rank).value == fmean([1.0, 1.0, 2.0, 2.0])
    late = cross_fitted([[1.0, 2.0, 1.0], [7.0, 8.0, 9.0]])
    assert (late.value, late.method) == (
        8.0,
        "mean of 3 turns, of a rank chosen by the others, Student's t interval, 2 degrees of freedom",
    )
    one = cross_fitted([[1.0], [4.0]])
    assert (one.value, one.low, one.high) == (2.5, None, None)
    assert one.method.startswith("mean over ranks of one turn")


def test_pairs_of_turns_give_what_is_there_and_one_turn_gives_nothing() -> None:
    one, other = [2.0, 4.0, 8.0], [1.0, 2.0, 4.0]
    times, more = paired_factor(one, other), paired_overhead(one, other)
    assert times is not None
    assert more is not None
    assert [times.value, times.low, times.high] == pytest.approx([2.0] * 3)
    assert [more.value, more.low, more.high] == pytest.approx([1.0] * 3)
    less = paired_difference(one, other)
    assert less is not None
    assert less.value == pytest.approx(7 / 3)
    for paired in (paired_difference, paired_factor, paired_overhead):
        assert paired([1.0], [2.0]) is None
