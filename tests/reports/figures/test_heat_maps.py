"""Heat maps: which squares are the fullest, which have numbers, and the lines between them."""

import re

from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.runs import Run
from parbench.reports.analysis.contrasts import Pairs, pairs
from parbench.reports.analysis.ranks import Nodes, nodes_of
from parbench.reports.analysis.summary import summarize
from parbench.reports.figures.heat_maps import draw_pairs
from tests.support import reports_fixtures as fixtures
from tests.support.figure_parts import Parts, parts_of
from tests.support.nodes_fixtures import make_hosts, pair_records, sample_node_run
from tests.support.nodes_fixtures import make_node_run as run_on
from tests.support.report_rows import matrix_case, summarize_rows
from tests.support.reports_fixtures import ok_record, rate_metric


def shades(parts: Parts) -> list[float]:
    return [box.opacity for box in parts.boxes]


def matrix(ranks: int, **metrics: MetricValue) -> Pairs:
    ends = [(i, j) for i in range(ranks) for j in range(ranks) if i != j]
    rates = [metrics or {"busbw": rate_metric((1 + i * 10 + j) * 1e9)} for i, j in ends]
    records = [
        ok_record(matrix_case(*both), metrics={"time": fixtures.seconds_metric(1e-3), **told})
        for both, told in zip(ends, rates, strict=True)
    ]
    (found,) = pairs(summarize_rows(*records))
    return found


def by_node(run: Run) -> tuple[Pairs, Nodes]:
    (found,) = pairs(summarize(run).rows)
    nodes = nodes_of(run)
    assert nodes is not None
    return found, nodes


def borders(parts: Parts) -> list[tuple[float, float]]:
    """Return after how many squares lines stand that go down, and how wide they are."""
    size, left = parts.boxes[0].width, min(box.x for box in parts.boxes)
    lines = [path for path in parts.paths if "stroke:currentColor" in path.style and "v" in path.d]
    told = [(path.points[0][0], float(path.style.rsplit(":", 1)[1])) for path in lines]
    return [(round((x - left) / size), width) for x, width in told]


def test_pairs_are_a_heat_map_with_a_square_each_and_none_on_the_diagonal() -> None:
    parts = parts_of(draw_pairs(matrix(3)))
    assert len(parts.boxes) == 6
    rates = [word for word in parts.words if re.fullmatch(r"[\d.]+", word) and "." in word]
    assert rates == ["2.00", "3.00", "11.0", "13.0", "21.0", "22.0"]  # by sender and receiver
    assert shades(parts) == sorted(shades(parts))
    assert borders(parts) == []
    many = parts_of(
        draw_pairs(
            matrix(20), Nodes(hosts=tuple(f"n{i}" for i in range(20)), switches={}, affinities={})
        )
    )
    assert not [word for word in many.words if "." in word]
    assert len([word for word in many.words if re.fullmatch(r"n\d+ \d+", word)]) == 10
    assert draw_pairs(matrix(2, algbw=rate_metric(1e9))) is None


def test_lines_part_nodes_thick_ones_switches_and_a_nodes_own_squares_are_the_fullest() -> None:
    for placement, order in (("block", "01234567"), ("cyclic", "04152637")):
        parts = parts_of(draw_pairs(*by_node(sample_node_run(placement))))
        assert borders(parts) == [(2, 1.0), (4, 2.5), (6, 1.0)]
        names = [word for word in parts.words if re.fullmatch(r"n\d \d", word)]
        assert names == [f"n{1 + i // 2} {rank}" for i, rank in enumerate(order)]
        rows = sorted({box.y for box in parts.boxes})
        first = sorted((box.x, box.opacity) for box in parts.boxes if box.y == rows[0])
        assert first[0][1] > 2 * max(shade for _, shade in first[1:])
    found, _ = by_node(run_on(pair_records(make_hosts(3, 1)), make_hosts(3, 1)))
    long = Nodes(
        hosts=tuple(f"node-with-a-long-name-{i}" for i in range(3)), switches={}, affinities={}
    )
    assert {"node-with-a… 0", "node-with-a… 2"} <= set(parts_of(draw_pairs(found, long)).words)
