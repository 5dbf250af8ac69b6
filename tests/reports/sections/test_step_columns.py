"""The tables of training steps: what a step's metrics say together, what is shown, and what a terminal keeps."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import Record
from parbench.reports.analysis import steps
from parbench.reports.analysis.fits import Curve, fit_curves
from parbench.reports.analysis.summary import Row
from parbench.reports.report import Column, Table
from tests.support.report_rows import (
    analyze_records,
    column_texts,
    find_analysis_table,
    summarize_row,
    summarize_rows,
)
from tests.support.reports_fixtures import (
    comm_call,
    counted_metric,
    curve_records,
    ok_record,
    step_case,
    step_metrics,
    training_metrics,
)


def step_table(
    rows: Sequence[Row], curves: Sequence[Curve] = (), table: str = "steps-table"
) -> Table[Any]:
    found = replace(analyze_records(), steps=tuple(rows), curves=tuple(curves))
    return find_analysis_table(found, table)


def step_columns(rows: Sequence[Row], curves: Sequence[Curve] = ()) -> tuple[Column[Any], ...]:
    return step_table(rows, curves).columns


def step_notes(rows: Sequence[Row], curves: Sequence[Curve] = ()) -> tuple[str, ...]:
    return step_table(rows, curves).notes


def time_columns(rows: Sequence[Row]) -> tuple[Column[Any], ...]:
    return step_table(rows, table="step-time").columns


def step_row(metrics: dict[str, MetricValue], name: str = "ddp") -> Row:
    return summarize_row(ok_record(step_case(name), metrics=metrics))


def without(*names: str) -> Row:
    return step_row(
        {name: metric for name, metric in training_metrics(1.0).items() if name not in names}
    )


def curves() -> tuple[Curve, ...]:
    return fit_curves(summarize_rows(*curve_records()), None)


def cells(record: Record, curves: tuple[Curve, ...] = ()) -> dict[str, str]:
    row = summarize_row(record)
    return column_texts(step_columns([row], curves), row)


def step_cells(metrics: dict[str, MetricValue]) -> dict[str, str]:
    return cells(ok_record(step_case(), metrics=metrics))


def residual_share(row: Row) -> float | None:
    return steps.share_of_traced(row, row.value("residual"))


def test_parts_and_residual_add_up_to_the_step() -> None:
    row = step_row(training_metrics(2.0, ("dp", "tp")))
    found = steps.parts(row)
    assert list(found) == ["compute", "exposed dp", "exposed tp", "copy", "idle"]
    assert sum(found.values()) == pytest.approx(0.98 * 2.0)
    assert residual_share(row) == pytest.approx(0.02)
    assert "idle" not in steps.parts(
        step_row(training_metrics() | {"idle": counted_metric(None, "s")})
    )
    zero = {name: counted_metric(0.0, "s") for name in ("compute", "residual")}
    for unknown in ({"residual": counted_metric(0.1, "s")}, zero):
        assert residual_share(step_row(step_metrics(1.0) | unknown)) is None
    known, other = without(), step_row(step_metrics(1.0))
    assert steps.broken_down([other, known]) == (known,)


def test_memory_lines_join_all_sources() -> None:
    metrics = step_metrics(1.0) | {
        "memory_formula.buffers": counted_metric(8, "B"),
        "memory.parameters": counted_metric(16, "B"),
    }
    metrics |= {
        "memory_counted.cache": counted_metric(32, "B"),
        "memory.gradients": counted_metric(None, "B"),
    }
    lines = steps.memory_lines([step_row(metrics)])
    sources = ("memory", "memory_formula", "memory_counted")
    assert {line.component: [line.num_bytes(source) for source in sources] for line in lines} == {
        "parameters": [16, None, None],
        "buffers": [None, 8, None],
        "cache": [None, None, 32],
    }


def test_step_columns_show_predicted_communication() -> None:
    row = summarize_row(
        ok_record(
            step_case(), metrics=training_metrics(), details={"comm_calls": [comm_call(count=2)]}
        )
    )
    columns = step_columns([row], curves())
    told = column_texts(columns, row)
    assert (told["exposed"], told["predicted comm"]) == (
        "30.0 %",
        "739 us",
    )  # 2 * (20 us + 1 MiB / 3 GB/s)
    assert (told["mfu"], told["memory"]) == ("34.5 %", "7.00 MiB")


def test_step_columns_sum_exposed_and_show_worst_ratio() -> None:
    two = training_metrics(axes=("dp", "tp")) | {"exposed_comm.tp": counted_metric(0.002, "s")}
    assert step_cells(two)["exposed"] == "33.3 %"  # 3.5 of the 10.5 ms that the parts add up to
    assert "exposed" not in step_cells(two | {"exposed_comm.tp": counted_metric(None, "s")})
    told: list[tuple[dict[str, float | None], str]] = [
        ({"dp": 1.0, "tp": 1.0004}, "1.000"),
        ({"dp": 1.02, "tp": 0.9}, "0.900 (tp)"),
        ({"cp": 1.0, "cp.forward": 3.0}, "1.000"),
        ({"dp": None, "tp": 1.5}, "1.500 (tp)"),
    ]
    for ratios, text in told:
        metrics = {
            f"bytes_ratio.{axis}": counted_metric(ratio, "") for axis, ratio in ratios.items()
        }
        assert step_cells(step_metrics(1.0) | metrics)["bytes ratio"] == text, ratios


def test_step_columns_mark_extrapolation() -> None:
    beyond = ok_record(
        step_case(), details={"comm_calls": [comm_call(num_bytes=1 << 30)]}, notes=["few cores"]
    )
    assert cells(beyond, curves())["predicted comm"] == "358 ms (extrapolated)"
    assert step_notes(summarize_rows(beyond), curves()) == (
        "ddp: few cores",
        "ddp: predicted comm is extrapolated: dp: all_reduce on 4 ranks, 1G a call, 1K to 16M were measured",
    )
    lacking = ok_record(step_case(), details={"comm_calls": [comm_call("all_gather")]})
    assert "predicted comm" not in cells(lacking, curves())
    why = "ddp: predicted comm: no blocking float32 curve for dp: all_gather on 4 ranks"
    assert step_notes(summarize_rows(lacking), curves()) == (why,)
    assert step_notes(summarize_rows(lacking)) == ()  # a run without any curves is not told so


def test_time_columns_handle_gaps_and_rounding() -> None:
    row = step_row(
        training_metrics()
        | {"residual": counted_metric(-1e-18, "s"), "compute_slowdown": counted_metric(None, "s")}
    )
    told = column_texts(time_columns([row]), row)
    assert told["residual"] == "0.00 %"
    assert "compute slowdown" not in told
    one, two = summarize_rows(
        ok_record(step_case("ddp"), metrics=training_metrics(axes=("dp",))),
        ok_record(step_case("fsdp"), metrics=training_metrics(axes=("shard",))),
    )
    told = column_texts(time_columns([one, two]), two)
    assert (told["step"], told["exposed dp"], told["exposed shard"]) == ("fsdp", "-", "3.00 ms")


HELD = {
    "rank": 1,
    "points": [[0, 0], [2000, 3 << 20], [4000, 1 << 20]],
    "phases": [["forward", 0, 1500], ["backward", 1600, 4000]],
}


def test_memory_over_time_shows_its_peak() -> None:
    flat = {**HELD, "points": [[0, 0], [9, 1]]}
    records = [
        ok_record(step_case(), 0),
        ok_record(step_case(), 1, details={"memory_over_time": HELD}),
        ok_record(step_case(), 2, details={"memory_over_time": flat}),
    ]
    table = step_table(summarize_rows(*records, launches=3), table="step-memory-time")
    [line] = table.rows
    shown = column_texts(table.columns, line)
    assert [shown[name] for name in ("rank", "rise", "at", "in")] == [
        "1",
        "3.00 MiB",
        "2.00 ms",
        "backward",
    ]
    assert line.launch == 1
    backward_in_time = {**HELD, "points": [[5, 0], [4, 1]]}
    for damaged in (backward_in_time, {"rank": "x"}):
        assert (
            steps.held_over_time(
                summarize_rows(ok_record(step_case(), details={"memory_over_time": damaged}))
            )
            == ()
        )


def test_axis_lines_compare_bytes_with_formulas() -> None:
    metrics = {name: counted_metric(number, unit) for name, number, unit in (
        ("bytes_sent.dp", 8192.0, "B"), ("bytes_expected.dp", 4096.0, "B"), ("bytes_ratio.dp", 2.0, ""),
        ("exposed_comm.dp", 0.003, "s"), ("bytes_sent.tp", 512.0, "B"), ("calls.dp", 4.0, ""),
    )}  # fmt: skip
    details = {"axes": {"dp": {"ranks": 4}}, "bytes_formula": {"dp": "M Psi e"}}
    table = step_table(
        summarize_rows(ok_record(step_case(), metrics=metrics, details=details)), table="strategies"
    )
    dp, tp = (column_texts(table.columns, line) for line in table.rows)
    names = (
        "axis",
        "ranks",
        "formula",
        "calls",
        "bytes expected",
        "bytes sent",
        "bytes ratio",
        "exposed comm",
    )
    assert [dp[name] for name in names] == [
        "dp",
        "4",
        "M Psi e",
        "4.00",
        "4.00 KiB",
        "8.00 KiB",
        "2.000",
        "3.00 ms",
    ]
    assert [tp[name] for name in names] == ["tp", "-", "-", "-", "-", "512 B", "-", "-"]
    assert table.notes[0].startswith("Formulas: Psi ")
    alone = step_table(summarize_rows(ok_record(step_case(), metrics=metrics)), table="strategies")
    assert alone.notes == (), "without a formula there are no letters"
