"""The table beside the timelines: a line for each rank, a column for each phase and stream that any rank knows."""

from pathlib import Path

from traced import run_with, timeline, traced_record

from reports.summary import summarize
from reports.timeline_columns import busy_columns
from reports.timelines import busy_ranks, traced_steps


def test_a_line_tells_a_ranks_wall_phases_and_streams(tmp_path: Path) -> None:
    run = run_with(tmp_path, [(traced_record(), timeline())])
    rows = summarize(run).rows
    lines = busy_ranks(traced_steps(run, rows))
    columns = busy_columns(rows, lines)
    assert {column.title: column.text(lines[1]) for column in columns} == {
        "step": "ddp",
        "rank": "1",
        "wall": "10.0 ms",
        "forward": "3.00 ms",
        "backward": "5.50 ms",
        "update": "1.50 ms",
        "compute": "6.00 ms",
        "copies": "250 us",
        "comm dp": "4.00 ms",
    }
    assert all(column.help for column in columns)
    assert [column.sort(lines[1]) for column in columns][1] == 1


def test_what_no_rank_knows_has_no_column() -> None:
    assert [column.title for column in busy_columns((), ())] == ["step", "rank", "wall"]
