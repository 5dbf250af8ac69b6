"""Figures of several nodes: a line for each kind of group against size, and for each series against nodes."""

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from nodes_fixtures import FAR_RATE, node_run

from reports.nodes.group_kinds import kinds
from reports.nodes.node_figures import EFFICIENCY, RATE, TIME, draw_against_nodes, draw_kinds
from reports.nodes.rank_hosts import nodes_of
from reports.summary import summarize


def axes_of(figure: Figure | None) -> Axes:
    assert figure is not None
    return figure.axes[0]


def names(figure: Figure | None) -> list[str]:
    assert figure is not None
    return [text.get_text() for text in figure.legends[0].get_texts()]


def points(axes: Axes, place: int) -> dict[float, float]:
    line = axes.lines[place]
    return dict(zip(np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist(), strict=True))


def test_each_kind_of_group_is_a_line_against_size() -> None:
    run = node_run()
    figure = draw_kinds(kinds(summarize(run).rows, nodes_of(run)))
    assert names(figure) == ["world", "node", "node, together", "across", "across, together"]
    across = points(axes_of(figure), 3)
    assert sorted(across) == [1 << 16, 1 << 20, 1 << 22]
    assert across[1 << 22] == pytest.approx(FAR_RATE / 1e9, rel=0.01)
    assert [label.get_text() for label in axes_of(figure).get_xticklabels()][-1] == "4M"


def test_no_kinds_are_no_figure() -> None:
    assert draw_kinds(()) is None


def test_lines_go_from_the_fewest_nodes_to_the_most() -> None:
    figure = draw_against_nodes([("a", {4: 1.0, 1: 8.0, 2: 2.0}), ("b", {1: 1.0, 4: 0.5})], RATE)
    axes = axes_of(figure)
    assert names(figure) == ["a", "b"]
    assert list(points(axes, 0).items()) == [(1, 8.0), (2, 2.0), (4, 1.0)]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2", "4"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("nodes", "bus bandwidth (GB/s)")


def test_a_series_on_one_number_of_nodes_is_no_line() -> None:
    assert draw_against_nodes([("a", {4: 1.0})], TIME) is None
    assert names(draw_against_nodes([("a", {4: 1.0}), ("b", {1: 1.0, 2: 1.0})], TIME)) == ["b"]


def test_efficiency_begins_at_zero_and_has_the_level_of_perfection() -> None:
    axes = axes_of(draw_against_nodes([("a", {1: 1.0, 2: 0.5})], EFFICIENCY))
    assert axes.get_ylim()[0] == 0
    assert np.asarray(axes.lines[1].get_ydata()).tolist() == [1.0, 1.0]
    assert "50 %" in {axes.yaxis.get_major_formatter()(0.5, None)}
    assert axes_of(draw_against_nodes([("a", {1: 1.0, 2: 0.5})], TIME)).get_yscale() == "log"


def test_series_differ_in_marker_and_dash_beside_colour() -> None:
    axes = axes_of(draw_against_nodes([("a", {1: 1.0, 2: 0.5}), ("b", {1: 1.0, 2: 0.4})], RATE))
    first, other = axes.lines
    assert first.get_marker() != other.get_marker()
    assert first.get_linestyle() != other.get_linestyle()
