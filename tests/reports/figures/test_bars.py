"""Bars: step times launch by launch, and the parts of steps and of their memory."""

import numpy as np
import pytest
import reports_fixtures as fixtures
from figure_parts import axes_of, bars_of, labels_of, words
from matplotlib.axes import Axes
from report_rows import rows_of
from reports_fixtures import ok, plain, step, training_metrics

from reports.figures.bars import draw_breakdown, draw_memory, draw_steps


def test_steps_show_each_launch_and_all_launches() -> None:
    records = [ok(step("ddp"), i, seconds) for i, seconds in enumerate((0.010, 0.011, 0.013))]
    axes = axes_of(draw_steps(rows_of(*records, ok(step("fsdp"), 0, 0.02), launches=3)))
    points = [(float(np.asarray(line.get_xdata())[0]), line.get_marker()) for line in axes.get_lines()]
    assert [x for x, marker in points if marker == "o"] == [0.010, 0.011, 0.013]
    assert [x for x, marker in points if marker == "D"] == pytest.approx([(0.010 * 0.011 * 0.013) ** (1 / 3), 0.02])
    assert words(axes.get_yticklabels()) == ["ddp", "fsdp"]
    many = axes_of(draw_steps(rows_of(*(ok(step(), launch) for launch in range(60)), launches=60)))
    assert len([line for line in many.get_lines() if line.get_marker() == "o"]) == 20


def test_step_times_begin_at_zero_unless_they_differ_too_much() -> None:
    def axes(*seconds: float) -> Axes:
        return axes_of(draw_steps(rows_of(*(ok(step(f"s{i}"), seconds=s) for i, s in enumerate(seconds)))))

    near, far = axes(0.01, 0.02), axes(0.01, 2.0)
    assert (near.get_xscale(), near.get_xlim()[0], near.get_xlabel()) == ("linear", 0, "step time")
    assert (far.get_xscale(), far.get_xlabel()) == ("log", "step time (log axis)")
    assert near.xaxis.get_major_formatter()(0.0) == "0"
    assert len([label for label in words(axes(0.6, 2.4).get_xticklabels()) if label]) <= 7
    assert draw_steps([]) is None
    assert draw_steps(rows_of(ok(step("ddp"), metrics={"step_time": fixtures.seconds_metric(None)}))) is None


def test_the_parts_of_a_step_are_stacked_in_the_order_of_the_legend() -> None:
    figure = draw_breakdown(rows_of(ok(step(), metrics=training_metrics(1.0, ("dp", "tp")))))
    assert labels_of(figure) == ["compute", "exposed dp", "exposed tp", "copy", "idle"]
    axes = axes_of(figure)
    assert {bar.get_y() + bar.get_height() / 2 for bar in bars_of(axes)} == {0.0}
    assert [bar.get_x() for bar in bars_of(axes)] == pytest.approx([0, 0.6, 0.75, 0.9, 0.92])
    assert [bar.get_width() for bar in bars_of(axes)] == pytest.approx([0.6, 0.15, 0.15, 0.02, 0.06])
    assert words(axes.texts) == ["61 %", "15 %", "15 %"]
    assert axes.get_xlim()[0] == 0


def test_each_step_is_a_bar_and_a_part_has_one_colour() -> None:
    other = training_metrics(1.0, ("shard",)) | {"compute": plain(0.2, "s")}
    rows = rows_of(ok(step("ddp"), metrics=training_metrics(1.0)), ok(step("mine")), ok(step("fsdp"), metrics=other))
    axes = axes_of(figure := draw_breakdown(rows))
    assert words(axes.get_yticklabels()) == ["ddp", "fsdp"]
    assert labels_of(figure) == ["compute", "exposed dp", "exposed shard", "copy", "idle"]
    compute = [bar for bar in bars_of(axes) if bar.get_x() == 0]
    assert [bar.get_width() for bar in compute] == pytest.approx([0.6, 0.2])
    assert (len({bar.get_facecolor() for bar in compute}), len({one.get_facecolor() for one in axes.patches})) == (1, 5)
    second = [bar.get_x() for bar in bars_of(axes) if bar.get_y() + bar.get_height() / 2 == 1]
    assert second == pytest.approx([0, 0.2, 0.5, 0.52])
    zero = rows_of(ok(step(), metrics={"compute": plain(0.0, "s")}))
    assert draw_breakdown([]) is draw_breakdown(rows[1:2]) is draw_breakdown(zero) is None


def test_memory_is_a_bar_for_each_step_stacked_of_its_components() -> None:
    rows = rows_of(ok(step("ddp"), metrics=training_metrics()), ok(step("tp")))
    figure = draw_memory(rows)
    assert labels_of(figure) == ["parameters", "gradients", "optimizer", "activations"]
    axes = axes_of(figure)
    assert [(bar.get_x() / 2**20, bar.get_width() / 2**20) for bar in bars_of(axes)] == [(0, 1), (1, 1), (2, 2), (4, 3)]
    assert {"0", "2 MiB", "4 MiB"} <= set(words(axes.get_xticklabels()))
    assert draw_memory(rows[1:]) is None
