"""The frames of a run: their rows, columns and unknown values."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from parbench import cli
from parbench.bench.results.formatting import format_case_size
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import Record, read_records
from parbench.bench.results.tables import is_missing
from parbench.reports.frames import list_rows
from parbench.reports.run_data import RunData
from tests.support.reports.report_rows import run_from_records
from tests.support.reports.reports_fixtures import (
    collective_case,
    ok_record,
    seconds_metric,
    step_case,
    write_run,
)

CASE = collective_case(size_bytes=65536)


def list_cases(*records: Any, repetitions: int = 1) -> list[dict[str, Any]]:
    return list_rows(RunData(run_from_records(*records, repetitions=repetitions)).cases)


def test_cases_keep_integers_and_texts() -> None:
    first, second = list_cases(
        ok_record(CASE), ok_record(step_case("ddp", layers_per_stage="3+1"))
    )
    assert format_case_size(first["param_size_bytes"]) == "64K"
    assert is_missing(second["param_size_bytes"])
    assert first["param_layers_per_stage"] is None
    assert second["param_layers_per_stage"] == "3+1"
    assert first["label"] == "all_reduce 64K blocking float32"
    assert second["label"] == "ddp"
    assert first["noise"] == "stable"
    assert first["check"] == "ok"


def test_cases_have_intervals_between_repetitions() -> None:
    alone = {"time": seconds_metric(1e-3), "skew": seconds_metric(1e-4)}
    metrics = {"time": seconds_metric(1e-3)}
    records = [ok_record(CASE, i, metrics=metrics if i else alone) for i in range(3)]
    (row,) = list_cases(*records, repetitions=3)
    assert row["seconds_low"] == row["time_low"]
    assert row["skew"] == pytest.approx(1e-4)
    assert is_missing(row["skew_low"])
    (row,) = list_cases(ok_record(CASE, metrics=alone))
    assert is_missing(row["seconds_low"])


def test_metric_does_not_hide_a_column() -> None:
    metrics = {"step_time": seconds_metric(1.0), "status": MetricValue(value=7.0)}
    (row,) = list_cases(ok_record(step_case(), metrics=metrics))
    assert row["status"] == "ok"


def test_command_reads_a_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_run(tmp_path, run_from_records(ok_record(CASE)))
    limits = tmp_path / "limits.toml"
    limits.write_text('"collective.all_reduce" = { time = "<1s" }')
    history = tmp_path / "history.sqlite"
    monkeypatch.setenv("PARBENCH_HISTORY", str(history))
    assert CliRunner().invoke(cli.main, ["history", "add", str(path)]).exit_code == 0
    paths = []

    def record_path(path: Path) -> Iterator[Record]:
        paths.append(path)
        return read_records(path)

    monkeypatch.setattr("parbench.bench.results.runs.read_records", record_path)
    assert cli.HOOKS.show_run(path, "tables", limits) == 0
    assert paths == [path / "records.jsonl"]
