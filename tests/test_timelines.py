"""Traced steps: which launch tells, what is refused, lanes without overlap, and sums that are the row's own numbers."""

import subprocess
import sys
from pathlib import Path

import pytest
from reports_fixtures import bad, collective, make_plan, make_run, ok, step
from traced import rank_timeline, run_with, timeline, traced_record

from bench.timeline import Interval
from reports.summary import summarize
from reports.timelines import (
    NO_CLOCK,
    Traced,
    axis_of,
    busy_ranks,
    by_stream,
    covered_us,
    lanes,
    stream_words,
    traced_steps,
)


def traced_in(run_folder: Path, *traces: tuple[object, object]) -> tuple[Traced, ...]:
    run = run_with(run_folder, traces)  # type: ignore[arg-type]
    return traced_steps(run, summarize(run).rows)


def test_a_step_with_a_trace_is_told_by_it(tmp_path: Path) -> None:
    (one,) = traced_in(tmp_path, (traced_record(), timeline()), (ok(collective()), None))
    assert one.timeline == timeline()
    assert (one.row.case, one.launch, one.why_not) == (step("ddp"), 0, "")


def test_the_first_launch_that_left_a_trace_tells(tmp_path: Path) -> None:
    records = [traced_record(launch=i) for i in range(3)]
    (one,) = traced_in(tmp_path, (records[0], None), (records[1], timeline(2)), (records[2], timeline(4)))
    assert one.timeline is not None
    assert (one.launch, len(one.timeline.ranks)) == (1, 2)


def test_a_launch_that_does_not_count_tells_nothing(tmp_path: Path) -> None:
    assert traced_in(tmp_path, (bad(step("ddp")), timeline())) == ()


def test_without_a_folder_there_is_none() -> None:
    run = make_run(make_plan([step("ddp")]), [traced_record()])
    assert traced_steps(run, summarize(run).rows) == ()


def test_ranks_on_unknown_clocks_are_not_merged(tmp_path: Path) -> None:
    (one,) = traced_in(tmp_path, (traced_record(), timeline(clock="")))
    assert (one.timeline, one.why_not) == (None, NO_CLOCK)
    assert busy_ranks([one]) == ()


@pytest.mark.parametrize("content", [b"", b"no gzip", timeline().clock.encode()])
def test_a_damaged_trace_says_so(tmp_path: Path, content: bytes) -> None:
    (one,) = traced_in(tmp_path, (traced_record(), content))
    assert one.timeline is None
    assert "is not what parbench wrote" in one.why_not


def test_a_rank_is_busy_as_long_as_its_row_says(tmp_path: Path) -> None:
    record = traced_record()
    found = traced_in(tmp_path, (record, timeline()))
    first, second = busy_ranks(found)
    assert first.by_stream["compute"] == pytest.approx(record.metrics["compute"].value)
    assert first.by_stream["copy"] == pytest.approx(record.metrics["exposed_copy"].value)
    assert first.wall_seconds == pytest.approx(10e-3)
    assert first.by_phase == pytest.approx({"forward": 3e-3, "backward": 5.5e-3, "update": 1.5e-3})
    assert list(first.by_stream) == ["compute", "copy", "comm dp"]
    assert (first.rank, second.rank) == (0, 1)
    assert second.by_stream == pytest.approx(first.by_stream)


def test_overlaps_count_once() -> None:
    comm = by_stream(rank_timeline())["comm dp"]
    assert sum(one.stop_us - one.start_us for one in comm) == pytest.approx(6000.25)
    assert covered_us(comm) == pytest.approx(4000.0)
    assert covered_us([]) == 0.0


def interval(start: float, stop: float) -> Interval:
    return Interval("comm dp", "all_reduce", start, stop)


def test_what_overlaps_lies_in_lanes_of_its_own_and_in_no_more_than_need_be() -> None:
    a, b, c, d = interval(0, 10), interval(5, 15), interval(10, 20), interval(15, 30)
    assert lanes([d, c, b, a]) == ((a, c), (b, d))
    assert lanes([a, c]) == ((a, c),)
    assert lanes([]) == ()


def test_streams_have_an_order_and_words() -> None:
    assert list(by_stream(rank_timeline())) == ["phase", "compute", "copy", "comm dp"]
    assert [stream_words(one) for one in ("phase", "copy", "comm tp")] == ["phases", "copies", "comm tp"]
    assert [axis_of(one) for one in ("compute", "comm tp", "comm ring 2")] == [None, "tp", "ring 2"]


def test_it_needs_neither_torch_nor_matplotlib() -> None:
    code = "import sys, reports.timelines; sys.exit(bool({'torch', 'numpy', 'matplotlib'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
