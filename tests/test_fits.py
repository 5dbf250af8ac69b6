"""Rows that differ in size alone are a curve, and a curve has a fit."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from reports_fixtures import WORLD, bad, collective, link, make_plan, make_run, ok, rate_metric, seconds_metric, step

from bench.cases import make_case
from bench.ceiling import COPY, Ceiling
from bench.fit import METHOD, Point
from bench.params import Value
from bench.records import Metric, Record
from bench.runs import Run
from reports.fits import Curve, ceiling_of, fit_curves, fit_notes, points_of, size_of
from reports.summary import Row, summarize

SIZES = [1024 * 4**i for i in range(8)]


def run_of(*records: Record, launches: int = 1) -> Run:
    cases = {record.case.id: record.case for record in records}.values()
    return make_run(make_plan(cases, launches=launches), records)


def rows_of(*records: Record, launches: int = 1) -> tuple[Row, ...]:
    return summarize(run_of(*records, launches=launches)).rows


def curve_records(
    operation: str = "all_reduce",
    model: Callable[[int], float] = lambda size: 20e-6 + size / 3e9,
    sizes: list[int] = SIZES,
    **params: Any,
) -> list[Record]:
    return [ok(collective(operation, size, **params), seconds=model(size)) for size in sizes]


def only(curves: tuple[Curve, ...]) -> Curve:
    (curve,) = curves
    return curve


def linked(run: Run, bytes_per_second: float | None) -> Run:
    plan = msgspec.structs.replace(run.info.plan, link_bytes_per_second=bytes_per_second)
    return msgspec.structs.replace(run, info=msgspec.structs.replace(run.info, plan=plan))


def copied(seconds: float, size_bytes: int = 1 << 24, nodes: int = 1) -> Record:
    params: dict[str, Value] = {"size_bytes": size_bytes, "dtype": "float32", "mode": "blocking"}
    metrics = {"time": seconds_metric(seconds), "algbw": rate_metric(size_bytes / seconds)}
    world = msgspec.structs.replace(WORLD, nodes=nodes)
    return ok(make_case("memory.copy", "bench.memory:copy", params), metrics=metrics, world=world)


def test_rows_of_an_operation_make_a_curve_in_the_order_of_size() -> None:
    curve = only(fit_curves(rows_of(*curve_records(sizes=SIZES[::-1])), None))
    assert [size_of(row) for row in curve.rows] == SIZES
    (line,) = curve.fit.segments
    assert line.latency_seconds == pytest.approx(20e-6)
    assert line.bytes_per_second == pytest.approx(3e9)


@pytest.mark.parametrize("differing", [{"mode": "pipelined"}, {"dtype": "float16"}, {"root": 1}])
def test_what_differs_in_more_than_size_is_another_curve(differing: dict[str, Any]) -> None:
    slow = curve_records(model=lambda size: 90e-6 + size / 1e9, **differing)
    mixed = [record for pair in zip(curve_records(), slow, strict=True) for record in pair]
    curves = fit_curves(rows_of(*mixed), None)
    latencies = [curve.fit.segments[0].latency_seconds for curve in curves]
    assert latencies == pytest.approx([20e-6, 90e-6])
    assert {name: curves[1].rows[0].case.params[name] for name in differing} == differing


def test_another_world_is_another_curve() -> None:
    records = curve_records()
    world = msgspec.structs.replace(records[0].world, size=8)
    others = [msgspec.structs.replace(record, world=world) for record in curve_records("broadcast")]
    same_case = [
        msgspec.structs.replace(other, case=collective("all_reduce", size + 4))
        for other, size in zip(others, SIZES, strict=True)
    ]
    curves = fit_curves(rows_of(*records, *same_case), None)
    assert [curve.rows[0].world.size for curve in curves] == [4, 8]


def test_curves_come_in_the_order_of_their_rows() -> None:
    rows = rows_of(*curve_records("broadcast"), *curve_records("all_gather"))
    assert [curve.rows[0].case.name for curve in fit_curves(rows, None)] == [
        "collective.broadcast",
        "collective.all_gather",
    ]


def test_fewer_than_three_sizes_say_nothing() -> None:
    assert fit_curves(rows_of(*curve_records(sizes=SIZES[:2])), link(1e9)) == ()
    assert len(fit_curves(rows_of(*curve_records(sizes=SIZES[:3])), link(1e9))) == 1


def test_what_has_no_time_or_size_is_not_on_the_curve() -> None:
    broken = [
        ok(collective(size_bytes=5), metrics={"time": seconds_metric(None)}),
        ok(collective(size_bytes=6), metrics={"time": seconds_metric(0.0)}),
        ok(collective(size_bytes=7), metrics={"algbw": rate_metric(1e9)}),
        bad(collective(size_bytes=8), 0, "wrong", "3 elements differ"),
        ok(collective(size_bytes=0), metrics={"time": seconds_metric(1.0)}),
        ok(step("ddp")),
    ]
    curve = only(fit_curves(rows_of(*broken, *curve_records()), None))
    assert [size_of(row) for row in curve.rows] == SIZES


def test_points_are_merged_over_launches() -> None:
    records = [
        ok(collective(size_bytes=size), launch, factor * 1e-3)
        for launch, factor in enumerate((1.0, 1.1, 1.3))
        for size in SIZES
    ]
    rows = rows_of(*records, launches=3)
    time = rows[0].metrics["time"]
    assert time.low is not None
    first = points_of(rows)[0]
    assert first == Point(size_bytes=1024, seconds=time.value or 0, low=time.low, high=time.high)
    assert first.seconds == pytest.approx(1e-3 * (1.0 * 1.1 * 1.3) ** (1 / 3))


def test_a_row_without_a_known_time_is_no_point() -> None:
    assert points_of(rows_of(ok(collective(), metrics={"time": seconds_metric(None)}))) == ()


def test_a_size_that_is_no_number_is_none() -> None:
    case = make_case("p2p.mine", "m:f", {"size_bytes": "big"})
    (row,) = rows_of(msgspec.structs.replace(ok(collective()), case=case))
    assert size_of(row) == 0
    assert fit_curves([row] * 3, None) == ()


def test_the_factor_of_the_bus_bandwidth_is_that_of_the_rows() -> None:
    assert only(fit_curves(rows_of(*curve_records()), None)).busbw_factor == pytest.approx(1.5)


@pytest.mark.parametrize("metrics", [{}, {"algbw": rate_metric(None)}, {"algbw": rate_metric(1e9)}])
def test_without_a_bus_bandwidth_its_factor_is_unknown(metrics: dict[str, Metric]) -> None:
    records = [
        ok(collective(size_bytes=size), metrics={**metrics, "time": seconds_metric(1e-5 + size / 1e9)})
        for size in SIZES
    ]
    curve = only(fit_curves(rows_of(*records), link(25e9)))
    assert curve.busbw_factor is None
    assert curve.efficiency.fraction is None


def test_efficiency_is_that_of_the_fitted_bus_bandwidth() -> None:
    rows = rows_of(*curve_records())
    assert only(fit_curves(rows, link(9e9))).efficiency.fraction == pytest.approx(0.5)
    assert only(fit_curves(rows, link(3e9))).efficiency.fraction == pytest.approx(1.5)
    assert only(fit_curves(rows, None)).efficiency.fraction is None


def test_efficiency_is_that_of_the_largest_sizes() -> None:
    sizes = [1024 * 2**i for i in range(17)]
    switching = curve_records(model=lambda s: 10e-6 + s / 1e9 if s <= 1 << 16 else 100e-6 + s / 5e9, sizes=sizes)
    curve = only(fit_curves(rows_of(*switching), link(15e9)))
    assert len(curve.fit.segments) == 2
    assert curve.efficiency.fraction == pytest.approx(0.5, rel=1e-3)


def test_a_flat_curve_has_no_efficiency() -> None:
    assert only(fit_curves(rows_of(*curve_records(model=lambda size: 1e-5)), link(9e9))).efficiency.fraction is None


def test_the_ceiling_is_the_plans_link_whatever_was_copied() -> None:
    run = linked(run_of(ok(collective()), copied(1e-3)), 25e9)
    assert ceiling_of(run, summarize(run).rows) == link(25e9)


def test_without_a_link_it_is_the_largest_copy_on_the_same_host() -> None:
    run = run_of(copied(1e-3, 1 << 20), copied(4e-3, 1 << 24), copied(1e-6, 1 << 10))
    assert ceiling_of(run, summarize(run).rows) == Ceiling(name=COPY, bytes_per_second=(1 << 24) / 4e-3)


def test_a_copy_says_nothing_of_what_lies_between_nodes() -> None:
    run = run_of(copied(1e-3, nodes=2))
    assert ceiling_of(run, summarize(run).rows) is None


def test_without_link_and_copy_there_is_no_ceiling() -> None:
    run = run_of(ok(collective()))
    assert ceiling_of(run, summarize(run).rows) is None


def test_notes_tell_method_link_and_what_is_above_it() -> None:
    rows = rows_of(*curve_records())
    assert METHOD in fit_notes(fit_curves(rows, None), None)[0]
    assert len(fit_notes(fit_curves(rows, None), None)) == 2
    below = fit_notes(fit_curves(rows, link(9e9)), link(9e9))
    assert below[2:] == ("Efficiency: fitted bus bandwidth over the declared link, 9.00 GB/s.",)
    above = fit_notes(fit_curves((*rows, *rows_of(*curve_records("broadcast"))), link(3e9)), link(3e9))
    assert len(above) == 4
    assert "reduction in the network" in above[3]


def test_without_fits_there_are_no_notes() -> None:
    assert fit_notes((), link(9e9)) == ()
