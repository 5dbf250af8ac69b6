"""Heat maps of routing, capacity and loads: a cell for what is known, its number in it, fuller where it is more."""

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from reports_fixtures import make_plan, make_run, mixture_record, ok

from bench.records import Record
from reports.parallel.experts import Mixture, mixtures
from reports.parallel.experts_atlas import atlases
from reports.parallel.experts_figures import draw_atlas, draw_loads
from reports.summary import summarize
from reports.svg import inline_svg

FOUR = [
    mixture_record("ep_layer", routing, capacity, seconds)
    for routing, capacity, seconds in (
        ("balanced", 0.0, 0.01),
        ("balanced", 1.25, 0.02),
        ("zipf", 0.0, 0.04),
        ("zipf", 1.25, 0.03),
    )
]


def found_in(*records: Record) -> tuple[Mixture, ...]:
    return mixtures(summarize(make_run(make_plan([record.case for record in records]), records)).rows)


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def shades(axes: Axes) -> list[float]:
    return [float(patch.get_alpha() or 0) for patch in axes.patches if isinstance(patch, Rectangle)]


def atlas_axes(*records: Record) -> list[Axes]:
    (atlas,) = atlases(found_in(*records))
    figure = draw_atlas(atlas)
    assert figure is not None
    return list(figure.axes)


def test_time_and_drops_are_in_their_cells() -> None:
    left, right = atlas_axes(*FOUR)
    assert texts(left) == ["10.0 ms", "20.0 ms", "40.0 ms\n1.25x", "30.0 ms\n1.25x"]
    assert texts(right) == ["0 %", "12.5 %", "0 %", "12.5 %"]
    assert [label.get_text() for label in left.get_yticklabels()] == ["balanced", "zipf"]
    assert [label.get_text() for label in left.get_xticklabels()] == ["dropless", "capacity 1.25"]


def test_the_longest_is_the_fullest() -> None:
    left, right = atlas_axes(*FOUR)
    found = shades(left)
    assert sorted(found) == [found[0], found[1], found[3], found[2]]
    assert shades(right)[0] < shades(right)[1]


def test_what_did_not_run_has_a_dash_and_no_colour() -> None:
    left, _ = atlas_axes(*FOUR[:3])
    assert texts(left)[3] == "-"
    assert len(shades(left)) == 3


def test_without_times_there_is_no_atlas() -> None:
    (atlas,) = atlases(found_in(*(ok(one.case, metrics={}, details=one.details) for one in FOUR)))
    assert draw_atlas(atlas) is None


def test_each_step_is_a_strip_of_experts_with_lines_between_ranks() -> None:
    figure = draw_loads(found_in(FOUR[0], FOUR[2]))
    assert figure is not None
    (axes,) = figure.axes
    assert len(shades(axes)) == 16
    assert texts(axes)[8:] == ["94", "62", "55", "123", "190", "46", "76", "378"]
    assert max(shades(axes)) == shades(axes)[-1]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "ep_layer routing=balanced",
        "ep_layer routing=zipf",
    ]
    assert [line.get_segments()[0][0].tolist()[0] for line in axes.collections] == [3.5, 3.5]  # type: ignore[attr-defined]


def test_layers_that_differ_have_strips_of_their_own_and_empty_ones_none() -> None:
    record = mixture_record(expert_load=[[1] * 8, [2] * 8, [0] * 8], rank_load=[[1, 2]] * 3)
    figure = draw_loads(found_in(record))
    assert figure is not None
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["ep_layer layer 0", "ep_layer layer 1"]
    assert draw_loads(found_in(mixture_record(expert_load=[[0] * 8]))) is None


def test_many_experts_have_no_numbers_and_many_layers_end_somewhere() -> None:
    loads = [[i + 1] * 64 for i in range(50)]
    figure = draw_loads(found_in(mixture_record(expert_load=loads, rank_load=[[1, 2]] * 50)))
    assert figure is not None
    assert texts(figure.axes[0]) == []
    assert len(figure.axes[0].get_yticklabels()) == 40


def test_the_same_run_gives_the_same_bytes() -> None:
    found = found_in(*FOUR)
    one, other = (
        inline_svg(figure, name="a", title="b", description="c") for _ in (0, 1) if (figure := draw_loads(found))
    )
    assert one == other
