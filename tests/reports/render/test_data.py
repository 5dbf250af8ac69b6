"""A report as JSON and CSV."""

import csv
import json

import msgspec
import pytest

from parbench.bench.results.runs import Run
from parbench.reports.render.data import embedded_json, render_csv, render_json
from parbench.reports.report import Report
from parbench.reports.run_set import RunSet
from parbench.reports.sections.one_run import report_of
from parbench.reports.tables.several_runs import make_report_of_runs
from tests.support.report_rows import run_from_records
from tests.support.reports_fixtures import (
    collective_case,
    failed_record,
    ok_record,
    sample_run,
)


def read_csv(report: Report) -> list[dict[str, str]]:
    return list(csv.DictReader(render_csv(report).splitlines()))


def report_both(*runs: Run) -> Report:
    return make_report_of_runs(RunSet([(run, None) for run in runs]))


def test_json_holds_run_rows_and_gaps() -> None:
    data = json.loads(render_json(report_of(sample_run())))
    assert data["run"]["id"] == "run-1"
    assert data["verdict"]["code"] == 1
    assert len(data["rows"]) == 56
    assert [gap["reason"] for gap in data["skipped"]] == [
        "size 1001 B is not a multiple of 4 ranks x 4 B"
    ]
    assert [gap["repetitions"] for gap in data["missing"]] == [2]


def test_csv_has_a_line_per_metric() -> None:
    lines = read_csv(report_of(run_from_records(ok_record(collective_case()))))
    assert [line["metric"] for line in lines] == ["time", "algbw", "busbw", "time_p99"]
    assert lines[0]["run"] == "run-1"
    assert lines[0]["param_size_bytes"] == "1024"
    assert float(lines[0]["value"]) == pytest.approx(1e-3)
    assert float(lines[0]["low"]) == pytest.approx(0.9e-3)


def test_csv_has_a_line_per_bad_case() -> None:
    [line] = read_csv(report_of(run_from_records(failed_record(collective_case()))))
    assert line["status"] == "failed"
    assert line["metric"] == ""


def test_data_of_several_runs_names_the_run() -> None:
    first = run_from_records(ok_record(collective_case()))
    info = msgspec.structs.replace(first.info, id="run-2")
    report = report_both(first, msgspec.structs.replace(first, info=info))
    lines = read_csv(report)
    assert [line["run"] for line in lines] == ["run-1"] * 4 + ["run-2"] * 4
    runs = json.loads(render_json(report))["runs"]
    assert [data["run"]["id"] for data in runs] == ["run-1", "run-2"]


def test_embedded_json_keeps_metrics_when_cut() -> None:
    report = report_both(sample_run(), sample_run())
    assert embedded_json(report, 10_000_000) == render_json(report)
    complete = json.loads(render_json(report))["runs"][0]["rows"]
    cut = json.loads(embedded_json(report, 1000))["runs"][0]["rows"]
    assert len(cut) == len(complete)
    assert not {"details", "notes", "reasons"} & cut[0].keys()
    for name in ("case", "metrics", "check", "status"):
        assert cut[0][name] == complete[0][name]
