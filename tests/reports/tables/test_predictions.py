"""Predictions of `parbench plan validate` next to what the run measured."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from parbench.bench.files import encode_json
from parbench.bench.results.details import PLAN_FILE, ComponentCheck, StepCheck, Validation
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.tables import Table
from parbench.reports.run_data import RunData
from parbench.reports.tables.predictions import list_prediction_tables
from tests.support.reports.report_rows import run_from_records, table_lines
from tests.support.reports.reports_fixtures import ok_record, step_case


def read_predictions(folder: Path) -> Table:
    run = replace(run_from_records(ok_record(step_case())), path=folder)
    (table,) = list_prediction_tables(RunData(run))
    return table


def test_predictions_show_errors_and_intervals(tmp_path: Path) -> None:
    step = StepCheck(
        case="a",
        label="ddp",
        ranks=2,
        rule="",
        compute="measured",
        notes=["its compute is of another pass"],
        components=[
            ComponentCheck(
                name="step", predicted=0.012, measured=MetricValue(value=0.010, unit="s")
            ),
            ComponentCheck(
                name="comm dp",
                predicted=0.012,
                measured=MetricValue(value=0.010, unit="s", low=0.007, high=0.0143),
            ),
        ],
    )
    validation = Validation(
        run="run-1", fits="run-1", rows=[step], left_out={"cp": "not priced"}
    )
    (tmp_path / PLAN_FILE).write_bytes(encode_json(validation))
    table = read_predictions(tmp_path)
    assert [list(line.values()) for line in table_lines(table)] == [
        ["ddp", "step", "12.0 ms", "10.0 ms", "+20.0%"],
        ["ddp", "comm dp", "12.0 ms", "10.0 ms [7.00, 14.3]", "+20.0%"],
    ]
    assert "ddp: its compute is of another pass" in table.notes
    assert any("cp: not priced" in note for note in table.notes)


@pytest.mark.parametrize(
    ("content", "fact"),
    [(b"{", "parbench plan validate"), (b'{"schema": 2, "rows": []}', "schema 2 is newer")],
)
def test_damaged_predictions_are_a_note(tmp_path: Path, content: bytes, fact: str) -> None:
    (tmp_path / PLAN_FILE).write_bytes(content)
    table = read_predictions(tmp_path)
    assert not table.rows
    assert fact in table.notes[0]
