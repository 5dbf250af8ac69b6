"""What a step's metrics say together."""

import pytest
from reports_fixtures import make_plan, make_run, ok, plain, step, step_metrics, training_metrics

from bench.records import Metric
from reports.breakdown import (
    axes,
    broken_down,
    by_axis,
    exposed_seconds,
    memory_lines,
    parts,
    residual_fraction,
    state_bytes,
    worst_ratio,
)
from reports.summary import Row, summarize


def row_of(metrics: dict[str, Metric], name: str = "ddp") -> Row:
    record = ok(step(name), metrics=metrics)
    (row,) = summarize(make_run(make_plan([record.case]), [record])).rows
    return row


def without(*names: str) -> Row:
    return row_of({name: metric for name, metric in training_metrics(1.0).items() if name not in names})


def test_a_metric_of_several_axes_is_told_by_axis() -> None:
    row = row_of(training_metrics(1.0, ("dp", "tp")))
    assert by_axis(row, "exposed_comm") == {"dp": 0.15, "tp": 0.15}
    assert by_axis(row, "comm") == {}


def test_axes_come_in_the_order_of_their_rows() -> None:
    rows = [row_of(training_metrics(1.0, ("tp", "dp"))), row_of(training_metrics(1.0, ("shard", "dp")))]
    assert axes(rows, "exposed_comm") == ("tp", "dp", "shard")


def test_parts_and_residual_are_the_identity() -> None:
    row = row_of(training_metrics(2.0, ("dp", "tp")))
    found = parts(row)
    assert list(found) == ["compute", "exposed dp", "exposed tp", "copy", "idle"]
    assert sum(found.values()) == pytest.approx(0.98 * 2.0)
    assert residual_fraction(row) == pytest.approx(0.02)


def test_what_is_unknown_is_no_part() -> None:
    assert "copy" not in parts(without("exposed_copy"))
    assert "idle" not in parts(row_of(training_metrics() | {"idle": plain(None, "s")}))


def test_the_residual_of_nothing_is_unknown() -> None:
    assert residual_fraction(without("residual")) is None
    assert residual_fraction(row_of(step_metrics(1.0) | {"residual": plain(0.1, "s")})) is None
    zero = {name: plain(0.0, "s") for name in ("compute", "residual")}
    assert residual_fraction(row_of(step_metrics(1.0) | zero)) is None


def test_exposed_communication_is_unknown_without_any_axis() -> None:
    assert exposed_seconds(row_of(training_metrics(1.0, ("dp", "tp")))) == pytest.approx(0.3)
    assert exposed_seconds(row_of(step_metrics(1.0))) is None


def test_the_worst_ratio_is_furthest_from_one_on_either_side() -> None:
    ratios = {"bytes_ratio.dp": plain(1.2, ""), "bytes_ratio.tp": plain(0.7, ""), "bytes_ratio.pp": plain(None, "")}
    assert worst_ratio(row_of(step_metrics(1.0) | ratios)) == ("tp", 0.7)
    assert worst_ratio(row_of(step_metrics(1.0))) is None


def test_the_state_is_parameters_gradients_and_optimizer_or_unknown() -> None:
    assert state_bytes(without()) == 4 << 20
    assert state_bytes(without("memory.activations")) == 4 << 20
    assert state_bytes(without("memory.gradients")) is None


def test_steps_that_know_nothing_are_not_broken_down() -> None:
    known, other = without(), row_of(step_metrics(1.0))
    assert broken_down([other, known]) == (known,)


def test_memory_has_a_line_for_each_component_that_any_source_knows() -> None:
    metrics = step_metrics(1.0) | {"memory_formula.buffers": plain(8, "B"), "memory.parameters": plain(16, "B")}
    metrics |= {"memory_counted.cache": plain(32, "B"), "memory.gradients": plain(None, "B")}
    lines = memory_lines([row_of(metrics)])
    assert [line.component for line in lines] == ["parameters", "buffers", "cache"]
    assert [line.num_bytes("memory") for line in lines] == [16, None, None]
    assert [line.num_bytes("memory_formula") for line in lines] == [None, 8, None]
    assert lines[2].num_bytes("memory_counted") == 32
