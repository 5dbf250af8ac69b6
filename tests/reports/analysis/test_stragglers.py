"""Ranks that arrive last."""

import pytest
from msgspec.structs import replace

from parbench.reports.analysis.stragglers import (
    StragglerVote,
    elect_straggler,
    find_last_arriving_rank,
)
from tests.support.reports.late import late_record
from tests.support.reports.report_rows import summarize_rows
from tests.support.reports.reports_fixtures import seconds_metric


@pytest.mark.parametrize(
    ("skew", "seconds", "rank"),
    [(6e-4, 1e-3, 1), (4e-4, 1e-3, None), (6e-4, 1e-2, None)],
    ids=["late", "within a barrier", "small share of the time"],
)
def test_last_arriving_rank_is_clearly_late(
    skew: float, seconds: float, rank: int | None
) -> None:
    records = [late_record(repetition=repetition, skew=skew) for repetition in range(5)]
    slow = [
        replace(record, metrics={**record.metrics, "time": seconds_metric(seconds)})
        for record in records
    ]
    straggler = find_last_arriving_rank(summarize_rows(*slow))
    assert (straggler.rank if straggler else None) == rank


@pytest.mark.parametrize(
    ("named_ranks", "num_ranks", "repetitions"),
    [
        pytest.param([1, 1, 1, 1, 1], 2, 5, id="all-of-five"),
        pytest.param([1, 1, 1, 1], 2, None, id="two-ranks-by-chance"),
        pytest.param([1, 1, 1, 1, 2], 8, 4, id="four-of-five"),
        pytest.param([1, 1, 1, 2, 3], 8, None, id="three-of-five"),
    ],
)
def test_straggler_is_named_beyond_chance(
    named_ranks: list[int], num_ranks: int, repetitions: int | None
) -> None:
    votes = {
        repetition: [StragglerVote(rank, 1e-3, 0.2)]
        for repetition, rank in enumerate(named_ranks)
    }
    straggler = elect_straggler(votes, len(named_ranks), num_ranks)
    assert (straggler.repetitions if straggler else None) == repetitions
