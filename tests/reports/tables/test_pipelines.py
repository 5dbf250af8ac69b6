"""Pipeline steps: their table and damaged facts."""

import pytest

from parbench.bench.text import UserError
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
)


def test_table_shows_bubble_and_its_causes() -> None:
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
    causes = {title: text for title, text in line.items() if title.startswith("bubble: ")}
    assert list(causes.values()) == ["3.00 ms", "1.00 ms", "1.00 ms"]
    assert "idle" not in line  # that of the profiled step


def test_damaged_details_are_refused() -> None:
    details = {"pipeline": {**pipeline_details(), "ranks": "two"}}
    record = ok_record(pipeline_case(), metrics=pipeline_metrics(), details=details)
    with pytest.raises(UserError, match=record.case.name):
        list_step_tables(load_records(record))
