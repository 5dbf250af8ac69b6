"""Lines and points: what is drawn where, in which looks, on which axes, named at its end, and what is not."""

import re

import pytest

from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import Record
from parbench.reports import cells
from parbench.reports.analysis.attention import compared, contexts
from parbench.reports.analysis.contrasts import kinds
from parbench.reports.analysis.fits import fit_curves
from parbench.reports.analysis.ranks import nodes_of
from parbench.reports.analysis.summary import Row, summarize
from parbench.reports.figures.lines import (
    RATE,
    TIME,
    curve_lines,
    draw_against,
    draw_kinds,
    draw_methods,
    draw_points,
    draw_sizes,
)
from tests.support import reports_fixtures as fixtures
from tests.support.figure_parts import Parts, parts_of
from tests.support.nodes_fixtures import FAR_RATE, sample_node_run
from tests.support.report_rows import summarize_rows
from tests.support.reports_fixtures import collective_case, context_record, ok_record, rate_metric

MAIN = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "sendrecv"]


def sample_rows(mode: str) -> list[Row]:
    return [
        row
        for row in summarize(fixtures.sample_run()).rows
        if row.metrics and row.case.params.get("mode") == mode
    ]


def curve(
    operation: str = "all_reduce", sizes: tuple[int, ...] = (1024, 4096), **params: object
) -> list[Record]:
    return [ok_record(collective_case(operation, size, **params)) for size in sizes]


def test_operations_keep_their_color() -> None:
    hues = []
    for quantity, level in (("busbw", RATE), ("time", TIME)):
        parts = parts_of(draw_sizes(curve_lines(sample_rows("pipelined"), quantity), level))  # type: ignore[arg-type]
        assert sorted(parts.ends) == sorted(MAIN)
        assert len({path.hue for path in parts.lines.values()}) == 6
        hues.append({told.partition(":")[0]: path.hue for told, path in parts.lines.items()})
        assert {"1K", "1M", "16M", "size (bytes, 1024-based)"} <= set(parts.words)
        assert level.words in parts.words[0]
    assert hues[0] == hues[1]


def test_lines_are_ordered_by_size_in_their_unit() -> None:
    rows = summarize_rows(
        *(
            ok_record(collective_case(size_bytes=size), seconds=s)
            for size, s in ((2048, 3e-3), (1024, 1e-3))
        )
    )
    time = parts_of(draw_sizes(curve_lines(rows, "time"), TIME))
    assert list(time.lines) == ["all_reduce: 1K: 1.00 ms, 2K: 3.00 ms"]
    (path,) = time.lines.values()
    assert path.points == sorted(path.points)
    (bandwidth,) = curve_lines(rows, "busbw")
    assert [point[1] for point in sorted(bandwidth.points)] == pytest.approx(
        [1024e-6 * 1.5, 2048e-6 / 3 * 1.5]
    )


def test_line_has_a_band_of_its_interval() -> None:
    rows = summarize_rows(*curve(), *curve("gather", (1 << 20,)))
    (line,) = curve_lines(rows, "time")
    assert [point[0] for point in line.points] == [1024, 4096]
    assert line.points[0][1:] == pytest.approx((1e-3, 0.9e-3, 1.1e-3))
    (band,) = [path for path in parts_of(draw_sizes([line], TIME)).paths if path.opacity == 0.1]
    assert len(band.points) == 4
    assert draw_sizes(curve_lines(rows[2:], "time"), TIME) is None
    metric = MetricValue(value=1e-3, unit="s", better="lower", low=0.0, high=5e-3)
    to_zero = [ok_record(one.case, metrics={"time": metric}) for one in curve()]
    (line,) = curve_lines(summarize_rows(*to_zero), "time")
    assert line.points[0] == (1024, 1e-3, 1e-3, 1e-3)


def test_parameters_split_lines_and_zeros_are_left_out() -> None:
    rows = summarize_rows(*(one for root in (0, 1) for one in curve("broadcast", root=root)))
    assert [line.label for line in curve_lines(rows, "time")] == [
        "broadcast root=0",
        "broadcast root=1",
    ]
    for value in (None, 0.0):
        hidden = ok_record(collective_case(), metrics={"busbw": rate_metric(value)})
        (line,) = curve_lines(summarize_rows(hidden, *curve(sizes=(4096, 8192))), "busbw")
        assert [point[0] for point in line.points] == [4096, 8192]


def test_fit_is_a_dashed_line_with_breakpoint() -> None:
    def switching(size: int) -> float:
        return 10e-6 + size / 1e9 if size <= 1 << 16 else 100e-6 + size / 5e9

    sizes = [1 << exponent for exponent in range(10, 25)]
    other = [
        ok_record(collective_case("broadcast", size), seconds=50e-6 + size / 2e9)
        for size in sizes[:4]
    ]
    rows = summarize_rows(
        *other,
        *(ok_record(collective_case(size_bytes=size), seconds=switching(size)) for size in sizes),
    )
    (broadcast, reduce) = curves = fit_curves(rows, None)
    first, second = curve_lines(rows, "time", curves)
    (knee,) = reduce.fit.knees
    ends = [piece[place][0] for line in (first, second) for piece in line.fit for place in (0, -1)]
    assert ends == pytest.approx([1024, 8192, 1024, knee, knee, 1 << 24])
    assert first.fit[0][0][1] == pytest.approx(broadcast.fit.predict(1024))
    assert second.fit[1][-1][1] == pytest.approx(reduce.fit.predict(1 << 24))
    drawn = [
        path
        for path in parts_of(draw_sizes([first, second], TIME)).paths
        if "dasharray:4 2" in path.style
    ]
    assert [path.hue for path in drawn] == ["red", "blue", "blue"]
    assert len(drawn[0].points) > 10  # what is straight on plain axes bends on these
    assert all(line.fit == () for line in curve_lines(rows, "busbw", curves))


def test_group_kinds_are_lines_over_size() -> None:
    run = sample_node_run()
    parts = parts_of(draw_kinds(kinds(summarize(run).rows, nodes_of(run))))
    assert sorted(parts.ends) == sorted(
        ["world", "node", "node, together", "across", "across, together"]
    )
    (across,) = [told for told in parts.lines if told.startswith("across: ")]
    sizes = dict(re.findall(r"(\d+[KM]): ([\d.]+)", across))
    assert list(sizes) == ["64K", "1M", "4M"]
    assert float(sizes["4M"]) == pytest.approx(FAR_RATE / 1e9, rel=0.01)
    assert "4M" in parts.words
    assert draw_kinds(()) is None


def test_draw_against_orders_by_nodes() -> None:
    parts = parts_of(draw_against({"a": {4: 1.0, 1: 8.0, 2: 2.0}, "b": {1: 1.0, 4: 0.5}}, RATE))
    assert list(parts.lines) == ["a: 1: 8.00, 2: 2.00, 4: 1.00", "b: 1: 1.00, 4: 0.500"]
    assert parts.ends == ["a", "b"]
    assert parts.words[0] == "bus bandwidth (GB/s), log axis"
    assert draw_against({"a": {4: 1.0}}, TIME) is None  # on one number of nodes is no line
    parts = parts_of(draw_against({"a": {0: 1.0, 1: 0.0, 2: 2.0, 4: 1.0}}, RATE))
    assert list(parts.lines) == ["a: 2: 2.00, 4: 1.00"], "zero has no logarithm"
    assert draw_against({"a": {1: 0.0, 2: -1.0}}, RATE) is None
    assert parts_of(draw_against({"a": {4: 1.0}, "b": {1: 1.0, 2: 1.0}}, TIME)).ends == ["b"]


def both(longest: float = 0.03) -> list[Record]:
    told = (("ring", longest, 128), ("ring", 0.02, 64), ("zigzag", 0.01, 64), ("zigzag", 0.02, 128))
    return [context_record(*one) for one in told]


def methods_of(*records: Record) -> dict[str, Parts]:
    (comparison,) = compared(contexts(summarize_rows(*records)))
    return {title: parts_of(drawing) for title, drawing in draw_methods(comparison.lines).items()}


def test_methods_are_lines_over_sequence_length() -> None:
    found = methods_of(*both())
    assert list(found) == [
        "step time",
        "attention's bytes a rank sends in a step",
        "exposed cp communication, of the traced step",
    ]
    time, sent, exposed = found.values()
    assert list(time.lines) == [
        "ring: 64: 20.0 ms, 128: 30.0 ms",
        "zigzag: 64: 10.0 ms, 128: 20.0 ms",
    ]
    assert (time.words[0], time.words[1], time.words[-1]) == ("step time", "0", "sequence (tokens)")
    ring, zigzag = time.lines.values()
    assert ring.hue != zigzag.hue
    assert {*exposed.ends} == {*sent.ends} == {"ring", "zigzag"}
    assert {"0", "1 MiB", "2 MiB"} <= set(sent.words)


def test_points_mark_and_join_the_front() -> None:
    time, size = (
        ("step time", cells.duration),
        ("memory", lambda value: cells.quantity(value, "GB")),
    )
    points = {"fast": (1.0, 80.0), "small": (4.0, 20.0), "beaten": (4.0, 80.0)}
    chart = draw_points(points, ["fast", "small"], time, size)
    parts = parts_of(chart)
    assert [path.told for path in parts.paths if path.told] == [
        f"{name}: {seconds:.2f} s, {held:.1f} GB" for name, (seconds, held) in points.items()
    ]
    (joined,) = [path for path in parts.paths if "stroke-width:1.5" in path.style]
    (left, high), (right, low) = joined.points
    assert left < right
    assert high < low  # from the top down
    assert {"fast", "small", "memory, log axis", "step time, log axis"} <= {*parts.words}
    assert "beaten" not in parts.words
    assert draw_points({"one": (1.0, 2.0)}, ["one"], time, size) is None
