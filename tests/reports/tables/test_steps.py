"""The tables of training steps."""

from pathlib import Path

from parbench.bench.results.metrics import MetricValue
from parbench.reports.run_data import RunData
from tests.support.reports.report_rows import (
    assert_cells,
    find_table_of_run,
    report_lines,
    table_lines,
)
from tests.support.reports.reports_fixtures import (
    counted_metric,
    counted_metrics,
    ok_record,
    step_case,
    step_metrics,
    training_metrics,
)
from tests.support.reports.traced import make_timeline, traced_record, write_traced_run


def step_line(metrics: dict[str, MetricValue]) -> dict[str, str]:
    (line,) = report_lines("steps-table", ok_record(step_case(), metrics=metrics))
    return line


def test_step_shows_exposed_communication_and_memory() -> None:
    line = step_line(training_metrics(axes=("dp", "tp")))
    assert_cells(
        line,
        {
            "exposed": "30.0 %",
            "mfu": "34.5 %",
            "memory": "7.00 MiB",
        },
    )
    unknown = {"exposed_comm.tp": counted_metric(None, "s")}
    assert "exposed" not in step_line(training_metrics(axes=("dp", "tp")) | unknown)


def test_step_time_is_divided_into_parts() -> None:
    first = ok_record(step_case("ddp"), metrics=training_metrics(0.010))
    second = ok_record(step_case("fsdp"), metrics=training_metrics(0.010, axes=("shard",)))
    _, fsdp = report_lines("step-time", first, second, ok_record(step_case("untraced")))
    assert_cells(
        fsdp,
        {
            "step": "fsdp",
            "profiled step": "10.0 ms",
            "exposed dp": "-",
            "exposed shard": "3.00 ms",
        },
    )


def test_volume_compares_bytes_with_formulas() -> None:
    metrics = {
        "bytes_sent.dp": counted_metric(8192.0, "B"),
        "bytes_expected.dp": counted_metric(4096.0, "B"),
        "bytes_ratio.dp": counted_metric(2.0, ""),
        "exposed_comm.dp": counted_metric(0.003, "s"),
        "bytes_sent.tp": counted_metric(512.0, "B"),
        "calls.dp": counted_metric(4.0, ""),
    }
    details = {"axes": {"dp": {"ranks": 4}}, "bytes_formula": {"dp": "M Psi e"}}
    dp, tp = report_lines(
        "communication-volume", ok_record(step_case(), metrics=metrics, details=details)
    )
    assert_cells(
        dp,
        {
            "axis": "dp",
            "ranks": "4",
            "formula": "M Psi e",
            "calls": "4",
            "analytical bytes": "4.00 KiB",
            "counted bytes": "8.00 KiB",
            "bytes ratio": "2.000",
            "exposed": "3.00 ms",
        },
    )
    assert tp["formula"] == "-"
    assert tp["counted bytes"] == "512 B"


def test_memory_joins_all_sources() -> None:
    metrics = {
        "memory_formula.buffers": 8.0,
        "memory.parameters": 16.0,
        "memory_counted.cache": 32.0,
    }
    record = ok_record(step_case(), metrics=step_metrics(1.0) | counted_metrics("B", metrics))
    lines = report_lines("step-memory", record)
    assert [list(line.values())[1:] for line in lines] == [
        ["buffers", "8.00 B", "-", "-"],
        ["cache", "-", "32.0 B", "-"],
        ["parameters", "-", "-", "16.0 B"],
    ]


def test_calls_are_summed_by_operation_and_size(tmp_path: Path) -> None:
    run = write_traced_run(tmp_path, [(traced_record(), make_timeline())])
    lines = table_lines(find_table_of_run(RunData(run), "step-calls"))
    assert [line["size"] for line in lines] == ["4.00 MiB", "1.00 MiB"]
    assert_cells(
        lines[0], {"axis": "dp", "calls": "1", "time": "3.00 ms", "exposed": "3.00 ms"}
    )
