"""The page's figures: what is drawn where and in which colours, as inline SVG that is text, and under which panel."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
import msgspec
import numpy as np
import pytest
import reports_fixtures as fixtures
from late import late_record, samples
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from nodes_fixtures import hosts_of, node_run, pair_records
from nodes_fixtures import run_of as run_on
from report_rows import found_of, matrix_case, rows_of, run_of, table_in, table_of
from reports_fixtures import WORLD, collective, link, ok, plain, rate_metric, step, training_metrics
from traced import run_with, timeline, traced_record

from bench.results.metrics import MetricValue
from bench.results.runs import Run, load_run
from reports.analysis.contrasts import Pairs, pairs
from reports.analysis.fits import fit_curves
from reports.analysis.rank_hosts import Nodes, nodes_of
from reports.analysis.several import several
from reports.analysis.summary import Row, summarize
from reports.figures.bars import draw_breakdown, draw_memory, draw_steps
from reports.figures.heat_maps import draw_arrivals, draw_pairs
from reports.figures.lines import EFFICIENCY, draw_against_nodes, draw_curves
from reports.figures.plot import elided
from reports.figures.svg import FAINT, INK, SERIES, drawing, inline_svg
from reports.sections.several import report_of_several


def sample_rows(mode: str) -> list[Row]:
    return [row for row in summarize(fixtures.sample_run()).rows if row.metrics and row.case.params.get("mode") == mode]


def axes_of(figure: Figure | None) -> Axes:
    assert figure is not None
    return figure.axes[0]


def values(data: Any) -> list[float]:
    return [float(value) for value in np.asarray(data)]


def words(texts: Sequence[Any]) -> list[str]:
    return [text.get_text() for text in texts]


def labels_of(figure: Figure | None) -> list[str]:
    return words(axes_of(figure).figure.legends[0].get_texts())


def bars_of(axes: Axes) -> list[Rectangle]:
    return [patch for patch in axes.patches if isinstance(patch, Rectangle)]


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


def test_a_strip_is_fullest_where_its_rank_is_latest_and_has_no_numbers_for_many() -> None:
    axes = axes_of(draw_arrivals([("a", {0: 0.0, 1: 2e-6}), ("unknown", {}), ("b", {0: 8e-6, 1: 4e-6})]))
    alphas = [float(patch.get_alpha() or 0) for patch in axes.patches]
    assert alphas[1] == alphas[2]  # each strip is scaled by its own latest rank
    assert alphas[0] < alphas[3] < alphas[2]
    assert words(axes.get_yticklabels()) == ["a", "b"]
    assert words(axes.texts) == ["0 us", "2.00 us", "8.00 us", "4.00 us"]
    assert draw_arrivals([("unknown", {})]) is None
    many = axes_of(draw_arrivals([("a", {rank: rank * 1e-6 for rank in range(64)})]))
    assert list(many.texts) == []
    assert len(many.get_xticks()) <= 16


def test_scaling_is_a_line_for_each_case_below_perfection() -> None:
    figure = draw_against_nodes([("ddp", {2: 1.0, 8: 0.5, 4: 0.8}), ("lonely", {2: 1.0})], EFFICIENCY, "ranks")
    first, perfect = axes_of(figure).get_lines()
    assert values(first.get_xdata()) == [2, 4, 8]
    assert values(first.get_ydata()) == [1.0, 0.8, 0.5]
    assert values(perfect.get_ydata()) == [1.0, 1.0]
    assert labels_of(figure) == ["ddp"]
    assert draw_against_nodes([("lonely", {2: 1.0})], EFFICIENCY) is None


def matrix(ranks: int, **metrics: MetricValue) -> Pairs:
    ends = [(i, j) for i in range(ranks) for j in range(ranks) if i != j]
    rates = [metrics or {"busbw": rate_metric((1 + i * 10 + j) * 1e9)} for i, j in ends]
    records = [
        ok(matrix_case(*both), metrics={"time": fixtures.seconds_metric(1e-3), **told})
        for both, told in zip(ends, rates, strict=True)
    ]
    (found,) = pairs(rows_of(*records))
    return found


def by_node(run: Run) -> tuple[Pairs, Nodes]:
    (found,) = pairs(summarize(run).rows)
    nodes = nodes_of(run)
    assert nodes is not None
    return found, nodes


def borders(axes: Axes) -> list[tuple[float, float]]:
    lines = [line for line in axes.lines if to_hex(line.get_color()) == INK]
    places = [(np.asarray(line.get_xdata()).tolist(), line.get_linewidth()) for line in lines]
    return [(first, width) for (first, last), width in places if first == last]


def test_pairs_are_a_heat_map_with_a_square_each_and_none_on_the_diagonal() -> None:
    axes = axes_of(draw_pairs(matrix(3)))
    corners = [(bar.get_x() + 0.5, bar.get_y() + 0.5) for bar in bars_of(axes)]
    assert sorted(corners) == [(j, i) for j in range(3) for i in range(3) if i != j]
    told = {(0, 1): "2.00", (0, 2): "3.00", (1, 0): "11.0", (1, 2): "13.0", (2, 0): "21.0", (2, 1): "22.0"}
    assert {text.get_position()[::-1]: text.get_text() for text in axes.texts} == told  # by sender and receiver
    alphas = {bar.get_y(): bar.get_alpha() for bar in bars_of(axes) if bar.get_x() == -0.5}
    assert (alphas[1.5] or 0) > (alphas[0.5] or 1)  # from 2 to 0 is faster than from 1 to 0
    assert (borders(axes), axes.child_axes) == ([], [])
    many = axes_of(draw_pairs(matrix(20), Nodes(hosts=tuple(f"n{i}" for i in range(20)), switches={}, affinities={})))
    assert (len(many.texts), len(many.get_xticks()), many.child_axes) == (0, 10, [])
    assert draw_pairs(matrix(2, algbw=rate_metric(1e9))) is None


def test_lines_part_nodes_thick_ones_switches_and_a_nodes_own_squares_are_the_fullest() -> None:
    for placement, order in (("block", "01234567"), ("cyclic", "04152637")):
        axes = axes_of(draw_pairs(*by_node(node_run(placement))))
        assert borders(axes) == [(1.5, 1.0), (3.5, 2.2), (5.5, 1.0)]
        above, beside = axes.child_axes
        assert words(above.get_xticklabels()) == words(beside.get_yticklabels()) == ["n1", "n2", "n3", "n4"]
        assert words(axes.get_xticklabels()) == list(order)
        full = {(bar.get_x(), bar.get_y()): bar.get_alpha() or 0 for bar in bars_of(axes)}
        assert min(full[0.5, -0.5], full[2.5, 1.5]) > 2 * max(full[1.5, -0.5], full[6.5, -0.5])
    found, _ = by_node(run_on(pair_records(hosts_of(3, 1)), hosts_of(3, 1)))
    long = Nodes(hosts=tuple(f"node-with-a-long-name-{i}" for i in range(3)), switches={}, affinities={})
    above, _ = axes_of(draw_pairs(found, long)).child_axes
    assert words(above.get_xticklabels()) == ["node-with-a…"] * 3


def svg_of(label: str = "label", name: str = "one") -> str:
    with drawing():
        figure = Figure(figsize=(3, 2))
        axes = figure.add_subplot()
        axes.plot([1, 2, 3], [1, 3, 2], color=SERIES[0], marker="o")
        axes.fill_between([1, 2, 3], [0, 2, 1], [2, 4, 3], color=SERIES[1], alpha=0.2)
        axes.set_xlabel(label)
    return inline_svg(figure, name=name, title="A <title>", description="What & why")


def test_an_svg_says_what_it_shows_and_holds_no_style_sheet_metadata_or_namespace() -> None:
    text = svg_of()
    root = ElementTree.fromstring(text)
    assert (root.tag, root.attrib["role"]) == ("svg", "img")
    assert [(one.tag, one.text) for one in root[:2]] == [("title", "A <title>"), ("desc", "What & why")]
    assert root.attrib["aria-labelledby"] == f"{root[0].attrib['id']} {root[1].attrib['id']}"
    assert "viewBox" in root.attrib
    assert not {"width", "height"} & set(root.attrib)
    for word in ("<style", "metadata", "xmlns", "xlink", "<!DOCTYPE", "<?xml", "matplotlib.org"):
        assert word not in text
    for drawn in (INK, FAINT, *SERIES, "#000000", "#ffffff"):
        assert drawn not in text
    for shown in ("currentColor", "var(--faint)", "var(--series-0)", "var(--series-1)"):
        assert shown in text


def test_every_id_begins_with_the_name_and_every_reference_is_met() -> None:
    text = svg_of(name="fig7")
    ids = re.findall(r' id="([^"]*)"', text)
    references = re.findall(r'href="#([^"]*)"', text) + re.findall(r"url\(#([^)]*)\)", text)
    assert all(identity.startswith("fig7-") for identity in ids)
    assert set() < set(references) <= set(ids)


def test_text_stays_text_in_the_pages_font_and_colour_however_foreign() -> None:
    for label in ("<script>alert(1)</script>", "$x^2$", "$\\frac{1}{", "漢字 🚀"):
        (text,) = [one for one in ElementTree.fromstring(svg_of(label)).iter("text") if one.text == label]
        assert "fill: currentColor" in text.attrib["style"]
        assert "font-family" not in text.attrib["style"]


def test_the_users_own_settings_change_nothing_and_are_left_alone() -> None:
    told = svg_of()
    with mpl.rc_context({"font.size": 31, "lines.linewidth": 9, "svg.fonttype": "path"}):
        assert svg_of() == told
        assert mpl.rcParams["font.size"] == 31


def test_timelines_and_late_ranks_are_drawn_from_the_folder(tmp_path: Path) -> None:
    record = late_record()
    traces = [(traced_record(), timeline()), (traced_record(step("tp")), timeline(clock="")), (record, None)]
    run = run_with(tmp_path, traces)
    (chart,) = table_of(found_of(run), "step-timelines").figures()
    caption = re.findall(r"<figcaption>(.*?)</figcaption>", chart)[0]
    assert chart.index("<figcaption>") < chart.index("<svg")
    assert caption.startswith("<strong>ddp</strong> Launch 1. One traced step on one clock (one host, one monotonic")
    assert list(table_of(found_of(run), "arrivals-table").figures()) == []
    (run.path / "samples" / f"{record.case.id}-0.npz").write_bytes(samples([[0, 0], [3000, 7000]]))
    (strip,) = table_of(found_of(load_run(run.path)), "arrivals-table").figures()
    assert "5.00 us" in strip


def test_scaling_is_drawn_where_worlds_differ() -> None:
    worlds = [msgspec.structs.replace(WORLD, size=ranks) for ranks in (2, 4)]
    runs = [(run, summarize(run)) for run in (run_of(ok(step(), world=world)) for world in worlds)]
    (drawn,) = table_in(report_of_several(several(runs)).sections, "scaling-table").figures()
    assert "Efficiency against ranks" in drawn
    assert "scaling" not in [section.id for section in report_of_several(several(runs[:1])).sections]
