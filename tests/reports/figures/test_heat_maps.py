"""Heat maps: which squares are the fullest, which have numbers, and the lines between them."""

import re

import reports_fixtures as fixtures
from figure_parts import Parts, parts_of
from nodes_fixtures import hosts_of, node_run, pair_records
from nodes_fixtures import run_of as run_on
from report_rows import matrix_case, rows_of
from reports_fixtures import mixture_record, ok, rate_metric

from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run
from parbench.reports.analysis.contrasts import Pairs, pairs
from parbench.reports.analysis.experts import Mixture, atlases, mixtures
from parbench.reports.analysis.ranks import Nodes, nodes_of
from parbench.reports.analysis.summary import summarize
from parbench.reports.figures.heat_maps import draw_arrivals, draw_atlas, draw_loads, draw_pairs

FOUR = [
    mixture_record("ep_layer", routing, *more)
    for routing, both in (("balanced", ((0.0, 0.01), (1.25, 0.02))), ("zipf", ((0.0, 0.04), (1.25, 0.03))))
    for more in both
]


def shades(parts: Parts) -> list[float]:
    return [box.opacity for box in parts.boxes]


def test_all_strips_have_one_scale_of_colour_and_no_numbers_for_many() -> None:
    strips = [("a", {0: 0.0, 1: 2e-6}), ("unknown", dict[int, float]()), ("b", {0: 8e-6, 1: 4e-6})]
    parts = parts_of(draw_arrivals(strips))
    none, quarter, full, half = shades(parts)
    assert none < quarter < half < full
    assert round(half - none, 3) == round(2 * (quarter - none), 3)  # not each by its own latest rank
    assert [word for word in parts.words if word in "ab"] == ["a", "b"]
    assert [word for word in parts.words if word.endswith("us")] == ["0 us", "2.00 us", "8.00 us", "4.00 us"]
    assert parts.words[-1] == "rank; full colour is 8.00 us late"
    assert draw_arrivals([("unknown", {})]) is None
    many = parts_of(draw_arrivals([("a", {rank: rank * 1e-6 for rank in range(64)})])).words
    assert not [word for word in many if word.endswith(" us")]
    assert len([word for word in many if word.isdigit()]) == 16


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
    many = parts_of(draw_pairs(matrix(20), Nodes(hosts=tuple(f"n{i}" for i in range(20)), switches={}, affinities={})))
    assert not [word for word in many.words if "." in word]
    assert len([word for word in many.words if re.fullmatch(r"n\d+ \d+", word)]) == 10
    assert draw_pairs(matrix(2, algbw=rate_metric(1e9))) is None


def test_lines_part_nodes_thick_ones_switches_and_a_nodes_own_squares_are_the_fullest() -> None:
    for placement, order in (("block", "01234567"), ("cyclic", "04152637")):
        parts = parts_of(draw_pairs(*by_node(node_run(placement))))
        assert borders(parts) == [(2, 1.0), (4, 2.5), (6, 1.0)]
        names = [word for word in parts.words if re.fullmatch(r"n\d \d", word)]
        assert names == [f"n{1 + i // 2} {rank}" for i, rank in enumerate(order)]
        rows = sorted({box.y for box in parts.boxes})
        first = sorted((box.x, box.opacity) for box in parts.boxes if box.y == rows[0])
        assert first[0][1] > 2 * max(shade for _, shade in first[1:])
    found, _ = by_node(run_on(pair_records(hosts_of(3, 1)), hosts_of(3, 1)))
    long = Nodes(hosts=tuple(f"node-with-a-long-name-{i}" for i in range(3)), switches={}, affinities={})
    assert {"node-with-a… 0", "node-with-a… 2"} <= set(parts_of(draw_pairs(found, long)).words)


def read(*records: Record) -> tuple[Mixture, ...]:
    return mixtures(rows_of(*records))


def test_an_atlas_has_time_and_drops_in_its_cells_the_fuller_the_more() -> None:
    (atlas,) = atlases(read(*FOUR))
    both = draw_atlas(atlas)
    assert list(both) == ["step time; over that of balanced routes, taken in turns", "pairs dropped"]
    time, dropped = map(parts_of, both.values())
    assert time.words[1:3] == ["10.0 ms", "20.0 ms"]
    assert time.words[4:8] == ["40.0 ms", "1.25x in turns", "30.0 ms", "1.25x in turns"]
    assert [word for word in dropped.words if "%" in word] == ["0 %", "12.5 %", "0 %", "12.5 %"]
    assert (time.words[0], time.words[3], time.words[-2:]) == ("balanced", "zipf", ["dropless", "capacity 1.25"])
    first, second, fullest, third = shades(time)
    assert first < second < third < fullest
    assert shades(dropped)[0] < shades(dropped)[1]
    (atlas,) = atlases(read(*FOUR[:3]))
    time = parts_of(next(iter(draw_atlas(atlas).values())))
    assert ("-" in time.words, len(time.boxes)) == (True, 3)
    (atlas,) = atlases(read(*(ok(one.case, metrics={}, details=one.details) for one in FOUR)))
    assert draw_atlas(atlas) == {}


def test_each_step_and_layer_is_a_strip_of_experts_with_lines_between_ranks() -> None:
    parts = parts_of(draw_loads(read(FOUR[0], FOUR[2])))
    assert len(parts.boxes) == 16
    assert parts.words[10:18] == ["94", "62", "55", "123", "190", "46", "76", "378"]
    assert max(shades(parts)) == shades(parts)[-1]
    assert [word for word in parts.words if "routing" in word] == [
        "ep_layer routing=balanced",
        "ep_layer routing=zipf",
    ]
    assert [place for place, _ in borders(parts)] == [4, 4]
    layers = mixture_record(expert_load=[[1] * 8, [2] * 8, [0] * 8], rank_load=[[1, 2]] * 3)
    names = [word for word in parts_of(draw_loads(read(layers))).words if "layer " in word]
    assert names == ["ep_layer layer 0", "ep_layer layer 1"]
    assert draw_loads(read(mixture_record(expert_load=[[0] * 8]))) is None
    many = mixture_record(expert_load=[[i + 1] * 18 for i in range(42)], rank_load=[[1, 2]] * 42)
    words = parts_of(draw_loads(read(many))).words
    assert len([word for word in words if "layer " in word]) == 40
    assert len(words) == 40 + 9 + 1
