"""The tables of training steps: what is shown, what is left out where nobody knows it, and what a terminal keeps."""

from collections.abc import Sequence
from typing import TypeVar

import pytest
from reports_fixtures import (
    comm_call,
    curve_records,
    make_plan,
    make_run,
    ok,
    plain,
    seconds_metric,
    step,
    step_metrics,
    training_metrics,
)

from bench.cases import make_case
from bench.records import Metric, Record
from reports.breakdown import broken_down, memory_lines
from reports.columns import Column
from reports.fits import Curve, fit_curves
from reports.step_columns import memory_columns, step_columns, step_notes, time_columns
from reports.summary import Row, summarize

T = TypeVar("T")


def rows_of(*records: Record) -> tuple[Row, ...]:
    return summarize(make_run(make_plan([record.case for record in records]), records)).rows


def curves_of(*records: Record) -> tuple[Curve, ...]:
    return fit_curves(rows_of(*records), None)


def cells_of(columns: Sequence[Column[T]], row: T) -> dict[str, str]:
    return {column.title: column.text(row) for column in columns}


def step_cells(metrics: dict[str, Metric]) -> dict[str, str]:
    (row,) = rows_of(ok(step(), metrics=metrics))
    return cells_of(step_columns([row]), row)


def test_a_step_row() -> None:
    (row,) = rows_of(ok(step("ddp"), seconds=0.012, notes=["functional only", "timed compute"]))
    cells = cells_of(step_columns([row]), row)
    assert cells["step"] == "ddp"
    assert cells["step time"] == "12.0 ms [10.8, 13.2]"
    assert cells["tokens/s"] == "341000"
    assert cells["p99"] == "-"
    assert cells["notes"] == "functional only; timed compute"


def test_a_step_without_notes_or_rates_shows_dashes() -> None:
    (row,) = rows_of(ok(step("mine"), metrics={"time": seconds_metric(2.0)}, noise=None, samples={"values": []}))
    cells = cells_of(step_columns([row]), row)
    assert cells["step time"] == "2.00 s [1.80, 2.20]"
    assert (cells["tokens/s"], cells["notes"], cells["noise"], cells["n"]) == ("-", "-", "-", "-")


def test_the_p99_is_that_of_the_headline() -> None:
    metrics = {"step_time": seconds_metric(1.0), "step_time_p99": seconds_metric(3.0)}
    (row,) = rows_of(ok(step(), metrics=metrics))
    assert cells_of(step_columns([row]), row)["p99"] == "3.00 s"


def test_a_step_that_knows_all_shows_all() -> None:
    (row,) = rows_of(ok(step(), metrics=training_metrics(), details={"comm_calls": [comm_call(count=2)]}))
    cells = cells_of(step_columns([row], curves_of(*curve_records())), row)
    assert list(cells)[:9] == [
        *("step", "step time", "tokens/s", "mfu", "compute", "exposed comm", "predicted comm", "bytes ratio", "memory"),
    ]
    assert cells["mfu"] == "34.5 %"
    assert cells["compute"] == "6.00 ms"
    assert cells["exposed comm"] == "3.00 ms"
    assert cells["predicted comm"] == "739 us"  # 2 * (20 us + 1 MiB / 3 GB/s)
    assert cells["bytes ratio"] == "1.000"
    assert cells["memory"] == "4.00 MiB"


def test_what_no_step_knows_has_no_column_and_what_one_knows_is_a_dash_for_the_other() -> None:
    gemm = ok(make_case("compute.gemm", "m:f", {"m": 8}), metrics={"time": seconds_metric(1.0)})
    known, other = rows_of(ok(step(), metrics=training_metrics()), gemm)
    news = ("mfu", "compute", "exposed comm", "bytes ratio", "memory")
    assert not {*news, "predicted comm"} & cells_of(step_columns([other]), other).keys()
    cells = cells_of(step_columns([known, other]), other)
    assert [cells[title] for title in news] == ["-"] * 5
    assert "predicted comm" not in cells
    columns = {column.title: column for column in step_columns([known, other])}
    assert [columns[title].sort(other) for title in news] == [None] * 5


def test_an_unknown_mfu_has_no_column() -> None:
    assert "mfu" not in step_cells(training_metrics() | {"mfu": plain(None, "")})


def test_exposed_communication_is_summed_over_axes_and_unknown_where_one_is() -> None:
    two = training_metrics(axes=("dp", "tp")) | {"exposed_comm.tp": plain(0.002, "s")}
    assert step_cells(two)["exposed comm"] == "3.50 ms"
    assert "exposed comm" not in step_cells(two | {"exposed_comm.tp": plain(None, "s")})


@pytest.mark.parametrize(
    ("ratios", "text"),
    [
        ({"dp": 1.0, "tp": 1.0004}, "1.000"),
        ({"dp": 1.02, "tp": 0.9}, "0.900 (tp)"),
        ({"dp": 1.02}, "1.020"),
        ({"dp": None, "tp": 1.5}, "1.500 (tp)"),
    ],
)
def test_the_bytes_ratio_is_that_of_the_worst_axis(ratios: dict[str, float | None], text: str) -> None:
    metrics = {f"bytes_ratio.{axis}": plain(ratio, "") for axis, ratio in ratios.items()}
    assert step_cells(step_metrics(1.0) | metrics)["bytes ratio"] == text


def test_a_narrow_terminal_keeps_what_links_steps_to_collectives() -> None:
    (row,) = rows_of(ok(step(), metrics=training_metrics(), details={"comm_calls": [comm_call()]}))
    kept = [column.title for column in step_columns([row], curves_of(*curve_records())) if not column.drop]
    assert kept == ["step", "step time", "tokens/s", "exposed comm", "predicted comm"]
    assert [column.title for column in step_columns([]) if not column.drop] == ["step", "step time", "tokens/s"]


def test_an_extrapolated_prediction_says_so_beside_the_number_and_in_the_notes() -> None:
    calls = [comm_call(num_bytes=1 << 30)]
    (row,) = rows_of(ok(step(), details={"comm_calls": calls}, notes=["functional only"]))
    cells = cells_of(step_columns([row], curves_of(*curve_records())), row)
    assert cells["predicted comm"] == "358 ms (extrapolated)"
    assert cells["notes"] == (
        "functional only; predicted comm is extrapolated: dp: all_reduce on 4 ranks, 1G a call, 1K to 16M were measured"
    )


def test_a_missing_curve_is_named_in_the_notes_but_not_where_the_run_has_no_curves() -> None:
    (row,) = rows_of(ok(step(), details={"comm_calls": [comm_call("all_gather")]}))
    cells = cells_of(step_columns([row], curves_of(*curve_records())), row)
    assert "predicted comm" not in cells
    assert cells["notes"] == "predicted comm: no blocking float32 curve for dp: all_gather on 4 ranks"
    assert cells_of(step_columns([row]), row)["notes"] == "-"


def test_where_the_time_went_shows_each_axis_and_what_remains() -> None:
    (row,) = rows_of(ok(step(), metrics=training_metrics(axes=("dp", "tp"))))
    assert cells_of(time_columns([row]), row) == {
        "step": "ddp",
        "compute": "6.00 ms",
        "exposed dp": "1.50 ms",
        "exposed tp": "1.50 ms",
        "copy": "200 us",
        "idle": "600 us",
        "ect": "3.30 ms",
        "wait": "2.50 ms",
        "contention": "500 us",
        "skew": "400 us",
        "transfer dp": "1.00 ms",
        "transfer tp": "1.00 ms",
        "tracing": "3.00 %",
        "residual": "2.00 %",
    }


def test_a_residual_that_is_nothing_but_rounding_reads_as_zero() -> None:
    (row,) = rows_of(ok(step(), metrics=training_metrics() | {"residual": plain(-1e-18, "s")}))
    assert cells_of(time_columns([row]), row)["residual"] == "0.00 %"


def test_an_axis_that_another_step_lacks_is_a_dash_there() -> None:
    one, two = rows_of(
        ok(step("ddp"), metrics=training_metrics(axes=("dp",))),
        ok(step("fsdp"), metrics=training_metrics(axes=("shard",))),
    )
    cells = cells_of(time_columns([one, two]), two)
    assert (cells["step"], cells["exposed dp"], cells["exposed shard"]) == ("fsdp", "-", "3.00 ms")


def test_unmeasured_contention_has_no_column() -> None:
    (row,) = rows_of(ok(step(), metrics=training_metrics() | {"contention": plain(None, "s")}))
    assert "contention" not in cells_of(time_columns([row]), row)


def test_memory_stands_by_component_with_its_three_sources() -> None:
    metrics = training_metrics() | {
        "memory.optimizer": plain(5 << 20, "B"),
        "memory_counted.optimizer": plain(None, "B"),
    }
    rows = rows_of(ok(step(), metrics=metrics))
    lines = memory_lines(rows)
    columns = memory_columns(rows)
    assert [column.title for column in columns] == ["step", "component", "formula", "counted", "measured"]
    assert [column.text(lines[2]) for column in columns] == ["ddp", "optimizer", "2.00 MiB", "-", "5.00 MiB"]
    assert [column.sort(lines[2]) for column in columns[2:]] == [2 << 20, None, 5 << 20]


def test_steps_bear_the_same_names_in_all_tables() -> None:
    records = [ok(step("ddp", bucket_mb=1.0), metrics=training_metrics()), ok(step("ddp", bucket_mb=2.0))]
    rows = rows_of(*records)
    (only,) = broken_down(rows)
    names = [columns[0].text(only) for columns in (step_columns(rows), time_columns(rows))]
    assert names == ["ddp bucket_mb=1.0"] * 2
    assert memory_columns(rows)[0].text(memory_lines(rows)[0]) == names[0]


def test_every_column_is_explained() -> None:
    rows = rows_of(ok(step(), metrics=training_metrics(), details={"comm_calls": [comm_call()]}))
    for column in (*step_columns(rows, curves_of(*curve_records())), *time_columns(rows)):
        assert column.help
    assert all(column.help for column in memory_columns(rows))


def test_notes_are_told_once_with_the_steps_that_say_so() -> None:
    records = [ok(step(name), notes=["few cores", *more]) for name, more in (("ddp", ["ddp: own"]), ("tp", ["odd"]))]
    rows = rows_of(*records, ok(step("fsdp"), notes=["odd"]))
    assert step_notes(rows) == ("ddp, tp: few cores", "ddp: own", "tp, fsdp: odd")
    assert step_notes(rows[:1]) == ("ddp: few cores", "ddp: own")
    assert step_notes(rows[1:]) == ("tp: few cores", "all steps: odd")


def test_what_a_prediction_lacks_is_a_note() -> None:
    rows = rows_of(ok(step(), details={"comm_calls": [comm_call("all_gather")]}))
    (told,) = step_notes(rows, curves_of(*curve_records()))
    assert told.startswith("ddp: predicted comm: no blocking float32 curve for dp: all_gather")
