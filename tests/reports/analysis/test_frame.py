"""Records as pandas frames: every number of a run, and a row where nothing was measured."""

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

import parbench
from parbench import cli
from parbench.bench.plan.plan import Skipped
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import Record
from parbench.bench.results.runs import load_run
from parbench.bench.text import UserError
from tests.support.golden import GOLDEN, STEPS
from tests.support.nodes_fixtures import failed_node_run, make_sweep_point, scaling_run, write_sweep
from tests.support.paths import ROOT
from tests.support.report_rows import assert_cells, run_from_records
from tests.support.reports_fixtures import (
    HOSTILE_TEXT,
    collective_case,
    failed_record,
    hang_record,
    make_plan,
    make_run,
    ok_record,
    sample_run,
    step_case,
    write_run,
)


def write_records(out: Path, *records: Record) -> Path:
    return write_run(out, run_from_records(*records))


def rows_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def test_load_has_a_row_per_metric(tmp_path: Path) -> None:
    record = ok_record(collective_case(size_bytes=1024), launch=1, notes=["first", "second"])
    rows = rows_of(parbench.load(write_records(tmp_path, record)))
    row = next(row for row in rows if row["metric"] == "time")
    metric = record.metrics["time"]
    assert row["run"] == "run-1"
    assert row["case"] == record.case.id
    assert row["launch"] == 1
    assert row["value"] == metric.value
    assert row["low"] == metric.low
    assert row["high"] == metric.high
    assert row["unit"] == "s"
    assert row["method"] == metric.method
    assert row["param_size_bytes"] == 1024
    assert row["world_size"] == 4
    assert row["iterations"] == 120
    assert row["noise"] == "stable"
    assert row["notes"] == "first; second"
    assert row["record_started"] == pd.Timestamp(record.started)
    measured = [row["metric"] for row in rows if row["launch"] == 1]
    assert measured == list(record.metrics)


def test_load_has_rows_for_unmeasured_cases(tmp_path: Path) -> None:
    cases = [collective_case(size_bytes=1 << i) for i in range(10, 15)]
    failed, hung, wrong, cut, missing = cases
    skipped = Skipped(case=collective_case(size_bytes=7), reason="7 B is not a multiple of 4 B")
    misleading = {"time": MetricValue(value=1.0, unit="s", better="lower")}
    records = [
        failed_record(failed, reason=HOSTILE_TEXT),
        hang_record(hung),
        failed_record(wrong, status="wrong", reason="3 differ", metrics=misleading),
        failed_record(cut, status="skipped", reason="left out"),
    ]
    path = write_run(tmp_path, make_run(make_plan(cases, skipped=[skipped]), records))
    frame = parbench.load(path)
    assert {row["case"]: (row["status"], row["reason"]) for row in rows_of(frame)} == {
        failed.id: ("failed", HOSTILE_TEXT),
        hung.id: ("hang", "rank 1 did not arrive within 60 s"),
        wrong.id: ("wrong", "3 differ"),
        cut.id: ("skipped", "left out"),
        skipped.case.id: ("skipped", skipped.reason),
        missing.id: ("missing", "no record"),
    }
    assert len(frame) == 6
    assert frame[["metric", "value", "unit", "iterations"]].isna().all(axis=None)


def test_load_uses_the_last_record_of_a_repetition(tmp_path: Path) -> None:
    unknown = {"time": MetricValue(value=None, unit="s", method="no clock")}
    last_record = ok_record(collective_case(), metrics=unknown)
    path = write_records(tmp_path, failed_record(collective_case()), last_record)
    (row,) = rows_of(parbench.load(path))
    assert_cells(
        row,
        {
            "status": "ok",
            "metric": "time",
            "method": "no clock",
        },
    )
    assert pd.isna(row["value"])


def test_load_prefixes_and_types_parameters(tmp_path: Path) -> None:
    params: dict[str, Any] = {"launch": 7, "shape": "tiny", "ratio": 0.5, "flag": True}
    first = ok_record(step_case("first", **params, mixed=1))
    second = ok_record(step_case("second", ratio=2, mixed="two"))
    frame = parbench.load(write_records(tmp_path, first, second))
    assert not frame.columns.duplicated().any()
    first_row, *_, last_row = rows_of(frame)
    assert first_row["launch"] == 0
    assert {name: first_row[f"param_{name}"] for name in params} == params
    assert pd.isna(last_row["param_launch"])
    assert pd.isna(last_row["param_flag"])
    assert frame["param_launch"].dtype == "Int64"
    assert frame["param_ratio"].dtype == "float64"
    assert frame["param_flag"].dtype == "boolean"
    assert frame["param_mixed"].dtype == "object"


def test_load_joins_runs_and_folders_once(tmp_path: Path) -> None:
    first, second = (write_records(tmp_path, ok_record(collective_case())) for _ in range(2))
    single = parbench.load(first)
    assert len(parbench.load(first, str(second))) == 2 * len(single)
    assert len(parbench.load(tmp_path)) == 2 * len(single)
    assert len(parbench.load(tmp_path, first)) == 2 * len(single)


def test_load_warns_of_missing_sweep_points(tmp_path: Path) -> None:
    points = [
        (make_sweep_point(1, "2 nodes"), [scaling_run(2)]),
        (make_sweep_point(2, "4 nodes"), [failed_node_run()]),
        (make_sweep_point(3, "8 nodes"), []),
    ]
    with pytest.warns(UserWarning, match="Not run: 8 nodes") as warnings:
        frame = parbench.load(write_sweep(tmp_path / "sweep", points))
    assert warnings[0].filename == __file__
    assert list(frame["point"].unique()) == ["2 nodes", "4 nodes"]
    assert frame[frame["point"] == "4 nodes"]["status"].tolist() == ["hang"]


def test_load_refuses_what_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no readable run\.json"):
        parbench.load(tmp_path)
    with pytest.raises(UserError, match="no run was named"):
        parbench.load()


def test_load_samples_has_a_row_per_sample(tmp_path: Path) -> None:
    record = ok_record(collective_case(), seconds=2e-3, n=3)
    frame = parbench.load_samples(write_records(tmp_path, record))
    assert list(frame["iteration"]) == [0, 1, 2]
    assert list(frame["seconds"]) == [2e-3, 2e-3, 2e-3]
    assert set(frame["case"]) == {record.case.id}


def write_samples(path: Path, record: Record, **arrays: Any) -> None:
    np.savez(path / "samples" / f"{record.case.id}-{record.launch}.npz", **arrays)


def test_load_samples_by_rank_is_in_seconds(tmp_path: Path) -> None:
    record = ok_record(collective_case())
    path = write_records(tmp_path, record, ok_record(collective_case("all_gather")))
    write_samples(
        path,
        record,
        ranks=[2, 6],
        arrival_ns=[[0, 5_000_000], [2_000, 5_000_000]],
        exit_ns=[[1_000_000, 6_000_000], [1_002_000, 6_000_000]],
        duration_ns=[[1_000_000, 1_000_000], [1_000_000, 1_000_000]],
        issue_ns=[[0, 500_000], [0, 500_000]],
        steps_per_sample=10,
    )
    frame = parbench.load_samples(path, by_rank=True)
    assert list(frame["rank"]) == [2, 2, 6, 6]
    assert list(frame["iteration"]) == [0, 1, 0, 1]
    assert list(frame["arrival_seconds"]) == pytest.approx([0, 5e-3, 2e-6, 5e-3])
    assert list(frame["exit_seconds"]) == pytest.approx([1e-3, 6e-3, 1.002e-3, 6e-3])
    assert list(frame["duration_seconds"]) == pytest.approx([1e-3] * 4)
    assert list(frame["issue_seconds"].dropna()) == pytest.approx([5e-4, 5e-4])
    assert set(frame["steps_per_sample"]) == {10}


def test_load_samples_refuses_missing_or_damaged(tmp_path: Path) -> None:
    record = ok_record(collective_case())
    path = write_records(tmp_path, record)
    with pytest.raises(UserError, match=re.escape(str(path / "samples"))):
        parbench.load_samples(path, by_rank=True)
    write_samples(path, record, ranks=[0], duration_ns=[[1]])
    with pytest.raises(UserError, match=f"{record.case.id}-0.npz"):
        parbench.load_samples(path, by_rank=True)


def test_csv_export_equals_the_frame(tmp_path: Path) -> None:
    path = write_run(tmp_path, sample_run(launches=1))
    result = CliRunner().invoke(cli.main, ["export", str(path), "--format", "csv"])
    assert result.exit_code == 0
    frame = parbench.load(path)
    exported = pd.read_csv(io.StringIO(result.stdout), keep_default_na=False, dtype=str)
    assert list(exported.columns) == list(frame.columns)
    for name in ("case", "status", "reason", "metric", "param_size_bytes"):
        assert list(exported[name]) == list(frame[name].astype("string").fillna(""))
    values = [float(text) if text else None for text in exported["value"]]
    assert values == frame["value"].astype(object).where(frame["value"].notna(), None).tolist()


def test_readme_example_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = (ROOT / "reports" / "README.md").read_text()
    (code,) = re.findall(
        r"^```python\n(import parbench\n.*?)^```", readme, re.DOTALL | re.MULTILINE
    )
    monkeypatch.chdir(GOLDEN)
    exec(code, {})
    rate = load_run(STEPS).records[0].metrics["busbw"].value
    assert rate is not None
    assert f"{rate / 1e9:.6f}" in capsys.readouterr().out
