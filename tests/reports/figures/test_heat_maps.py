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


def make_matrix(rates: dict[tuple[int, int], float], metric: str = "busbw") -> Pairs:
    records = []
    for (sender, receiver), rate in rates.items():
        metrics: dict[str, MetricValue] = {
            "time": seconds_metric(1e-3),
            metric: rate_metric(rate),
        }
        records.append(ok_record(matrix_case(sender, receiver), metrics=metrics))
    [matrix] = pairs(summarize_rows(*records))
    return matrix


def test_pairs_have_a_square_each() -> None:
    rates = {(0, 1): 2e9, (0, 2): 3e9, (1, 0): 11e9, (1, 2): 13e9, (2, 0): 21e9, (2, 1): 22e9}
    parts = parse_drawing(draw_pairs(make_matrix(rates)))
    labels = [text for text in parts.texts if re.fullmatch(r"\d+\.\d+", text)]
    assert labels == ["2.00", "3.00", "11.0", "13.0", "21.0", "22.0"]
    shades = [box.opacity for box in parts.boxes]
    assert len(shades) == 6
    assert shades == sorted(shades)


def test_pairs_without_bus_bandwidth_have_no_map() -> None:
    assert draw_pairs(make_matrix({(0, 1): 1e9, (1, 0): 1e9}, "algbw")) is None


@pytest.mark.parametrize(
    ("distribution", "ranks"), [("block", "01234567"), ("cyclic", "04152637")]
)
def test_lines_separate_nodes_and_switches(distribution: str, ranks: str) -> None:
    run = sample_node_run(distribution)
    [matrix] = pairs(summarize(run).rows)
    parts = parse_drawing(draw_pairs(matrix, nodes_of(run)))
    names = [text for text in parts.texts if re.fullmatch(r"n\d \d", text)]
    assert names == [f"n{1 + i // 2} {rank}" for i, rank in enumerate(ranks)]
    map_start = min(box.x for box in parts.boxes)
    square = parts.boxes[0].width
    borders = {}
    for path in parts.paths:
        if "stroke:currentColor" in path.style and "v" in path.d:
            [(x, _), *_] = path.points
            borders[round((x - map_start) / square)] = path.style.rpartition(":")[2]
    assert borders == {2: "1", 4: "2.5", 6: "1"}  # thick between switches
