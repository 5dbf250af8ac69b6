import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from reports_fixtures import (
    collective,
    link,
    make_plan,
    make_run,
    ok,
    plain,
    rate_metric,
    sample_run,
    seconds_metric,
    step,
    training_metrics,
)

from bench.records import Metric, Record
from reports.figures import (
    draw_arrivals,
    draw_breakdown,
    draw_curves,
    draw_memory,
    draw_scaling,
    draw_steps,
    elided,
)
from reports.fits import fit_curves
from reports.summary import Row, summarize
from reports.svg import inline_svg


def rows_of(*records: Record, launches: int = 1) -> tuple[Row, ...]:
    cases = {record.case.id: record.case for record in records}.values()
    return summarize(make_run(make_plan(cases, launches=launches), records)).rows


def sample_rows(mode: str) -> list[Row]:
    return [row for row in summarize(sample_run()).rows if row.metrics and row.case.params.get("mode") == mode]


def axes_of(figure: Figure | None) -> Axes:
    assert figure is not None
    (axes,) = figure.axes
    return axes


def values(data: Any) -> list[float]:
    return [float(value) for value in np.asarray(data)]


def svg_of(figure: Figure | None) -> str:
    assert figure is not None
    return inline_svg(figure, name="a", title="b", description="c")


def labels_of(figure: Figure | None) -> list[str]:
    assert figure is not None
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_each_operation_is_a_line_of_its_values_against_size() -> None:
    figure = draw_curves(sample_rows("pipelined"), "busbw")
    names = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "sendrecv"]
    assert labels_of(figure) == names
    lines = axes_of(figure).get_lines()
    assert len(lines) == len(names)
    assert values(lines[0].get_xdata()) == [1 << 10, 1 << 16, 1 << 20, 1 << 24]


def test_lines_differ_in_colour_marker_and_dash() -> None:
    lines = axes_of(draw_curves(sample_rows("blocking"), "time")).get_lines()
    assert len({line.get_color() for line in lines}) == len(lines)
    assert len({line.get_marker() for line in lines}) == len(lines)
    drawn = re.findall(r"stroke-dasharray: ([^;]*)", svg_of(draw_curves(sample_rows("blocking"), "time")))
    assert len(set(drawn)) == 4  # and the solid line, which has none


def test_bandwidth_is_drawn_in_gigabytes_and_time_in_seconds() -> None:
    rows = rows_of(ok(collective(), seconds=1e-3), ok(collective(size_bytes=2048), seconds=3e-3))
    (bandwidth,) = axes_of(draw_curves(rows, "busbw")).get_lines()
    (time,) = axes_of(draw_curves(rows, "time")).get_lines()
    assert values(bandwidth.get_ydata()) == pytest.approx([1024e-6 * 1.5, 2048e-6 / 3 * 1.5])
    assert values(time.get_ydata()) == [1e-3, 3e-3]


def test_both_axes_are_logarithmic_and_sizes_are_words() -> None:
    axes = axes_of(draw_curves(sample_rows("blocking"), "time"))
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    format_x, format_y = axes.xaxis.get_major_formatter(), axes.yaxis.get_major_formatter()
    assert [format_x(size) for size in (1024, 1 << 20)] == ["1K", "1M"]
    assert [format_y(seconds) for seconds in (1e-5, 2e-3, 1.0)] == ["10 us", "2 ms", "1 s"]
    assert len(axes.get_xticks()) <= 8


def test_points_are_joined_in_the_order_of_size() -> None:
    rows = rows_of(*(ok(collective(size_bytes=size)) for size in (1 << 20, 1 << 10, 1 << 16)))
    (line,) = axes_of(draw_curves(rows, "time")).get_lines()
    assert values(line.get_xdata()) == [1 << 10, 1 << 16, 1 << 20]


def test_the_interval_is_a_band() -> None:
    rows = rows_of(ok(collective(), seconds=1e-3), ok(collective(size_bytes=2048), seconds=1e-3))
    (band,) = [shape for shape in axes_of(draw_curves(rows, "time")).collections if isinstance(shape, PolyCollection)]
    (path,) = band.get_paths()
    heights = np.asarray(path.vertices)[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((0.9e-3, 1.1e-3))


def test_a_single_size_has_its_interval_as_a_bar() -> None:
    axes = axes_of(draw_curves(rows_of(ok(collective())), "time"))
    (bar,) = [shape for shape in axes.collections if isinstance(shape, LineCollection)]
    assert bar.get_segments()[0][:, 1].tolist() == pytest.approx([0.9e-3, 1.1e-3])


def test_a_parameter_without_an_axis_makes_its_own_line() -> None:
    rows = rows_of(*(ok(collective("broadcast", root=root)) for root in (0, 1)))
    assert labels_of(draw_curves(rows, "time")) == ["broadcast root=0", "broadcast root=1"]


@pytest.mark.parametrize("value", [None, 0.0])
def test_what_a_log_axis_cannot_show_is_left_out(value: float | None) -> None:
    hidden = ok(collective(), metrics={"busbw": rate_metric(value)})
    assert draw_curves(rows_of(hidden), "busbw") is None
    rows = rows_of(hidden, ok(collective(size_bytes=4096)))
    (line,) = axes_of(draw_curves(rows, "busbw")).get_lines()
    assert values(line.get_xdata()) == [4096]


def test_an_interval_that_reaches_zero_is_not_drawn() -> None:
    metric = Metric(value=1e-3, unit="s", better="lower", low=0.0, high=5e-3)
    rows = rows_of(ok(collective(), metrics={"time": metric}))
    (bar,) = axes_of(draw_curves(rows, "time")).collections
    assert isinstance(bar, LineCollection)
    assert bar.get_segments()[0][:, 1].tolist() == [1e-3, 1e-3]


def switching(size: int) -> float:
    return 10e-6 + size / 1e9 if size <= 1 << 16 else 100e-6 + size / 5e9


def test_a_fit_is_a_thin_dashed_line_of_its_operations_colour_broken_at_the_knee() -> None:
    sizes = [1 << exponent for exponent in range(10, 25)]
    other = [ok(collective("broadcast", size), seconds=50e-6 + size / 2e9) for size in sizes[:4]]
    switch = [ok(collective(size_bytes=size), seconds=switching(size)) for size in sizes]
    rows = rows_of(*other, *switch)
    (broadcast, reduce) = curves = fit_curves(rows, None)
    assert len(reduce.fit.segments) == 2
    figure = draw_curves(rows, "time", curves)
    first, second, *fits = axes_of(figure).get_lines()
    assert [line.get_color() for line in fits] == [first.get_color(), *[second.get_color()] * 2]
    assert all(line.get_linestyle() != "-" and line.get_linewidth() < first.get_linewidth() for line in fits)
    ends = [values(line.get_xdata())[place] for line in fits for place in (0, -1)]
    (knee,) = reduce.fit.knees
    assert ends == pytest.approx([1024, 8192, 1024, knee, knee, 1 << 24])
    assert values(fits[0].get_ydata())[0] == pytest.approx(broadcast.fit.predict(1024))
    assert values(fits[2].get_ydata())[-1] == pytest.approx(reduce.fit.predict(1 << 24))
    assert labels_of(figure) == ["broadcast", "all_reduce", "fit"]


def test_a_fit_bends_as_its_line_does_on_log_axes() -> None:
    rows = rows_of(*(ok(collective(size_bytes=size), seconds=20e-6 + size / 3e9) for size in (1024, 1 << 16, 1 << 24)))
    _, fit = axes_of(draw_curves(rows, "time", fit_curves(rows, None))).get_lines()
    sizes, seconds = values(fit.get_xdata()), values(fit.get_ydata())
    assert len(sizes) > 10
    assert seconds == pytest.approx([20e-6 + size / 3e9 for size in sizes])


def test_fits_are_of_time_alone() -> None:
    rows = sample_rows("blocking")
    figure = draw_curves(rows, "busbw", fit_curves(rows, None))
    assert len(axes_of(figure).get_lines()) == 6
    assert "fit" not in labels_of(figure)


def test_the_link_is_a_level_line_of_bandwidth_alone() -> None:
    rows = sample_rows("blocking")
    figure = draw_curves(rows, "busbw", ceiling=link(25e9))
    *_, level = axes_of(figure).get_lines()
    assert values(level.get_ydata()) == [25.0, 25.0]
    assert labels_of(figure)[-1] == "link, 25.0 GB/s"
    low, high = axes_of(figure).get_ylim()
    assert low < 25 < high
    assert len(axes_of(draw_curves(rows, "busbw")).get_lines()) == 6
    assert len(axes_of(draw_curves(rows, "time", ceiling=link(25e9))).get_lines()) == 6


def test_steps_show_each_launch_and_all_launches() -> None:
    records = [ok(step("ddp"), i, seconds) for i, seconds in enumerate((0.010, 0.011, 0.013))]
    axes = axes_of(draw_steps(rows_of(*records, ok(step("fsdp"), 0, 0.02), launches=3)))
    points = [(float(np.asarray(line.get_xdata())[0]), line.get_marker()) for line in axes.get_lines()]
    assert [x for x, marker in points if marker == "o"] == [0.010, 0.011, 0.013]
    assert [x for x, marker in points if marker == "D"] == pytest.approx([(0.010 * 0.011 * 0.013) ** (1 / 3), 0.02])
    assert [text.get_text() for text in axes.get_yticklabels()] == ["ddp", "fsdp"]


def test_step_times_begin_at_zero_unless_they_differ_too_much() -> None:
    near = axes_of(draw_steps(rows_of(ok(step("ddp"), seconds=0.01), ok(step("fsdp"), seconds=0.02))))
    assert (near.get_xscale(), near.get_xlim()[0], near.get_xlabel()) == ("linear", 0, "step time")
    far = axes_of(draw_steps(rows_of(ok(step("ddp"), seconds=0.01), ok(step("fsdp"), seconds=2.0))))
    assert (far.get_xscale(), far.get_xlabel()) == ("log", "step time (log axis)")


def test_zero_is_said_without_a_unit() -> None:
    axes = axes_of(draw_steps(rows_of(ok(step("ddp"), seconds=0.01))))
    assert axes.xaxis.get_major_formatter()(0.0) == "0"


def test_without_step_times_there_is_no_figure() -> None:
    assert draw_steps([]) is None
    assert draw_steps(rows_of(ok(step("ddp"), metrics={"step_time": seconds_metric(None)}))) is None


def test_pyplot_is_not_imported() -> None:
    code = "import sys, reports.page; sys.exit('matplotlib.pyplot' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def bars_of(axes: Axes) -> list[tuple[float, float, float]]:
    """Return middle height, left end and width of each part."""
    found = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    return [(bar.get_y() + bar.get_height() / 2, bar.get_x(), bar.get_width()) for bar in found]


def test_the_parts_of_a_step_are_stacked_in_the_order_of_the_legend() -> None:
    figure = draw_breakdown(rows_of(ok(step(), metrics=training_metrics(1.0, ("dp", "tp")))))
    assert labels_of(figure) == ["compute", "exposed dp", "exposed tp", "copy", "idle"]
    axes = axes_of(figure)
    heights, lefts, widths = zip(*bars_of(axes), strict=True)
    assert set(heights) == {0.0}
    assert lefts == pytest.approx([0, 0.6, 0.75, 0.9, 0.92])
    assert widths == pytest.approx([0.6, 0.15, 0.15, 0.02, 0.06])
    assert [text.get_text() for text in axes.texts] == ["61 %", "15 %", "15 %"]
    assert axes.get_xlim()[0] == 0


def test_each_step_is_a_bar_and_a_part_has_one_colour() -> None:
    other = training_metrics(1.0, ("shard",)) | {"compute": plain(0.2, "s")}
    rows = rows_of(ok(step("ddp"), metrics=training_metrics(1.0)), ok(step("mine")), ok(step("fsdp"), metrics=other))
    figure = draw_breakdown(rows)
    axes = axes_of(figure)
    assert [text.get_text() for text in axes.get_yticklabels()] == ["ddp", "fsdp"]
    assert labels_of(figure) == ["compute", "exposed dp", "exposed shard", "copy", "idle"]
    compute = [patch for patch in axes.patches if isinstance(patch, Rectangle) and patch.get_x() == 0]
    assert [bar.get_width() for bar in compute] == pytest.approx([0.6, 0.2])
    assert len({bar.get_facecolor() for bar in compute}) == 1
    assert len({patch.get_facecolor() for patch in axes.patches}) == 5
    assert [left for height, left, _ in bars_of(axes) if height == 1] == pytest.approx([0, 0.2, 0.5, 0.52])


def test_steps_with_nothing_to_stack_have_no_breakdown() -> None:
    assert draw_breakdown([]) is None
    assert draw_breakdown(rows_of(ok(step()))) is None
    assert draw_breakdown(rows_of(ok(step(), metrics={"compute": plain(0.0, "s")}))) is None


def test_memory_is_a_bar_for_each_step_stacked_of_its_components() -> None:
    rows = rows_of(ok(step("ddp"), metrics=training_metrics()), ok(step("tp")))
    figure = draw_memory(rows)
    assert labels_of(figure) == ["parameters", "gradients", "optimizer", "activations"]
    bars = [patch for patch in axes_of(figure).patches if isinstance(patch, Rectangle)]
    assert [bar.get_width() / 2**20 for bar in bars] == [1, 1, 2, 3]
    assert [bar.get_x() / 2**20 for bar in bars] == [0, 1, 2, 4]
    ticks = [text.get_text() for text in axes_of(figure).get_xticklabels()]
    assert {"0", "2 MiB", "4 MiB"} <= set(ticks)
    assert draw_memory(rows[1:]) is None


def test_a_strip_is_fullest_where_its_rank_is_latest() -> None:
    figure = draw_arrivals([("a", {0: 0.0, 1: 2e-6}), ("unknown", {}), ("b", {0: 8e-6, 1: 4e-6})])
    axes = axes_of(figure)
    alphas = [float(patch.get_alpha() or 0) for patch in axes.patches]
    assert alphas[1] == alphas[2]  # each strip is scaled by its own latest rank
    assert alphas[0] < alphas[3] < alphas[2]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["a", "b"]
    assert [text.get_text() for text in axes.texts] == ["0 us", "2.00 us", "8.00 us", "4.00 us"]
    assert draw_arrivals([("unknown", {})]) is None


def test_many_ranks_have_strips_without_numbers() -> None:
    figure = draw_arrivals([("a", {rank: rank * 1e-6 for rank in range(64)})])
    assert list(axes_of(figure).texts) == []
    assert len(axes_of(figure).get_xticks()) <= 16


def test_scaling_is_a_line_for_each_case_below_perfection() -> None:
    figure = draw_scaling([("ddp", {2: 1.0, 8: 0.5, 4: 0.8}), ("lonely", {2: 1.0})])
    first, perfect = axes_of(figure).get_lines()
    assert values(first.get_xdata()) == [2, 4, 8]
    assert values(first.get_ydata()) == [1.0, 0.8, 0.5]
    assert values(perfect.get_ydata()) == [1.0, 1.0]
    assert labels_of(figure) == ["ddp"]
    assert draw_scaling([("lonely", {2: 1.0})]) is None


def test_long_names_are_cut_only_where_they_stay_apart() -> None:
    long, other = "unidirectional source=0 target=1", "unidirectional source=0 target=2"
    rows = rows_of(ok(collective(long)), ok(collective("broadcast")))
    assert labels_of(draw_curves(rows, "busbw")) == ["unidirectional source=0...", "broadcast"]
    both = rows_of(ok(collective(long)), ok(collective(other)))
    assert labels_of(draw_curves(both, "busbw")) == [long, other]
    assert len(labels_of(draw_curves(rows_of(ok(collective("x" * 9999)), ok(collective("y"))), "time"))[0]) == 26


def test_times_of_several_seconds_have_few_ticks() -> None:
    rows = rows_of(ok(step("a"), seconds=0.6), ok(step("b"), seconds=2.4))
    labels = [text.get_text() for text in axes_of(draw_steps(rows)).get_xticklabels()]
    assert len([label for label in labels if label]) <= 7


def test_of_very_many_launches_the_first_are_drawn() -> None:
    rows = rows_of(*(ok(step(), launch) for launch in range(60)), launches=60)
    circles = [line for line in axes_of(draw_steps(rows)).get_lines() if line.get_marker() == "o"]
    assert len(circles) == 20


def test_a_long_label_keeps_its_first_word_and_its_last_ones() -> None:
    """What tells steps apart stands last."""
    assert elided("ddp layers=2") == "ddp layers=2"
    long = "ep_layer ep=1 experts=16 variant=all_to_all capacity=1.5 routing=hot_experts"
    assert elided(long) == "ep_layer ... capacity=1.5 routing=hot_experts"
    assert len(elided(long)) <= 48
    assert len(elided("x" * 100)) <= 48
