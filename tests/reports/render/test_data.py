"""A report as JSON and CSV."""

import csv
import json
from typing import Any

import msgspec
import pytest

from parbench.bench.results.runs import Run
from parbench.bench.results.tables import Column, Document, Section, Table
from parbench.reports.render.data import render_csv, render_json
from parbench.reports.report import Report, make_report_of_document
from parbench.reports.run_reports import make_report_of_runs
from parbench.reports.run_set import RunSet
from tests.support.reports.report_rows import report_of, run_from_records
from tests.support.reports.reports_fixtures import (
    collective_case,
    failed_record,
    ok_record,
    sample_run,
)


def read_json(report: Report) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(render_json(report))
    return content


def read_csv(report: Report) -> list[dict[str, str]]:
    return list(csv.DictReader(render_csv(report).splitlines()))


def report_both(*runs: Run) -> Report:
    return make_report_of_runs(RunSet([(run, None) for run in runs]))


def test_json_has_a_row_per_case_and_the_gaps() -> None:
    data = read_json(report_of(sample_run()))
    assert data["exit_code"] == 1
    assert data["verdicts"][0]["word"] == "WRONG"
    [run] = data["runs"]
    assert run["run"]["id"] == "run-1"
    assert len(run["cases"]) == 56
    assert [gap["reason"] for gap in run["skipped"]] == [
        "size 1001 B is not a multiple of 4 ranks x 4 B"
    ]
    assert [gap["repetitions"] for gap in run["missing"]] == [2]


def test_json_omits_unknown_values() -> None:
    report = report_of(run_from_records(failed_record(collective_case(), reason="why")))
    [case] = read_json(report)["runs"][0]["cases"]
    assert case["status"] == "failed"
    assert case["reason"] == "why"
    assert "seconds" not in case


def test_json_of_several_runs_has_the_same_form() -> None:
    first = run_from_records(ok_record(collective_case()))
    info = msgspec.structs.replace(first.info, id="run-2")
    one, several_runs = (
        read_json(report_of(first)),
        read_json(report_both(first, msgspec.structs.replace(first, info=info))),
    )
    assert one.keys() == several_runs.keys()
    assert one["schema_version"] == several_runs["schema_version"] == 1
    assert [data["run"]["id"] for data in several_runs["runs"]] == ["run-1", "run-2"]
    assert several_runs["runs"][0]["cases"] == one["runs"][0]["cases"]


def test_json_of_a_document_has_the_keys_of_columns() -> None:
    columns = [Column(key="step_seconds", title="step", kind="s")]
    table = Table(
        id="time",
        title="Time",
        columns=columns,
        rows=[{"step_seconds": 0.5}],
    )
    section = Section(id="s", title="S", tables=[table])
    document = Document(name="plan", heading="a plan", sections=[section])
    data = read_json(make_report_of_document(document))
    assert data["tables"] == {"time": [{"step_seconds": 0.5}]}
    assert data["heading"] == "a plan"


def test_csv_has_a_line_per_case() -> None:
    records = [ok_record(collective_case()), failed_record(collective_case(size_bytes=4))]
    good, bad = read_csv(report_of(run_from_records(*records)))
    assert good["run"] == "run-1"
    assert good["param_size_bytes"] == "1024"
    assert float(good["seconds"]) == pytest.approx(1e-3)
    assert good["seconds_low"] == ""
    assert bad["status"] == "failed"
    assert bad["seconds"] == ""
