"""A step's communication from the run's own collectives: which curve is taken, what is summed, what is missing."""

from typing import Any

import msgspec
import pytest
from reports_fixtures import WORLD, collective, comm_call, curve_records, make_plan, make_run, ok, step

from bench.records import Record
from reports.fits import Curve, fit_curves
from reports.predict import Call, Prediction, calls_of, predict_comm
from reports.summary import Row, summarize

MEGABYTE = 1 << 20


def rows_of(*records: Record, launches: int = 1) -> tuple[Row, ...]:
    cases = {record.case.id: record.case for record in records}.values()
    return summarize(make_run(make_plan(cases, launches=launches), records)).rows


def curves_of(*records: Record) -> tuple[Curve, ...]:
    return fit_curves(rows_of(*records), None)


def step_row(*calls: dict[str, Any], **more: Any) -> Row:
    (row,) = rows_of(ok(step(), details={"comm_calls": list(calls)}, **more))
    return row


def predicted(row: Row, *records: Record) -> Prediction:
    found = predict_comm(row, curves_of(*records))
    assert found is not None
    return found


def grouped(latency: float, group_size: int | None = 2, **params: Any) -> list[Record]:
    """Return a curve on a group; one that is the whole world does not say its size."""
    details = {} if group_size is None else {"group_size": group_size}
    records = curve_records(latency=latency, **{"group": "pairs", "member": 0, **params})
    return [msgspec.structs.replace(record, details=details) for record in records]


def on_world(records: list[Record], **more: Any) -> list[Record]:
    return [msgspec.structs.replace(one, world=msgspec.structs.replace(WORLD, **more)) for one in records]


def test_each_call_takes_what_its_curve_says_of_its_size_and_axes_are_summed() -> None:
    row = step_row(
        comm_call("all_reduce", MEGABYTE, "dp", count=3),
        comm_call("all_reduce", 4096, "tp"),
        comm_call("all_gather", 65536, "tp", count=2),
    )
    found = predicted(row, *curve_records("all_reduce"), *curve_records("all_gather", latency=70e-6))
    tp = 20e-6 + 4096 / 3e9 + 2 * (70e-6 + 65536 / 3e9)
    assert found.seconds_by_axis == pytest.approx({"dp": 3 * (20e-6 + MEGABYTE / 3e9), "tp": tp})
    assert found.seconds == pytest.approx(sum(found.seconds_by_axis.values()))
    assert (found.missing, found.extrapolated, found.notes) == ((), (), ())


def test_an_operation_without_a_curve_is_named_and_its_axis_unknown() -> None:
    row = step_row(comm_call(axis="dp"), comm_call(axis="tp"), comm_call("reduce_scatter", axis="tp"))
    found = predicted(row, *curve_records())
    assert list(found.seconds_by_axis) == ["dp"]
    assert found.missing == ("tp: reduce_scatter on 4 ranks",)
    assert found.seconds is None
    assert found.notes == ("predicted comm: no blocking float32 curve for tp: reduce_scatter on 4 ranks",)


def test_what_is_missing_several_times_is_named_once() -> None:
    row = step_row(comm_call(num_bytes=1), comm_call(num_bytes=2))
    assert predicted(row).missing == ("dp: all_reduce on 4 ranks",)


@pytest.mark.parametrize(
    "params", [{"mode": "pipelined"}, {"dtype": "float16"}, {"beside": "gemm"}, {"redop": "max"}, {"placement": "x"}]
)
def test_a_curve_of_another_mode_type_load_or_reduction_does_not_count(params: dict[str, Any]) -> None:
    assert predicted(step_row(comm_call()), *curve_records(**params)).missing


@pytest.mark.parametrize("more", [{"size": 8}, {"backend": "nccl"}, {"device": "cuda"}])
def test_a_curve_of_another_world_does_not_count(more: dict[str, Any]) -> None:
    assert predicted(step_row(comm_call()), *on_world(curve_records(), **more)).missing


def test_a_smaller_world_of_the_calls_size_counts() -> None:
    found = predicted(step_row(comm_call(ranks=2)), *on_world(curve_records(), size=2))
    assert found.seconds == pytest.approx(20e-6 + MEGABYTE / 3e9)


def test_a_group_of_the_calls_size_counts_and_one_of_another_does_not() -> None:
    row = step_row(comm_call(ranks=2))
    assert predicted(row, *grouped(50e-6)).seconds == pytest.approx(50e-6 + MEGABYTE / 3e9)
    assert predicted(row, *grouped(50e-6, 3)).missing


def test_a_group_that_is_the_whole_world_has_its_size() -> None:
    records = grouped(50e-6, None, group="contiguous:4")
    assert predicted(step_row(comm_call()), *records).seconds == pytest.approx(50e-6 + MEGABYTE / 3e9)


def test_whole_worlds_come_before_groups() -> None:
    records = [*grouped(90e-6), *on_world(curve_records(), size=2)]
    assert predicted(step_row(comm_call(ranks=2)), *records).seconds == pytest.approx(20e-6 + MEGABYTE / 3e9)


def test_groups_that_communicate_at_once_come_first_and_of_them_the_slowest() -> None:
    row = step_row(comm_call(ranks=2))
    alone = [*grouped(30e-6), *grouped(40e-6, member=1)]
    assert predicted(row, *alone).seconds == pytest.approx(40e-6 + MEGABYTE / 3e9)
    together = [*grouped(35e-6, together=True), *grouped(25e-6, member=1, together=True)]
    assert predicted(row, *alone, *together).seconds == pytest.approx(35e-6 + MEGABYTE / 3e9)


@pytest.mark.parametrize(("num_bytes", "words"), [(512, "512"), (1 << 25, "32M")])
def test_a_size_beyond_those_measured_is_flagged_in_words(num_bytes: int, words: str) -> None:
    found = predicted(step_row(comm_call(num_bytes=num_bytes)), *curve_records())
    told = f"dp: all_reduce on 4 ranks, {words} a call, 1K to 16M were measured"
    assert found.extrapolated == (told,)
    assert found.notes == (f"predicted comm is extrapolated: {told}",)
    assert found.seconds == pytest.approx(20e-6 + num_bytes / 3e9)


@pytest.mark.parametrize("num_bytes", [1024, 1 << 24])
def test_the_ends_of_the_curve_are_measured(num_bytes: int) -> None:
    assert predicted(step_row(comm_call(num_bytes=num_bytes)), *curve_records()).extrapolated == ()


def test_a_step_that_sends_nothing_is_predicted_to_take_nothing() -> None:
    assert predicted(step_row()).seconds == 0


@pytest.mark.parametrize(
    "details", [{}, {"comm_calls": None}, {"comm_calls": "all"}, {"comm_calls": [{"axis": "dp", "op": "all_reduce"}]}]
)
def test_without_readable_calls_there_is_no_prediction(details: dict[str, Any]) -> None:
    (row,) = rows_of(ok(step(), details=details))
    assert calls_of(row) is None
    assert predict_comm(row, curves_of(*curve_records())) is None


def test_launches_that_agree_are_one_prediction_and_others_none() -> None:
    def told(second: dict[str, Any]) -> tuple[Call, ...] | None:
        calls = ([comm_call()], [second])
        (row,) = rows_of(*(ok(step(), i, details={"comm_calls": one}) for i, one in enumerate(calls)), launches=2)
        return calls_of(row)

    assert told(comm_call()) == (Call(axis="dp", op="all_reduce", bytes=MEGABYTE, ranks=4, count=1),)
    assert told(comm_call(count=2)) is None


def test_point_to_point_calls_have_curves_too() -> None:
    row = step_row(comm_call("sendrecv", axis="pp"))
    records = curve_records("sendrecv")
    assert records[0].case == collective("sendrecv")
    assert predicted(row, *records).seconds == pytest.approx(20e-6 + MEGABYTE / 3e9)
