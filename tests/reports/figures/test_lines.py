"""Lines: what is drawn where, in which looks, on which axes, and what is not."""

import re

import numpy as np
import pytest
import reports_fixtures as fixtures
from figure_parts import axes_of, labels_of, panels_of, points, values, words
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from nodes_fixtures import FAR_RATE, node_run
from report_rows import rows_of, with_metrics
from reports_fixtures import collective, context_details, context_record, cp, link, ok, plain, rate_metric, step_metrics

from bench.results.metrics import MetricValue
from bench.results.records import Record
from reports.analysis.attention import compared, contexts, sizes
from reports.analysis.contrasts import kinds
from reports.analysis.fits import fit_curves
from reports.analysis.rank_hosts import nodes_of
from reports.analysis.summary import Row, summarize
from reports.figures.lines import EFFICIENCY, RATE, TIME, draw_against_nodes, draw_curves, draw_kinds, draw_methods
from reports.figures.plot import elided
from reports.figures.svg import inline_svg


def sample_rows(mode: str) -> list[Row]:
    return [row for row in summarize(fixtures.sample_run()).rows if row.metrics and row.case.params.get("mode") == mode]


def test_each_operation_is_a_line_of_its_own_colour_marker_and_dash_on_log_axes() -> None:
    figure = draw_curves(sample_rows("pipelined"), "time")
    names = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "sendrecv"]
    assert labels_of(figure) == names
    axes = axes_of(figure)
    lines = axes.get_lines()
    assert len(lines) == len({line.get_color() for line in lines}) == len({line.get_marker() for line in lines}) == 6
    assert values(lines[0].get_xdata()) == [1 << 10, 1 << 16, 1 << 20, 1 << 24]
    assert figure is not None
    drawn = re.findall(r"stroke-dasharray: ([^;]*)", inline_svg(figure, name="a", title="b", description="c"))
    assert len(set(drawn)) == 4  # and the solid line, which has none
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    format_x, format_y = axes.xaxis.get_major_formatter(), axes.yaxis.get_major_formatter()
    assert [format_x(size) for size in (1024, 1 << 20)] == ["1K", "1M"]
    assert [format_y(seconds) for seconds in (1e-5, 2e-3, 1.0)] == ["10 us", "2 ms", "1 s"]
    assert len(axes.get_xticks()) <= 8


def test_bandwidth_is_drawn_in_gigabytes_and_time_in_seconds_in_the_order_of_size() -> None:
    rows = rows_of(*(ok(collective(size_bytes=size), seconds=s) for size, s in ((2048, 3e-3), (1024, 1e-3))))
    (bandwidth,), (time,) = (axes_of(draw_curves(rows, metric)).get_lines() for metric in ("busbw", "time"))
    assert (values(time.get_xdata()), values(time.get_ydata())) == ([1024, 2048], [1e-3, 3e-3])
    assert values(bandwidth.get_ydata()) == pytest.approx([1024e-6 * 1.5, 2048e-6 / 3 * 1.5])


def test_the_interval_is_a_band_and_of_a_single_size_a_bar_unless_it_reaches_zero() -> None:
    rows = rows_of(*(ok(collective(size_bytes=size), seconds=1e-3) for size in (1024, 2048)))
    (band,) = [shape for shape in axes_of(draw_curves(rows, "time")).collections if isinstance(shape, PolyCollection)]
    heights = np.asarray(band.get_paths()[0].vertices)[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((0.9e-3, 1.1e-3))
    metric = MetricValue(value=1e-3, unit="s", better="lower", low=0.0, high=5e-3)
    to_zero = ok(collective(), metrics={"time": metric})
    for record, ends in ((ok(collective()), [0.9e-3, 1.1e-3]), (to_zero, [1e-3, 1e-3])):
        shapes = axes_of(draw_curves(rows_of(record), "time")).collections
        (bar,) = [shape for shape in shapes if isinstance(shape, LineCollection)]
        assert bar.get_segments()[0][:, 1].tolist() == pytest.approx(ends)


def test_a_parameter_without_an_axis_makes_its_own_line_and_what_a_log_axis_cannot_show_none() -> None:
    rows = rows_of(*(ok(collective("broadcast", root=root)) for root in (0, 1)))
    assert labels_of(draw_curves(rows, "time")) == ["broadcast root=0", "broadcast root=1"]
    for value in (None, 0.0):
        hidden = ok(collective(), metrics={"busbw": rate_metric(value)})
        assert draw_curves(rows_of(hidden), "busbw") is None
        (line,) = axes_of(draw_curves(rows_of(hidden, ok(collective(size_bytes=4096))), "busbw")).get_lines()
        assert values(line.get_xdata()) == [4096]


def test_a_fit_is_a_thin_dashed_line_of_its_operations_colour_broken_at_the_knee() -> None:
    def switching(size: int) -> float:
        return 10e-6 + size / 1e9 if size <= 1 << 16 else 100e-6 + size / 5e9

    sizes = [1 << exponent for exponent in range(10, 25)]
    other = [ok(collective("broadcast", size), seconds=50e-6 + size / 2e9) for size in sizes[:4]]
    rows = rows_of(*other, *(ok(collective(size_bytes=size), seconds=switching(size)) for size in sizes))
    (broadcast, reduce) = curves = fit_curves(rows, None)
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


def test_fits_bend_on_log_axes_and_are_of_time_alone_as_the_link_is_of_bandwidth() -> None:
    rows = rows_of(*fixtures.curve_records())
    curves = fit_curves(rows, None)
    _, fit = axes_of(draw_curves(rows, "time", curves, link(25e9))).get_lines()
    sizes, seconds = values(fit.get_xdata()), values(fit.get_ydata())
    assert len(sizes) > 10
    assert seconds == pytest.approx([20e-6 + size / 3e9 for size in sizes])
    figure = draw_curves(rows, "busbw", curves, link(25e9))
    _, level = axes_of(figure).get_lines()
    assert values(level.get_ydata()) == [25.0, 25.0]
    assert labels_of(figure) == ["all_reduce", "link, 25.0 GB/s"]
    low, high = axes_of(figure).get_ylim()
    assert low < 25 < high
    assert len(axes_of(draw_curves(rows, "busbw")).get_lines()) == 1


def test_long_names_are_cut_only_where_they_stay_apart() -> None:
    long, other = "unidirectional source=0 target=1", "unidirectional source=0 target=2"
    for names, shown in (
        ((long, "broadcast"), ["unidirectional source=0...", "broadcast"]),
        ((long, other), [long, other]),
        (("x" * 9999, "y"), ["x" * 23 + "...", "y"]),
    ):
        assert labels_of(draw_curves(rows_of(*(ok(collective(name)) for name in names)), "busbw")) == shown
    assert elided("ddp layers=2") == "ddp layers=2"
    steps = "ep_layer ep=1 experts=16 variant=all_to_all capacity=1.5 routing=hot_experts"
    assert elided(steps) == "ep_layer ... capacity=1.5 routing=hot_experts"  # what tells steps apart stands last
    assert max(len(elided(name)) for name in (steps, "x" * 100)) <= 48


def test_scaling_is_a_line_for_each_case_below_perfection() -> None:
    axes = axes_of(draw_against_nodes([("ddp", {2: 1.0, 8: 0.5, 4: 0.8})], EFFICIENCY, "ranks"))
    ddp, perfect = points(axes)
    assert (ddp, [height for _, height in perfect]) == ([[2, 1.0], [4, 0.8], [8, 0.5]], [1.0, 1.0])
    assert (axes.get_ylim()[0], axes.yaxis.get_major_formatter()(0.5, None)) == (0, "50 %")
    assert axes.get_xlabel() == "ranks"


def test_each_kind_of_group_is_a_line_against_size() -> None:
    run = node_run()
    figure = draw_kinds(kinds(summarize(run).rows, nodes_of(run)))
    assert labels_of(figure) == ["world", "node", "node, together", "across", "across, together"]
    across = points(axes_of(figure))[3]
    assert [size for size, _ in across] == [1 << 16, 1 << 20, 1 << 22]
    assert across[2][1] == pytest.approx(FAR_RATE / 1e9, rel=0.01)
    assert words(axes_of(figure).get_xticklabels())[-1] == "4M"
    assert draw_kinds(()) is None


def test_lines_go_from_the_fewest_nodes_to_the_most_and_differ_in_more_than_colour() -> None:
    figure = draw_against_nodes([("a", {4: 1.0, 1: 8.0, 2: 2.0}), ("b", {1: 1.0, 4: 0.5})], RATE)
    axes = axes_of(figure)
    assert labels_of(figure) == ["a", "b"]
    assert points(axes)[0] == [[1, 8.0], [2, 2.0], [4, 1.0]]
    assert words(axes.get_xticklabels()) == ["1", "2", "4"]
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_yscale()) == ("nodes", "bus bandwidth (GB/s)", "log")
    first, other = axes.lines
    assert first.get_marker() != other.get_marker()
    assert first.get_linestyle() != other.get_linestyle()
    assert draw_against_nodes([("a", {4: 1.0})], TIME) is None  # on one number of nodes is no line
    assert labels_of(draw_against_nodes([("a", {4: 1.0}), ("b", {1: 1.0, 2: 1.0})], TIME)) == ["b"]


def both(longest: float = 0.03) -> list[Record]:
    told = (("ring", longest, 128), ("ring", 0.02, 64), ("zigzag", 0.01, 64), ("zigzag", 0.02, 128))
    return [context_record(*one) for one in told]


def methods_of(*records: Record) -> Figure | None:
    (comparison,) = compared(contexts(rows_of(*records)))
    return draw_methods(comparison.lines)


def titled(*records: Record) -> dict[str, Axes]:
    return {axes.get_title(): axes for axes in panels_of(methods_of(*records))}


def test_each_method_is_a_line_of_its_values_by_length_seen_beside_others() -> None:
    found = titled(*both())
    assert list(found) == [
        "step time",
        "attention's bytes a rank sends in a step",
        "exposed cp communication, of the traced step",
    ]
    time, sent, exposed = found.values()
    assert points(time) == [[[64, 0.02], [128, 0.03]], [[64, 0.01], [128, 0.02]]]
    intervals = [float(bar.get_segments()[0][0][0]) for bar in time.collections]  # type: ignore[attr-defined]
    assert intervals == pytest.approx([64 / 1.01, 128 / 1.01, 64 * 1.01, 128 * 1.01], rel=1e-4)  # side by side
    assert not exposed.collections
    assert time.get_ylim()[0] == 0
    assert time.get_xlabel() == "sequence (tokens)"
    ring, zigzag = time.get_lines()
    assert ring.get_marker() != zigzag.get_marker()
    assert ring.get_color() != zigzag.get_color()
    assert ring.get_linewidth() > zigzag.get_linewidth()  # which would cover it
    assert ring.get_markersize() > zigzag.get_markersize()
    texts = [sent.yaxis.get_major_formatter()(tick, None) for tick in sent.get_yticks()]
    assert texts[1:4] == ["0", "1 MiB", "2 MiB"]


def test_what_is_unknown_is_not_drawn_and_what_could_not_be_seen_takes_a_log_axis() -> None:
    found = titled(*both(longest=0.9)[:3])  # one did not run at a length
    time = found["step time (log axis)"]
    assert (time.get_yscale(), [len(of) for of in points(time)]) == ("log", [2, 1])
    assert methods_of(context_record("ring"), context_record("zigzag")) is None  # one length
    found = titled(*(with_metrics(record, exposed_comm__cp=plain(0.0, "s")) for record in both()))
    assert found["exposed cp communication, of the traced step"].get_ylim()[0] == 0
    bare = [
        ok(cp(method, sequence), metrics=step_metrics(0.5), details=context_details(method, sequence))
        for method in ("ring", "zigzag")
        for sequence in (64, 128)
    ]
    assert list(titled(*bare)) == ["step time"]


def test_against_ranks_the_crossover_stands_on_the_bytes_alone() -> None:
    runs = [[context_record(method, 0.1 / n, ranks=n) for method in ("ring", "ulysses")] for n in (2, 4)]
    [one] = sizes([one for records in runs for one in contexts(rows_of(*records))])
    time, sent, exposed = panels_of(draw_methods(one.lines, "cp (ranks)", one.crossover_ranks))
    assert points(time) == [[[2, 0.05], [4, 0.025]]] * 2
    assert time.get_xlabel() == "cp (ranks)"
    assert [x for ((x, _), *_) in points(sent)[2:]] == [2.0]
    assert len(time.get_lines()) == len(exposed.get_lines()) == 2
    assert [len(axes.get_lines()) for axes in panels_of(draw_methods(one.lines, "cp (ranks)"))] == [2, 2, 2]
