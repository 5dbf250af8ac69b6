"""The first page: never more than 40 lines of 80 columns, whatever a run holds; operations and steps in order."""

import re

from parbench.bench.results.records import Record
from parbench.reports.render.closing import render_closing
from parbench.reports.sections.one_run import report_of
from tests.support.reports_fixtures import (
    HOSTILE_TEXT,
    collective_case,
    failed_record,
    make_plan,
    make_run,
    ok_record,
    step_case,
    training_metrics,
)


def page(*records: Record) -> list[str]:
    cases = list({record.case.id: record.case for record in records}.values())
    return render_closing(report_of(make_run(make_plan(cases), records))).splitlines()


def test_a_page_fits_a_terminal_whatever_a_run_holds() -> None:
    operations = [
        ok_record(collective_case(f"op{i}", 1 << 20), seconds=1e-3 * (i + 1)) for i in range(40)
    ]
    steps = [
        ok_record(step_case(f"s{i}" + "x" * 60), metrics=training_metrics()) for i in range(12)
    ]
    broken = [
        failed_record(collective_case(size_bytes=1 << i), reason="why " * 200) for i in range(10)
    ]
    for records in (operations, steps, broken, [*operations, *steps, *broken]):
        lines = page(*records)
        assert len(lines) < 40, "the folder's line comes after"
        assert max(map(len, lines)) <= 80
        assert lines[-1].startswith("All rows  parbench show --all ")
    assert "  and 35 more" not in lines
    assert sum(line.startswith("  and ") for line in lines) == 3, (
        "operations, steps and what to look at first"
    )


def test_operations_come_fastest_first_and_steps_with_where_their_time_went() -> None:
    lines = page(
        ok_record(collective_case("slow", 1 << 20), seconds=2e-3),
        ok_record(collective_case("fast", 1024), seconds=1e-4),
        ok_record(collective_case("fast", 1 << 20), seconds=1e-3),
        ok_record(step_case("ddp"), metrics=training_metrics(0.1)),
    )
    start = next(i for i, line in enumerate(lines) if line.startswith("Operations"))
    assert [re.split(r" {2,}", line.strip())[:3] for line in lines[start + 1 : start + 3]] == [
        ["fast", "100 us", "1.57"],  # the latency of 1K, the bandwidth of 1M
        ["slow", "-", "0.786"],  # what was not measured at a small size has no latency
    ]
    start = lines.index("Training steps")
    assert lines[start + 1].startswith(
        "  ddp  100 ms [90.0, 110] · 40,960 tokens/s · MFU 34 % · memory 7.00 MiB"
    )
    assert (
        lines[start + 2]
        == "    compute ############ 60 %  exposed ###### 30 %  idle # 6 %  overlap 33 %"
    )
    assert "  1. ddp: 30.0 % of the step is exposed, 33.0 % of its communication hidden" in lines


def test_what_is_bad_is_looked_at_first_and_hostile_text_is_obeyed_by_nothing() -> None:
    lines = page(
        ok_record(collective_case("fine")),
        failed_record(collective_case(), 0, "hang", HOSTILE_TEXT),
    )
    start = lines.index("Look at first")
    told = " ".join(line.strip() for line in lines[start + 1 : start + 4])
    assert told.startswith("1. collective.all_reduce size_bytes=1024")
    assert "hang" in told
    assert "\\x1b[31mred" in told
