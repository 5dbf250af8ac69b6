"""Traced steps: which launch tells, what is refused, lanes without overlap, sums that are the row's, the picture."""

from pathlib import Path

import pytest

from parbench.bench.results.records import Interval
from parbench.bench.results.spans import length
from parbench.reports.analysis import steps
from parbench.reports.analysis.summary import summarize
from tests.support.reports_fixtures import (
    collective_case,
    failed_record,
    make_plan,
    make_run,
    ok_record,
    step_case,
)
from tests.support.traced import make_rank_timeline, make_timeline, traced_record, write_traced_run


def traced_in(run_folder: Path, *traces: tuple[object, object]) -> tuple[steps.Traced, ...]:
    run = write_traced_run(run_folder, traces)  # type: ignore[arg-type]
    return steps.traced_steps(run, summarize(run).rows)


def test_a_step_with_a_trace_is_told_by_the_first_launch_that_left_one(tmp_path: Path) -> None:
    (one,) = traced_in(
        tmp_path, (traced_record(), make_timeline()), (ok_record(collective_case()), None)
    )
    assert one.timeline == make_timeline()
    assert (one.row.case, one.launch, one.why_not) == (step_case("ddp"), 0, "")
    records = [traced_record(launch=i) for i in range(3)]
    (one,) = traced_in(
        tmp_path, (records[0], None), (records[1], make_timeline(2)), (records[2], make_timeline(4))
    )
    assert one.timeline is not None
    assert (one.launch, len(one.timeline.ranks)) == (1, 2)
    assert traced_in(tmp_path, (failed_record(step_case("ddp")), make_timeline())) == ()
    run = make_run(make_plan([step_case("ddp")]), [traced_record()])  # without a folder
    assert steps.traced_steps(run, summarize(run).rows) == ()


def test_unknown_clocks_and_damaged_traces_are_refused_with_the_reason(tmp_path: Path) -> None:
    (one,) = traced_in(tmp_path, (traced_record(), make_timeline(clock="")))
    assert (one.timeline, one.why_not) == (None, steps.NO_CLOCK)
    assert steps.busy_ranks([one]) == ()
    for content in (b"", b"no gzip", make_timeline().clock.encode()):
        (one,) = traced_in(tmp_path, (traced_record(), content))
        assert one.timeline is None
        assert "is not what parbench wrote" in one.why_not
    run = write_traced_run(tmp_path, [(traced_record(), make_timeline(0))])
    assert steps.longest_computing(run, *summarize(run).rows) is None, "a trace of no rank"


def test_a_rank_is_busy_as_long_as_its_row_says(tmp_path: Path) -> None:
    record = traced_record()
    first, second = steps.busy_ranks(traced_in(tmp_path, (record, make_timeline())))
    assert first.by_stream["compute"] == pytest.approx(record.metrics["compute"].value)
    assert first.by_stream["copy"] == pytest.approx(record.metrics["exposed_copy"].value)
    assert first.wall_seconds == pytest.approx(10e-3)
    assert first.by_phase == pytest.approx({"forward": 3e-3, "backward": 5.5e-3, "update": 1.5e-3})
    assert list(first.by_stream) == ["compute", "copy", "comm dp"]
    assert (first.rank, second.rank) == (0, 1)
    assert second.by_stream == pytest.approx(first.by_stream)


def interval(start: float, stop: float, stream: str = "comm dp") -> Interval:
    return Interval(stream, "all_reduce", start, stop)


def test_overlaps_count_once_and_lie_in_no_more_lanes_than_need_be() -> None:
    comm = steps.by_stream(make_rank_timeline())["comm dp"]
    assert sum(one.stop_us - one.start_us for one in comm) == pytest.approx(6000.25)
    assert [length(steps.spans_of(one)) for one in (comm, [])] == pytest.approx([4e6, 0])
    a, b, c, d = interval(0, 10), interval(5, 15), interval(10, 20), interval(15, 30)
    assert steps.lanes([d, c, b, a]) == ((a, c), (b, d))
    assert steps.lanes([a, c]) == ((a, c),)
    assert steps.lanes([]) == ()
