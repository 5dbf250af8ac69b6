"""Heat maps: which squares are the fullest, which have numbers, and the lines between them."""

import numpy as np
import reports_fixtures as fixtures
from figure_parts import axes_of, bars_of, panels_of, words
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle
from nodes_fixtures import hosts_of, node_run, pair_records
from nodes_fixtures import run_of as run_on
from report_rows import matrix_case, rows_of
from reports_fixtures import mixture_record, ok, rate_metric

from bench.results.metrics import MetricValue
from bench.results.records import Record
from bench.results.runs import Run
from reports.analysis.contrasts import Pairs, pairs
from reports.analysis.experts import Mixture, atlases, mixtures
from reports.analysis.rank_hosts import Nodes, nodes_of
from reports.analysis.summary import summarize
from reports.figures.heat_maps import draw_arrivals, draw_atlas, draw_loads, draw_pairs
from reports.figures.svg import INK

FOUR = [
    mixture_record("ep_layer", routing, *more)
    for routing, both in (("balanced", ((0.0, 0.01), (1.25, 0.02))), ("zipf", ((0.0, 0.04), (1.25, 0.03))))
    for more in both
]


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


def read(*records: Record) -> tuple[Mixture, ...]:
    return mixtures(rows_of(*records))


def shades(axes: Axes) -> list[float]:
    return [float(patch.get_alpha() or 0) for patch in axes.patches if isinstance(patch, Rectangle)]


def test_an_atlas_has_time_and_drops_in_its_cells_the_fuller_the_more() -> None:
    (atlas,) = atlases(read(*FOUR))
    left, right = panels_of(draw_atlas(atlas))
    assert words(left.texts) == ["10.0 ms", "20.0 ms", "40.0 ms\n1.25x in turns", "30.0 ms\n1.25x in turns"]
    assert words(right.texts) == ["0 %", "12.5 %", "0 %", "12.5 %"]
    assert words(left.get_yticklabels()) == ["balanced", "zipf"]
    assert [label.get_text() for label in left.get_xticklabels()] == ["dropless", "capacity 1.25"]
    first, second, fullest, third = shades(left)
    assert first < second < third < fullest
    assert shades(right)[0] < shades(right)[1]
    (atlas,) = atlases(read(*FOUR[:3]))
    left, _ = panels_of(draw_atlas(atlas))
    assert (words(left.texts)[3], len(shades(left))) == ("-", 3)
    (atlas,) = atlases(read(*(ok(one.case, metrics={}, details=one.details) for one in FOUR)))
    assert draw_atlas(atlas) is None


def test_each_step_and_layer_is_a_strip_of_experts_with_lines_between_ranks() -> None:
    (axes,) = panels_of(draw_loads(read(FOUR[0], FOUR[2])))
    assert len(shades(axes)) == 16
    assert words(axes.texts)[8:] == ["94", "62", "55", "123", "190", "46", "76", "378"]
    assert max(shades(axes)) == shades(axes)[-1]
    assert words(axes.get_yticklabels()) == ["ep_layer routing=balanced", "ep_layer routing=zipf"]
    assert [line.get_segments()[0][0].tolist()[0] for line in axes.collections] == [3.5, 3.5]  # type: ignore[attr-defined]
    layers = mixture_record(expert_load=[[1] * 8, [2] * 8, [0] * 8], rank_load=[[1, 2]] * 3)
    assert words(axes_of(draw_loads(read(layers))).get_yticklabels()) == ["ep_layer layer 0", "ep_layer layer 1"]
    assert draw_loads(read(mixture_record(expert_load=[[0] * 8]))) is None
    many = mixture_record(expert_load=[[i + 1] * 18 for i in range(42)], rank_load=[[1, 2]] * 42)
    (axes,) = panels_of(draw_loads(read(many)))
    assert (words(axes.texts), len(words(axes.get_yticklabels()))) == ([], 40)
