"""Communication of steps as it is predicted from fits."""

from typing import Any

import pytest
from msgspec.structs import replace

from parbench.bench.results.records import Record
from parbench.reports.analysis.fits import fit_curves
from parbench.reports.analysis.steps import PredictedCommunication, predict_communication
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


def predict(calls: list[Call], *records: Record) -> PredictedCommunication:
    step = summarize_row(ok_record(step_case(), details={"comm_calls": calls}))
    prediction = predict_communication(step, fit_curves(summarize_rows(*records), None))
    assert prediction is not None
    return prediction


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
    assert prediction.seconds == pytest.approx(dp + tp)
    assert not prediction.notes


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
    prediction = predict([comm_call()], *records)
    assert prediction.seconds is None
    (note,) = prediction.notes
    assert "dp: all_reduce on 4 ranks" in note


def group_curve(latency: float, index: int = 0, **params: Any) -> list[Record]:
    records = curve_records(latency=latency, group="pairs", group_index=index, **params)
    return [replace(record, details={"group_size": 2}) for record in records]


def test_prediction_prefers_worlds_then_slowest_group() -> None:
    world = with_world(curve_records(latency=20e-6), size=2)
    groups = [*group_curve(30e-6), *group_curve(40e-6, 1)]
    concurrent = group_curve(35e-6, 0, concurrent=True)
    concurrent += group_curve(25e-6, 1, concurrent=True)
    calls = [comm_call(ranks=2)]
    transfer = MEGABYTE / 3e9
    by_world = predict(calls, *groups, *world)
    assert by_world.seconds == pytest.approx(20e-6 + transfer)
    by_group = predict(calls, *groups)
    assert by_group.seconds == pytest.approx(40e-6 + transfer)
    by_concurrent_group = predict(calls, *groups, *concurrent)
    assert by_concurrent_group.seconds == pytest.approx(35e-6 + transfer)


def test_prediction_needs_calls_that_agree() -> None:
    records = []
    for repetition in range(2):
        calls = [comm_call(count=1 + repetition)]
        records.append(ok_record(step_case(), repetition, details={"comm_calls": calls}))
    curves = fit_curves(summarize_rows(*curve_records()), None)
    assert predict_communication(summarize_row(*records), curves) is None
