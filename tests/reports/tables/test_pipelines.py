"""Pipeline steps: their table, damaged facts, and schedules compared."""

from parbench.reports.tables.steps import list_step_tables
from tests.support.reports.report_rows import (
    assert_cells,
    load_records,
    report_lines,
)
from tests.support.reports.reports_fixtures import (
    ok_record,
    pipeline_case,
    pipeline_details,
    pipeline_metrics,
    pipeline_record,
    simulated_schedule,
)


def test_table_shows_bubble_and_idle_causes() -> None:
    record = pipeline_record(ranks=4, microbatches=8, seconds=0.020)
    (line,) = report_lines("pipelines", record)
    assert_cells(
        line,
        {
            "schedule": "1f1b",
            "P": "4",
            "M": "8",
            "bubble fraction": "26.3 %",
            "simulated": "23.7 %",
            "analytical": "21.0 %",
            "activations": "5.00 MiB",
        },
    )
    causes = {title: text for title, text in line.items() if title.startswith("idle: ")}
    assert list(causes.values()) == ["3.00 ms", "1.00 ms", "1.00 ms"]


def test_damaged_details_are_a_note() -> None:
    details = {"pipeline": {**pipeline_details(), "ranks": "two"}}
    record = ok_record(pipeline_case(), metrics=pipeline_metrics(), details=details)
    (note,) = list_step_tables(load_records(record))[0].notes
    assert record.case.name in note


SIMULATED = [
    simulated_schedule("gpipe", 0.030),
    simulated_schedule("1f1b", 0.011),
    simulated_schedule("zb_v", 0.018, chunks=2),
]


def test_simulated_schedules_have_a_table() -> None:
    record = pipeline_record("1f1b", seconds=0.020, comparison=SIMULATED)
    lines = report_lines("schedules", record)
    assert [line["schedule"] for line in lines] == ["gpipe", "1f1b", "zb_v"]
    assert [line["step time"] for line in lines] == ["30.0 ms", "11.0 ms", "18.0 ms"]
