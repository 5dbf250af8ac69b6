import csv
import io
import json

import msgspec
import pytest
from reports_fixtures import HOSTILE, bad, collective, make_plan, make_run, ok, sample_run, seconds_metric

from reports.data import CSV_COLUMNS, as_csv, as_json, embedded_json, several_csv, several_json
from reports.summary import summarize


def test_json_holds_the_run_its_rows_and_what_has_none() -> None:
    run = sample_run()
    data = json.loads(as_json(run, summarize(run)))
    assert data["run"]["id"] == "run-1"
    assert data["verdict"]["code"] == 1
    assert len(data["rows"]) == 56
    assert [one["reason"] for one in data["skipped"]] == ["size 1001 B is not a multiple of 4 ranks x 4 B"]
    assert [one["launches"] for one in data["missing"]] == [2]


def test_a_json_row_has_metrics_with_their_methods_and_no_raw_samples() -> None:
    run = make_run(make_plan([collective()]), [ok(collective(), details={"send_bytes": 7})])
    (row,) = json.loads(as_json(run, summarize(run)))["rows"]
    assert row["metrics"]["time"]["value"] == 1e-3
    assert row["metrics"]["time"]["method"].startswith("median of 120 iterations")
    assert row["details"] == {"send_bytes": 7}
    assert row["case"]["id"] == collective().id
    assert "records" not in row


def test_unknown_is_null_in_json_and_empty_in_csv() -> None:
    run = make_run(make_plan([collective()]), [ok(collective(), metrics={"time": seconds_metric(None)})])
    summary = summarize(run)
    assert json.loads(as_json(run, summary))["rows"][0]["metrics"]["time"]["value"] is None
    (line,) = csv.DictReader(io.StringIO(as_csv(summary)))
    assert (line["metric"], line["value"], line["low"]) == ("time", "", "")


def test_csv_has_a_line_for_each_metric() -> None:
    lines = list(
        csv.DictReader(io.StringIO(as_csv(summarize(make_run(make_plan([collective()]), [ok(collective())])))))
    )
    assert [line["metric"] for line in lines] == ["time", "algbw", "busbw", "time_p99"]
    first = lines[0]
    assert tuple(first) == CSV_COLUMNS
    assert (float(first["value"]), first["unit"]) == (1e-3, "s")
    assert float(first["low"]) == pytest.approx(0.9e-3)
    assert first["params"] == "size_bytes=1024 dtype=float32 mode=blocking"
    assert (first["status"], first["launches"], first["planned"], first["noise"]) == ("ok", "1", "1", "quiet")


def test_csv_names_a_case_that_has_no_metrics() -> None:
    run = make_run(make_plan([collective()]), [bad(collective(), reason=HOSTILE)])
    (line,) = csv.DictReader(io.StringIO(as_csv(summarize(run))))
    assert (line["status"], line["metric"], line["method"]) == ("failed", "", "")


def test_several_runs_keep_their_lines_apart_by_run() -> None:
    run = make_run(make_plan([collective()]), [ok(collective())])
    other = msgspec.structs.replace(run, info=msgspec.structs.replace(run.info, id="run-2"))
    both = [(one, summarize(one)) for one in (run, other)]
    lines = list(csv.DictReader(io.StringIO(several_csv(both))))
    assert list(lines[0]) == ["run", *CSV_COLUMNS]
    assert [line["run"] for line in lines] == ["run-1"] * 4 + ["run-2"] * 4
    assert [one["run"]["id"] for one in json.loads(several_json(both))["runs"]] == ["run-1", "run-2"]
    assert json.loads(several_json(both))["runs"][0] == json.loads(as_json(*both[0]))


def test_data_too_long_for_a_page_keeps_every_metric_and_leaves_out_the_rest() -> None:
    runs = [(run, summarize(run)) for run in (sample_run(), sample_run())]
    assert embedded_json(runs, 10_000_000) == several_json(runs)
    brief = embedded_json(runs, 1000)
    assert len(brief) < len(several_json(runs))
    whole, read = json.loads(several_json(runs)), json.loads(brief)
    assert [run["run"]["id"] for run in read["runs"]] == ["run-1", "run-1"]
    for full, short in zip(whole["runs"][0]["rows"], read["runs"][0]["rows"], strict=True):
        assert {"details", "notes", "reasons"} & set(short) == set()
        assert all(full[name] == short[name] for name in ("case", "metrics", "check", "grade", "status", "iterations"))
