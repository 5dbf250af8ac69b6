"""Communication of steps as it is predicted from fits."""

from typing import Any

import pytest
from msgspec.structs import replace

from parbench.bench.results.records import Record
from parbench.reports.analysis.fits import fit_curves
from parbench.reports.analysis.steps import predict_communication
from tests.support.reports.report_rows import summarize_row, summarize_rows
from tests.support.reports.reports_fixtures import (
    WORLD,
    comm_call,
    curve_records,
    ok_record,
    step_case,
)

MEGABYTE = 1 << 20
Call = dict[str, Any]


def predict(calls: list[Call], *records: Record) -> float | None:
    step = summarize_row(ok_record(step_case(), details={"comm_calls": calls}))
    return predict_communication(step, fit_curves(summarize_rows(*records), None))


def test_prediction_sums_calls_by_axis() -> None:
    calls = [
        comm_call("all_reduce", MEGABYTE, "dp", count=3),
        comm_call("all_gather", 65536, "tp", count=2),
    ]
    reduce_curve = curve_records("all_reduce", latency=20e-6)
    gather_curve = curve_records("all_gather", latency=70e-6)
    prediction = predict(calls, *reduce_curve, *gather_curve)
    dp = 3 * (20e-6 + MEGABYTE / 3e9)
    tp = 2 * (70e-6 + 65536 / 3e9)
    assert prediction == pytest.approx(dp + tp)


def with_world(records: list[Record], **fields: Any) -> list[Record]:
    world = replace(WORLD, **fields)
    return [replace(record, world=world) for record in records]


@pytest.mark.parametrize(
    "records",
    [
        curve_records(mode="pipelined"),
        curve_records(background="gemm"),
        with_world(curve_records(), size=8),
        with_world(curve_records(), device="cuda"),
    ],
)
def test_prediction_ignores_curves_of_other_settings(records: list[Record]) -> None:
    assert predict([comm_call()], *records) is None


def group_curve(latency: float, index: int = 0, **params: Any) -> list[Record]:
    records = curve_records(latency=latency, group="pairs", group_index=index, **params)
    return [replace(record, details={"group_size": 2}) for record in records]


def test_prediction_uses_the_slowest_group() -> None:
    groups = [
        *group_curve(30e-6),
        *group_curve(40e-6, 1),
        *group_curve(20e-6, 0, concurrent=True),
    ]
    prediction = predict([comm_call(ranks=2)], *groups)
    assert prediction == pytest.approx(40e-6 + MEGABYTE / 3e9)


def test_prediction_needs_calls_that_agree() -> None:
    records = []
    for repetition in range(2):
        calls = [comm_call(count=1 + repetition)]
        records.append(ok_record(step_case(), repetition, details={"comm_calls": calls}))
    curves = fit_curves(summarize_rows(*curve_records()), None)
    assert predict_communication(summarize_row(*records), curves) is None
