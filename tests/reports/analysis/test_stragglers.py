"""Ranks that arrive last, and the delay of each rank."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from parbench.bench.results.runs import load_run, make_samples_path
from parbench.reports.analysis.case_results import merge_records
from parbench.reports.analysis.stragglers import (
    StragglerVote,
    compute_arrival_delays,
    elect_straggler,
    find_last_arriving_rank,
)
from tests.support.reports.late import late_record, samples
from tests.support.reports.report_rows import run_from_records, summarize_rows
from tests.support.reports.reports_fixtures import seconds_metric, write_run


def test_arrival_delay_is_the_median_of_repetitions(tmp_path: Path) -> None:
    records = [late_record(repetition=repetition) for repetition in range(3)]
    path = write_run(tmp_path, run_from_records(*records))
    for record, arrival_ns in zip(records, (1000, 2000, 9000), strict=True):
        arrivals_ns = [[0, 100, 0], [arrival_ns, 0, 10 * arrival_ns]]
        (path / make_samples_path(record)).write_bytes(samples(arrivals_ns, ranks=(2, 6)))
    run = load_run(path)
    [row] = merge_records(run)
    assert compute_arrival_delays(run, row) == pytest.approx({2: 0.0, 6: 2e-6})


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
