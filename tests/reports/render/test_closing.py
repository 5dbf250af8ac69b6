"""The summary that a run ends with."""

import re
from dataclasses import replace

import msgspec
import pytest

from parbench.bench.results.records import Record
from parbench.reports.findings.finding import Finding
from parbench.reports.render.closing import render_closing
from tests.support.reports.report_rows import matrix_case, report_of, run_from_records
from tests.support.reports.reports_fixtures import (
    collective_case,
    failed_record,
    ok_record,
    rate_metric,
    seconds_metric,
    step_case,
    training_metrics,
)


def render(*records: Record) -> list[str]:
    return render_closing(report_of(run_from_records(*records))).splitlines()


def test_summary_fits_a_terminal() -> None:
    records = []
    for i in range(40):
        records.append(ok_record(collective_case(f"op{i}", 1 << 20), seconds=1e-3 * (i + 1)))
    for i in range(12):
        records.append(ok_record(step_case(f"s{i}" + "x" * 20), metrics=training_metrics()))
    for i in range(10):
        records.append(failed_record(collective_case(size_bytes=1 << i), reason="why " * 200))
    lines = render(*records)
    assert len(lines) < 64  # the folder's line follows
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line.startswith("  and ")] == [
        "  and 24 more",
        "  and 8 more",
    ]
    assert "parbench show --all" in lines[-1]


def test_run_without_a_time_has_no_findings() -> None:
    lines = render(failed_record(step_case("ddp"), 0, "skipped", "out of time"))
    assert "Nothing was measured." in "\n".join(lines)


def test_notes_of_the_plan_follow_the_heading() -> None:
    run = run_from_records(ok_record(collective_case()))
    note = "oversubscribed: 4 ranks on 2 cores. Times include waiting for a core."
    plan = msgspec.structs.replace(run.info.plan, notes=(note,))
    info = msgspec.structs.replace(run.info, plan=plan)
    report = report_of(msgspec.structs.replace(run, info=info))
    text = render_closing(report)
    assert text.index(note) < text.index("\nCORRECT ")


def test_heading_breaks_between_items() -> None:
    report = report_of(run_from_records(ok_record(collective_case())))
    duration = "duration 1 min 42 s, 90 % of it measuring"
    lines = render_closing(replace(report, heading=f"{'x' * 40} · {duration}")).splitlines()
    assert lines[:2] == ["x" * 40, duration]


def test_few_operations_have_a_table_over_sizes() -> None:
    records = []
    for repetition in range(3):
        for num_bytes, seconds in ((1 << 20, 1e-3), (1024, 1e-4)):
            case = collective_case("all_reduce", num_bytes)
            records.append(
                ok_record(case, seconds=seconds * (1 + repetition / 10), repetition=repetition)
            )
    lines = render(*records)
    start = lines.index("all_reduce, blocking, float32")
    header, small, large = lines[start + 2 : start + 5]
    assert header.split()[:2] == ["size", "time"]
    assert re.match(r" *1K +1\d\d us \[[\d.]+, [\d.]+\] ", small)
    assert large.split()[0] == "1M"
    assert not any(line.startswith("Operations") for line in lines)


@pytest.mark.parametrize(("num_ranks", "has_table"), [(2, True), (17, False)])
def test_matrix_of_few_ranks_has_a_table_of_links(num_ranks: int, has_table: bool) -> None:
    metrics = {"time": seconds_metric(1e-3), "busbw": rate_metric(2e9)}
    pairs = [(rank, (rank + 1) % num_ranks) for rank in range(num_ranks)]
    lines = render(*(ok_record(matrix_case(*pair), metrics=metrics) for pair in pairs))
    title = "Rank to rank: bus bandwidth in GB/s, 1M float32, blocking"
    assert (title in lines) == has_table
    if has_table:
        start = lines.index(title)
        table = [line.split() for line in lines[start + 2 : start + 4]]
        assert table == [["0", "-", "2.00"], ["1", "2.00", "-"]]


def test_summary_shows_commands_on_their_own_lines() -> None:
    report = report_of(run_from_records(ok_record(collective_case())))
    finding = Finding(
        kind="idle",
        subject="ddp",
        message="why " * 100,
        command="parbench doctor",
        time_share=0.5,
    )
    lines = render_closing(replace(report, findings=[finding])).splitlines()
    assert "     -> parbench doctor" in lines
