"""Figures of context and expert parallelism: lines by length and by ranks, cells by routing, strips of experts."""

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from report_rows import found_in, rows_of, tables_of, with_metrics
from reports_fixtures import context_details, context_record, cp, mixture_record, ok, plain, step_metrics

from bench.results.records import Record
from reports.analysis.attention import compared, contexts, sizes
from reports.analysis.experts import Mixture, atlases, mixtures
from reports.figures.heat_maps import draw_atlas, draw_loads
from reports.figures.lines import draw_methods

FOUR = [
    mixture_record("ep_layer", routing, *more)
    for routing, both in (("balanced", ((0.0, 0.01), (1.25, 0.02))), ("zipf", ((0.0, 0.04), (1.25, 0.03))))
    for more in both
]


def both(longest: float = 0.03) -> list[Record]:
    told = (("ring", longest, 128), ("ring", 0.02, 64), ("zigzag", 0.01, 64), ("zigzag", 0.02, 128))
    return [context_record(*one) for one in told]


def there(figure: Figure | None) -> list[Axes]:
    assert figure is not None
    return list(figure.axes)


def drawn(*records: Record) -> Figure | None:
    (comparison,) = compared(contexts(rows_of(*records)))
    return draw_methods(comparison.lines)


def axes_of(*records: Record) -> dict[str, Axes]:
    return {axes.get_title(): axes for axes in there(drawn(*records))}


def points(axes: Axes) -> list[list[list[float]]]:
    return [line.get_xydata().tolist() for line in axes.get_lines()]  # type: ignore[union-attr]


def test_each_method_is_a_line_of_its_values_by_length_seen_beside_others() -> None:
    found = axes_of(*both())
    assert list(found) == ["step time", "attention's bytes a rank sends in a step", "exposed cp communication"]
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
    found = axes_of(*both(longest=0.9)[:3])  # one did not run at a length
    time = found["step time (log axis)"]
    assert (time.get_yscale(), [len(of) for of in points(time)]) == ("log", [2, 1])
    assert drawn(context_record("ring"), context_record("zigzag")) is None  # one length
    found = axes_of(*(with_metrics(record, exposed_comm__cp=plain(0.0, "s")) for record in both()))
    assert found["exposed cp communication"].get_ylim()[0] == 0
    bare = [
        ok(cp(method, sequence), metrics=step_metrics(0.5), details=context_details(method, sequence))
        for method in ("ring", "zigzag")
        for sequence in (64, 128)
    ]
    assert list(axes_of(*bare)) == ["step time"]


def test_against_ranks_the_crossover_stands_on_the_bytes_alone() -> None:
    runs = [[context_record(method, 0.1 / n, ranks=n) for method in ("ring", "ulysses")] for n in (2, 4)]
    [one] = sizes([one for records in runs for one in contexts(rows_of(*records))])
    time, sent, exposed = there(draw_methods(one.lines, "cp (ranks)", one.crossover_ranks))
    assert points(time) == [[[2, 0.05], [4, 0.025]]] * 2
    assert time.get_xlabel() == "cp (ranks)"
    assert [x for ((x, _), *_) in points(sent)[2:]] == [2.0]
    assert len(time.get_lines()) == len(exposed.get_lines()) == 2
    assert [len(axes.get_lines()) for axes in there(draw_methods(one.lines, "cp (ranks)"))] == [2, 2, 2]


def read(*records: Record) -> tuple[Mixture, ...]:
    return mixtures(rows_of(*records))


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def shades(axes: Axes) -> list[float]:
    return [float(patch.get_alpha() or 0) for patch in axes.patches if isinstance(patch, Rectangle)]


def rows_of_axes(axes: Axes) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


def test_an_atlas_has_time_and_drops_in_its_cells_the_fuller_the_more() -> None:
    (atlas,) = atlases(read(*FOUR))
    left, right = there(draw_atlas(atlas))
    assert texts(left) == ["10.0 ms", "20.0 ms", "40.0 ms\n1.25x", "30.0 ms\n1.25x"]
    assert texts(right) == ["0 %", "12.5 %", "0 %", "12.5 %"]
    assert rows_of_axes(left) == ["balanced", "zipf"]
    assert [label.get_text() for label in left.get_xticklabels()] == ["dropless", "capacity 1.25"]
    first, second, fullest, third = shades(left)
    assert first < second < third < fullest
    assert shades(right)[0] < shades(right)[1]
    (atlas,) = atlases(read(*FOUR[:3]))
    left, _ = there(draw_atlas(atlas))
    assert (texts(left)[3], len(shades(left))) == ("-", 3)
    (atlas,) = atlases(read(*(ok(one.case, metrics={}, details=one.details) for one in FOUR)))
    assert draw_atlas(atlas) is None


def test_each_step_and_layer_is_a_strip_of_experts_with_lines_between_ranks() -> None:
    (axes,) = there(draw_loads(read(FOUR[0], FOUR[2])))
    assert len(shades(axes)) == 16
    assert texts(axes)[8:] == ["94", "62", "55", "123", "190", "46", "76", "378"]
    assert max(shades(axes)) == shades(axes)[-1]
    assert rows_of_axes(axes) == ["ep_layer routing=balanced", "ep_layer routing=zipf"]
    assert [line.get_segments()[0][0].tolist()[0] for line in axes.collections] == [3.5, 3.5]  # type: ignore[attr-defined]
    layers = mixture_record(expert_load=[[1] * 8, [2] * 8, [0] * 8], rank_load=[[1, 2]] * 3)
    assert rows_of_axes(there(draw_loads(read(layers)))[0]) == ["ep_layer layer 0", "ep_layer layer 1"]
    assert draw_loads(read(mixture_record(expert_load=[[0] * 8]))) is None
    many = mixture_record(expert_load=[[i + 1] * 18 for i in range(42)], rank_load=[[1, 2]] * 42)
    (axes,) = there(draw_loads(read(many)))
    assert (texts(axes), len(rows_of_axes(axes))) == ([], 40)


def test_figures_stand_in_the_page_the_same_bytes_each_time() -> None:
    found = found_in(*both(), *FOUR)
    one, other = ({table.id: list(table.figures()) for table in tables_of(found)} for _ in range(2))
    assert one == other
    parallel = {name: len(figures) for name, figures in one.items() if name.startswith(("context", "experts"))}
    assert parallel == {
        "context-table": 1,
        "context-hops": 0,
        "experts-table": 0,
        "experts-atlas-1": 1,
        "experts-load": 1,
    }
    (chart,) = one["context-table"]
    assert "<figcaption>Methods compared: cp = 2, causal mask</figcaption>" in chart
    assert "zigzag" in chart
