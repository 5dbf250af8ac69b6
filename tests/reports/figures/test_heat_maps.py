"""Heat maps of rates from rank to rank."""

import re

import pytest

from parbench.bench.results.metrics import MetricValue
from parbench.reports.analysis.contrasts import Pairs, pairs
from parbench.reports.analysis.ranks import nodes_of
from parbench.reports.analysis.summary import summarize
from parbench.reports.figures.heat_maps import draw_pairs
from tests.support.figure_parts import parse_drawing
from tests.support.nodes_fixtures import sample_node_run
from tests.support.report_rows import matrix_case, summarize_rows
from tests.support.reports_fixtures import ok_record, rate_metric, seconds_metric


def make_matrix(ranks: int, **metrics: MetricValue) -> Pairs:
    records = []
    for i in range(ranks):
        for j in range(ranks):
            rates = metrics or {"busbw": rate_metric((1 + 10 * i + j) * 1e9)}
            if i != j:
                case_metrics = {"time": seconds_metric(1e-3), **rates}
                records.append(ok_record(matrix_case(i, j), metrics=case_metrics))
    [matrix] = pairs(summarize_rows(*records))
    return matrix


def test_pairs_have_a_square_each() -> None:
    parts = parse_drawing(draw_pairs(make_matrix(3)))
    assert len(parts.boxes) == 6
    rates = [text for text in parts.texts if re.fullmatch(r"\d+\.\d+", text)]
    assert rates == ["2.00", "3.00", "11.0", "13.0", "21.0", "22.0"]
    shades = [box.opacity for box in parts.boxes]
    assert shades == sorted(shades)


def test_pairs_without_bus_bandwidth_have_no_map() -> None:
    assert draw_pairs(make_matrix(2, algbw=rate_metric(1e9))) is None


@pytest.mark.parametrize(("placement", "ranks"), [("block", "01234567"), ("cyclic", "04152637")])
def test_lines_separate_nodes_and_switches(placement: str, ranks: str) -> None:
    run = sample_node_run(placement)
    [matrix] = pairs(summarize(run).rows)
    parts = parse_drawing(draw_pairs(matrix, nodes_of(run)))
    map_start = min(box.x for box in parts.boxes)
    borders = []
    for path in parts.paths:
        if "stroke:currentColor" in path.style and "v" in path.d:
            squares = round((path.points[0][0] - map_start) / parts.boxes[0].width)
            borders.append((squares, float(path.style.rpartition(":")[2])))
    assert borders == [(2, 1.0), (4, 2.5), (6, 1.0)]  # thick between switches
    names = [text for text in parts.texts if re.fullmatch(r"n\d \d", text)]
    assert names == [f"n{1 + i // 2} {rank}" for i, rank in enumerate(ranks)]
    top = min(box.y for box in parts.boxes)
    same_node, *far = sorted((box.x, box.opacity) for box in parts.boxes if box.y == top)
    assert same_node[1] > 2 * max(opacity for _, opacity in far)
