"""Records as pandas frames: every number of a run, and a row where nothing was measured."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import parbench
from parbench.bench.plan.plan import SkippedCase
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import Record
from parbench.bench.results.runs import load_run, make_samples_path
from tests.support.golden import GOLDEN, STEPS
from tests.support.paths import ROOT
from tests.support.reports.nodes_fixtures import (
    failed_node_run,
    make_sweep_point,
    scaling_run,
    write_sweep,
)
from tests.support.reports.report_rows import assert_cells, run_from_records
from tests.support.reports.reports_fixtures import (
    collective_case,
    failed_record,
    make_plan,
    make_run,
    ok_record,
    step_case,
    write_run,
)


def write_records(out: Path, *records: Record) -> Path:
    return write_run(out, run_from_records(*records))


def test_load_has_a_row_per_metric(tmp_path: Path) -> None:
    record = ok_record(collective_case(size_bytes=1024), notes=["first", "second"])
    frame = parbench.load(write_records(tmp_path, record))
    assert list(frame["metric"]) == list(record.metrics)
    time = record.metrics["time"]
    row = frame.set_index("metric").loc["time"]
    assert_cells(
        dict(row),
        {
            "run": "run-1",
            "case": record.case.id,
            "repetition": 0,
            "value": time.value,
            "low": time.low,
            "high": time.high,
            "unit": "s",
            "method": time.method,
            "param_size_bytes": 1024,
            "world_size": 4,
            "iterations": 120,
            "noise": "stable",
            "notes": "first; second",
            "started": pd.Timestamp("2026-01-02T03:04:05.678Z"),
        },
    )


def test_load_has_rows_for_unmeasured_cases(tmp_path: Path) -> None:
    failed = collective_case("all_reduce")
    wrong = collective_case("all_gather")
    missing = collective_case("broadcast")
    indivisible = collective_case(size_bytes=7)
    misleading = {"time": MetricValue(value=1.0, unit="s", better="lower")}
    records = [
        failed_record(failed, reason="rank 1 died"),
        failed_record(wrong, status="wrong", reason="3 differ", metrics=misleading),
    ]
    skipped = SkippedCase(case=indivisible, reason="7 B is not a multiple of 4 B")
    plan = make_plan([failed, wrong, missing], skipped=[skipped])
    frame = parbench.load(write_run(tmp_path, make_run(plan, records)))
    rows = frame.set_index("case")
    assert rows["status"].to_dict() == {
        failed.id: "failed",
        wrong.id: "wrong",
        missing.id: "missing",
        indivisible.id: "skipped",
    }
    assert rows.loc[failed.id, "reason"] == "rank 1 died"
    assert rows.loc[indivisible.id, "reason"] == skipped.reason
    assert frame["value"].isna().all()


def test_load_prefixes_and_types_parameters(tmp_path: Path) -> None:
    params: dict[str, Any] = {"repetition": 7, "ratio": 0.5, "flag": True}
    first = ok_record(step_case("first", **params, mixed=1))
    second = ok_record(step_case("second", ratio=2, mixed="two"))
    frame = parbench.load(write_records(tmp_path, first, second))
    assert frame["repetition"].iloc[0] == 0
    assert frame["param_repetition"].iloc[0] == 7
    assert pd.isna(frame["param_repetition"].iloc[-1])
    assert frame["param_repetition"].dtype == "Int64"
    assert frame["param_ratio"].dtype == "float64"
    assert frame["param_flag"].dtype == "boolean"
    assert frame["param_mixed"].dtype == "object"


def test_load_joins_runs_and_folders_once(tmp_path: Path) -> None:
    first = write_records(tmp_path, ok_record(collective_case()))
    second = write_records(tmp_path, ok_record(collective_case()))
    num_rows = 2 * len(parbench.load(first))
    assert len(parbench.load(first, str(second))) == num_rows
    assert len(parbench.load(tmp_path, first)) == num_rows


def test_load_and_figures_accept_latest(tmp_path: Path) -> None:
    curve = [ok_record(collective_case(size_bytes=size)) for size in (1024, 4096)]
    run = write_records(tmp_path, *curve)
    latest = tmp_path / "latest"
    assert len(parbench.load(latest)) == len(parbench.load(run))
    assert len(parbench.load_samples(str(latest))) == len(parbench.load_samples(run))
    assert parbench.figures(latest).keys() == parbench.figures(run).keys()


def test_load_warns_of_missing_sweep_points(tmp_path: Path) -> None:
    points = [
        (make_sweep_point(1, "2 nodes"), [scaling_run(2)]),
        (make_sweep_point(2, "4 nodes"), [failed_node_run()]),
        (make_sweep_point(3, "8 nodes"), []),
    ]
    with pytest.warns(UserWarning, match="Point 8 nodes has no run") as warnings:
        frame = parbench.load(write_sweep(tmp_path / "sweep", points))
    assert warnings[0].filename == __file__
    assert list(frame["point"].unique()) == ["2 nodes", "4 nodes"]


def test_load_samples_has_a_row_per_sample(tmp_path: Path) -> None:
    record = ok_record(collective_case(), seconds=2e-3, n=3)
    frame = parbench.load_samples(write_records(tmp_path, record))
    assert list(frame["iteration"]) == [0, 1, 2]
    assert list(frame["seconds"]) == [2e-3, 2e-3, 2e-3]
    assert set(frame["case"]) == {record.case.id}


def test_load_samples_by_rank_is_in_seconds(tmp_path: Path) -> None:
    record = ok_record(collective_case())
    path = write_records(tmp_path, record)
    np.savez(
        path / make_samples_path(record),
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
    assert set(frame["steps_per_sample"]) == {10}


def test_documented_example_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "guides" / "reports.md").read_text()
    pattern = r"^```python\n(import parbench\n\nruns.*?)^```"
    (code,) = re.findall(pattern, page, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(GOLDEN)
    exec(code, {})
    records = load_run(STEPS).records
    rate = next(r.metrics["busbw"].value for r in records if "busbw" in r.metrics)
    assert rate is not None
    assert f"{rate / 1e9:.6f}" in capsys.readouterr().out
