"""Rows of a run by their kind, and the first page made of them."""

import pytest

from parbench.reports.analysis.analysis import front_of
from tests.support.report_rows import analyze_records, matrix_case
from tests.support.reports_fixtures import (
    collective_case,
    failed_record,
    ok_record,
    step_case,
    training_metrics,
)


def test_each_measured_row_has_one_place() -> None:
    analysis = analyze_records(
        ok_record(collective_case()),
        ok_record(step_case()),
        ok_record(matrix_case(0, 1)),
        ok_record(matrix_case(1, 0)),
        failed_record(collective_case("broadcast")),
    )
    assert [row.case.name for row in analysis.communication] == ["collective.all_reduce"]
    assert [row.case.name for row in analysis.steps] == ["step.ddp"]
    assert [len(matrix.rows) for matrix in analysis.matrices] == [2]


def test_front_has_the_fastest_operation_first() -> None:
    front = front_of(
        analyze_records(
            ok_record(collective_case("broadcast", 1 << 20), seconds=2e-3),
            ok_record(collective_case("all_reduce", 1 << 20), seconds=1e-3),
            ok_record(collective_case("all_reduce", 1024), seconds=20e-6),
        )
    )
    first, second = front.operations
    assert first.name == "all_reduce"
    assert first.latency == 20e-6
    assert second.name == "broadcast"
    assert second.latency is None


def test_front_shows_where_a_step_spends_its_time() -> None:
    front = front_of(analyze_records(ok_record(step_case(), metrics=training_metrics())))
    (step,) = front.steps
    assert step.overlap == 0.33
    assert step.parts["compute"] == pytest.approx(0.6)
