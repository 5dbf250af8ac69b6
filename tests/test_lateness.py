"""Who comes late: medians over iterations and launches from raw samples, unknown where they cannot be read."""

from pathlib import Path

import pytest
from late import arrival, late_record, samples
from reports_fixtures import collective, make_plan, make_run, ok, write_run

from bench.records import Record
from bench.runs import load_run
from reports.lateness import MOST_ROWS, Late, late_rows
from reports.summary import summarize


def found_in(folder: Path, *told: tuple[Record, bytes | None]) -> tuple[Late, ...]:
    records = [record for record, _ in told]
    cases = {record.case.id: record.case for record in records}.values()
    path = write_run(folder, make_run(make_plan(cases, launches=1 + max(one.launch for one in records)), records))
    for record, content in told:
        if content is not None:
            (path / "samples" / f"{record.case.id}-{record.launch}.npz").write_bytes(content)
    run = load_run(path)
    return late_rows(run, summarize(run).rows)


def test_lateness_is_the_median_since_the_first_arrival(tmp_path: Path) -> None:
    (one,) = found_in(tmp_path, (late_record(), samples([[0, 100, 2000], [3000, 100, 0]])))
    assert one.seconds_by_rank == pytest.approx({0: 0.0, 1: 0.0})
    (two,) = found_in(tmp_path, (late_record(), samples([[0, 100, 0], [3000, 900, 7000]])))
    assert two.seconds_by_rank == pytest.approx({0: 0.0, 1: 3e-6})


def test_launches_weigh_the_same(tmp_path: Path) -> None:
    told = [(late_record(launch=i), samples([[0], [microseconds * 1000]])) for i, microseconds in enumerate((1, 2, 9))]
    (one,) = found_in(tmp_path, *told)
    assert one.seconds_by_rank == pytest.approx({0: 0.0, 1: 2e-6})


def test_ranks_bear_the_numbers_of_the_samples(tmp_path: Path) -> None:
    (one,) = found_in(tmp_path, (late_record(), samples([[5000], [0]], ranks=(2, 6))))
    assert one.seconds_by_rank == pytest.approx({2: 5e-6, 6: 0.0})


@pytest.mark.parametrize("content", [None, b"", b"junk", samples([[1]]), samples([[], []])])
def test_without_readable_samples_no_rank_is_known(tmp_path: Path, content: bytes | None) -> None:
    (one,) = found_in(tmp_path, (late_record(), content))
    assert one.seconds_by_rank == {}
    assert one.arrival == arrival()


def test_only_the_largest_skews_are_shown_in_the_order_of_the_run(tmp_path: Path) -> None:
    told = [(late_record(1024 * (i + 1), skew=1e-6 * (1 + i % 30)), None) for i in range(40)]
    found = found_in(tmp_path, *told)
    assert len(found) == MOST_ROWS
    sizes = [int(one.row.case.params["size_bytes"]) for one in found]
    assert sizes == sorted(sizes)
    assert min(one.row.value("skew") or 0 for one in found) > 8.5e-6


def test_what_has_no_skew_or_no_arrival_is_not_among_them(tmp_path: Path) -> None:
    assert found_in(tmp_path, (late_record(skew=None), None), (ok(collective("broadcast")), None)) == ()
