"""The rank-by-rank heat map: a square for each pair, node by node where ranks are on several."""

import msgspec
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from nodes_fixtures import hosts_of, node_run, pair_records, run_of
from reports_fixtures import collective, make_plan, make_run, ok, rate_metric, seconds_metric

from bench.cases import Case
from bench.records import Metric, Record
from bench.runs import Run
from reports.contrasts import Pairs, pairs
from reports.nodes.rank_hosts import Nodes, nodes_of
from reports.pair_figure import draw_pairs
from reports.summary import Row, summarize
from reports.svg import INK


def axes_of(figure: Figure | None) -> Axes:
    assert figure is not None
    return figure.axes[0]


def rows_of(*records: Record) -> tuple[Row, ...]:
    return summarize(make_run(make_plan([record.case for record in records]), records)).rows


def matrix(ranks: int) -> Pairs:
    rows = rows_of(*(ok(pair(i, j), metrics=rates(i, j)) for i in range(ranks) for j in range(ranks) if i != j))
    (found,) = pairs(rows)
    return found


def pair(source: int, target: int) -> Case:
    case = collective("matrix", 1 << 20, source=source, target=target)
    return msgspec.structs.replace(case, name="p2p.matrix")


def rates(source: int, target: int) -> dict[str, Metric]:
    return {"time": seconds_metric(1e-3), "busbw": rate_metric((1 + source * 10 + target) * 1e9)}


def test_pairs_are_a_heat_map_with_a_square_each_and_none_on_the_diagonal() -> None:
    axes = axes_of(draw_pairs(matrix(3)))
    squares = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    corners = [(patch.get_x() + 0.5, patch.get_y() + 0.5) for patch in squares]
    assert sorted(corners) == [(j, i) for j in range(3) for i in range(3) if i != j]
    assert {text.get_text() for text in axes.texts} == {"2.00", "3.00", "11.0", "13.0", "21.0", "22.0"}
    alphas = {patch.get_y(): patch.get_alpha() for patch in squares if patch.get_x() == -0.5}
    assert (alphas[1.5] or 0) > (alphas[0.5] or 1)  # from 2 to 0 is faster than from 1 to 0


def test_many_ranks_have_no_numbers_and_few_ticks() -> None:
    axes = axes_of(draw_pairs(matrix(20)))
    assert len(axes.texts) == 0
    assert len(axes.get_xticks()) == 10


def test_pairs_without_rates_have_no_figure() -> None:
    rows = rows_of(*(ok(pair(*ends), metrics={"time": seconds_metric(1e-3)}) for ends in ((0, 1), (1, 0))))
    (found,) = pairs(rows)
    assert draw_pairs(found) is None


def both(run: Run) -> tuple[Pairs, Nodes]:
    (found,) = pairs(summarize(run).rows)
    nodes = nodes_of(run)
    assert nodes is not None
    return found, nodes


def borders(axes: Axes) -> list[tuple[float, float]]:
    """Return where the upright lines are, and how thick."""
    lines = [line for line in axes.lines if to_hex(line.get_color()) == INK]
    places = [(np.asarray(line.get_xdata()).tolist(), line.get_linewidth()) for line in lines]
    return [(first, width) for (first, last), width in places if first == last]


def labels(axes: Axes) -> tuple[list[str], list[str]]:
    above, beside = axes.child_axes
    return [text.get_text() for text in above.get_xticklabels()], [text.get_text() for text in beside.get_yticklabels()]


@pytest.mark.parametrize("placement", ["block", "cyclic"])
def test_lines_part_nodes_and_thick_ones_switches(placement: str) -> None:
    axes = axes_of(draw_pairs(*both(node_run(placement))))
    assert borders(axes) == [(1.5, 1.0), (3.5, 2.2), (5.5, 1.0)]
    assert labels(axes) == (["n1", "n2", "n3", "n4"], ["n1", "n2", "n3", "n4"])
    ranks = [text.get_text() for text in axes.get_xticklabels()]
    assert ranks == (list("01234567") if placement == "block" else list("04152637"))


def test_the_squares_of_a_node_lie_on_the_diagonal_and_are_the_fullest() -> None:
    axes = axes_of(draw_pairs(*both(node_run("cyclic"))))
    found = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    squares = {(patch.get_x(), patch.get_y()): patch.get_alpha() or 0 for patch in found}
    assert min(squares[0.5, -0.5], squares[2.5, 1.5]) > 2 * max(squares[1.5, -0.5], squares[6.5, -0.5])


def test_long_names_are_cut_and_many_left_out() -> None:
    hosts = [f"node-with-a-long-name-{i}" for i in range(3)]
    found, _ = both(run_of(pair_records(hosts_of(3, 1)), hosts_of(3, 1)))
    axes = axes_of(draw_pairs(found, Nodes(hosts=tuple(hosts), switches={}, affinities={})))
    assert labels(axes)[0] == ["node-with-a…"] * 3
    many = Nodes(hosts=tuple(f"n{i}" for i in range(20)), switches={}, affinities={})
    assert axes_of(draw_pairs(matrix(20), many)).child_axes == []


def test_one_node_has_neither_lines_nor_hosts() -> None:
    axes = axes_of(draw_pairs(matrix(4)))
    assert borders(axes) == []
    assert axes.child_axes == []
