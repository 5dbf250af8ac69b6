"""Methods against sequence length as figures: a line each, what is unknown left out, the same bytes each time."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from reports_fixtures import context_details, context_record, cp, make_plan, make_run, ok, plain, step_metrics
from test_context_sizes import contexts_of

from bench.records import Record
from reports.parallel.context import contexts
from reports.parallel.context_comparison import compared
from reports.parallel.context_figures import against_ranks, draw_methods
from reports.parallel.context_sizes import sizes
from reports.summary import summarize
from reports.svg import inline_svg


def drawn(*records: Record) -> Figure | None:
    rows = summarize(make_run(make_plan([record.case for record in records]), records)).rows
    (comparison,) = compared(contexts(rows))
    return draw_methods(comparison.lines)


def axes_of(*records: Record) -> dict[str, Axes]:
    figure = drawn(*records)
    assert figure is not None
    return {axes.get_title(): axes for axes in figure.axes}


def both(longest: float = 0.03) -> list[Record]:
    return [
        *(context_record("ring", seconds, sequence) for seconds, sequence in ((longest, 128), (0.02, 64))),
        *(context_record("zigzag", seconds, sequence) for seconds, sequence in ((0.01, 64), (0.02, 128))),
    ]


def test_each_method_is_a_line_of_its_values_by_length() -> None:
    found = axes_of(*both())
    assert list(found) == ["step time", "attention's bytes a rank sends in a step", "exposed cp communication"]
    ring, zigzag = found["step time"].get_lines()
    assert ring.get_xydata().tolist() == [[64, 0.02], [128, 0.03]]  # type: ignore[union-attr]
    assert zigzag.get_xydata().tolist() == [[64, 0.01], [128, 0.02]]  # type: ignore[union-attr]
    assert len(found["step time"].collections) == 4  # the intervals
    assert not found["exposed cp communication"].collections


def test_lines_differ_and_earlier_ones_are_wider_than_those_that_cover_them() -> None:
    ring, zigzag = axes_of(*both())["step time"].get_lines()
    assert ring.get_marker() != zigzag.get_marker()
    assert ring.get_color() != zigzag.get_color()
    assert ring.get_linewidth() > zigzag.get_linewidth()


def test_heights_begin_at_zero_unless_the_lowest_could_not_be_seen() -> None:
    assert axes_of(*both())["step time"].get_ylim()[0] == 0
    wide = axes_of(*both(longest=0.9))["step time (log axis)"]
    assert wide.get_yscale() == "log"


def test_bytes_stand_at_whole_powers_of_two() -> None:
    axes = axes_of(*both())["attention's bytes a rank sends in a step"]
    texts = [axes.yaxis.get_major_formatter()(tick, None) for tick in axes.get_yticks()]
    assert texts[1:4] == ["0", "1 MiB", "2 MiB"]


def test_what_no_method_knows_is_not_drawn() -> None:
    bare = [
        ok(cp(method, sequence), metrics=step_metrics(0.5), details=context_details(method, sequence))
        for method in ("ring", "zigzag")
        for sequence in (64, 128)
    ]
    assert list(axes_of(*bare)) == ["step time"]


def test_a_method_that_did_not_run_at_a_length_has_no_point_there() -> None:
    ring, zigzag = axes_of(*both()[:3])["step time"].get_lines()
    assert (len(ring.get_xydata()), len(zigzag.get_xydata())) == (2, 1)  # type: ignore[arg-type]


def test_one_length_is_no_figure() -> None:
    assert drawn(context_record("ring"), context_record("zigzag")) is None


def test_nothing_exposed_is_drawn_at_zero() -> None:
    records = []
    for record in both():
        metrics = {**record.metrics, "exposed_comm.cp": plain(0.0, "s")}
        records.append(ok(record.case, metrics=metrics, details=record.details))
    assert axes_of(*records)["exposed cp communication"].get_ylim()[0] == 0


def test_the_same_run_gives_the_same_bytes() -> None:
    one, other = (
        inline_svg(figure, name="a", title="b", description="c") for _ in (0, 1) if (figure := drawn(*both()))
    )
    assert one == other
    assert "zigzag" in one


def test_against_ranks_the_crossover_stands_on_the_bytes_alone() -> None:
    records = [[context_record(method, 0.1 / n, ranks=n) for method in ("ring", "ulysses")] for n in (2, 4)]
    [one] = sizes(contexts_of(*records))
    figure = draw_methods(one.lines, against_ranks(one.crossover_ranks))
    assert figure is not None
    time, sent, exposed = figure.axes
    assert [line.get_xydata().tolist() for line in time.get_lines()] == [[[2, 0.05], [4, 0.025]]] * 2  # type: ignore[union-attr]
    assert time.get_xlabel() == "cp (ranks)"
    marks = [list(line.get_xdata()) for line in sent.get_lines()[2:]]  # type: ignore[arg-type]
    assert marks == [[2.0, 2.0]]
    assert len(time.get_lines()) == len(exposed.get_lines()) == 2


def test_without_a_crossover_no_line_stands_upright() -> None:
    records = [[context_record("ring", 0.1, ranks=n)] for n in (2, 4)]
    [one] = sizes(contexts_of(*records))
    figure = draw_methods(one.lines, against_ranks(None))
    assert figure is not None
    assert [len(axes.get_lines()) for axes in figure.axes] == [1, 1, 1]
