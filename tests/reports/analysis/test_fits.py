"""Rows held against each other: curves and their fits, what a step's calls should take, contrasts and scaling."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import reports_fixtures as fixtures
from report_rows import row_of, rows_of, run_of
from reports_fixtures import WORLD, collective, comm_call, curve_records, link, ok, rate_metric, seconds_metric, step

from parbench.bench.plan.cases import Case, make_case
from parbench.bench.plan.params import Value
from parbench.bench.results.details import Calls
from parbench.bench.results.fit import Point
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run
from parbench.reports.analysis.contrasts import contrasts, interference, slow_down
from parbench.reports.analysis.fits import COPY, Ceiling, Curve, ceiling_of, fit_curves, points_of, size_of
from parbench.reports.analysis.several import Scaled, scaled
from parbench.reports.analysis.steps import Prediction, calls_of, predict_comm
from parbench.reports.analysis.summary import Row, summarize

MEGABYTE = 1 << 20
SIZES = [1024 * 4**i for i in range(8)]


def on_world(records: list[Record], **more: Any) -> list[Record]:
    return [msgspec.structs.replace(one, world=msgspec.structs.replace(WORLD, **more)) for one in records]


def curves_of(*records: Record, ceiling: Ceiling | None = None) -> tuple[Curve, ...]:
    return fit_curves(rows_of(*records), ceiling)


def curve_of(*records: Record, ceiling: Ceiling | None = None) -> Curve:
    (curve,) = curves_of(*records, ceiling=ceiling)
    return curve


def modelled(model: Callable[[int], float], sizes: list[int] = SIZES, **params: Any) -> list[Record]:
    return [ok(collective(size_bytes=size, **params), seconds=model(size)) for size in sizes]


def test_rows_of_an_operation_make_a_curve_in_the_order_of_size() -> None:
    curve = curve_of(*curve_records()[::-1])
    assert [size_of(row) for row in curve.rows] == SIZES
    (line,) = curve.fit.segments
    assert line.latency_seconds == pytest.approx(20e-6)
    assert line.bytes_per_second == pytest.approx(3e9)
    assert curve.busbw_factor == pytest.approx(1.5)
    assert curves_of(*curve_records()[:2]) == ()
    assert len(curves_of(*curve_records()[:3])) == 1


def test_what_has_no_time_or_size_is_not_on_the_curve() -> None:
    unknown = ok(collective(size_bytes=5), metrics={"time": seconds_metric(None)})
    broken = [
        unknown,
        ok(collective(size_bytes=6), metrics={"time": seconds_metric(0.0)}),
        ok(collective(size_bytes=7), metrics={"algbw": rate_metric(1e9)}),
        fixtures.bad(collective(size_bytes=8), 0, "wrong", "3 elements differ"),
        ok(collective(size_bytes=0), metrics={"time": seconds_metric(1.0)}),
        ok(step("ddp")),
    ]
    assert [size_of(row) for row in curve_of(*broken, *curve_records()).rows] == SIZES
    assert points_of(rows_of(unknown)) == ()
    row = row_of(msgspec.structs.replace(ok(collective()), case=make_case("p2p.mine", "m:f", {"size_bytes": "big"})))
    assert size_of(row) == 0
    assert fit_curves([row] * 3, None) == ()


def test_points_are_merged_over_launches() -> None:
    factors = enumerate((1.0, 1.1, 1.3))
    rows = rows_of(*(ok(collective(), launch, factor * 1e-3) for launch, factor in factors), launches=3)
    time = rows[0].metrics["time"]
    assert time.low is not None
    (point,) = points_of(rows)
    launches = {i: factor * 1e-3 for i, factor in enumerate((1.0, 1.1, 1.3))}
    assert point == Point(size_bytes=1024, seconds=time.value or 0, low=time.low, high=time.high, launches=launches)
    assert point.seconds == pytest.approx(1e-3 * (1.0 * 1.1 * 1.3) ** (1 / 3))


def test_efficiency_is_that_of_the_fitted_bus_bandwidth_of_the_largest_sizes() -> None:
    def of_link(records: list[Record], ceiling: Ceiling | None = None) -> float | None:
        return curve_of(*records, ceiling=ceiling).efficiency

    assert of_link(curve_records(), link(9e9)) == pytest.approx(0.5)
    assert of_link(curve_records(), link(3e9)) == pytest.approx(1.5)
    assert of_link(curve_records()) is None
    assert of_link(modelled(lambda size: 1e-5), link(9e9)) is None
    sizes = [1024 * 2**i for i in range(17)]
    switching = modelled(lambda s: 10e-6 + s / 1e9 if s <= 1 << 16 else 100e-6 + s / 5e9, sizes)
    assert len(curve_of(*switching).fit.segments) == 2
    assert of_link(switching, link(15e9)) == pytest.approx(0.5, rel=1e-3)
    rates: list[dict[str, MetricValue]] = [{}, {"algbw": rate_metric(None)}, {"algbw": rate_metric(1e9)}]
    for told in rates:
        times = [{**told, "time": seconds_metric(1e-5 + size / 1e9)} for size in SIZES]
        records = [ok(collective(size_bytes=size), metrics=metrics) for size, metrics in zip(SIZES, times, strict=True)]
        assert curve_of(*records).busbw_factor is None
        assert of_link(records, link(25e9)) is None


def test_the_ceiling_is_the_plans_link_else_the_largest_copy_on_one_host() -> None:
    def copied(seconds: float, size_bytes: int = 1 << 24, nodes: int = 1) -> Record:
        params: dict[str, Value] = {"size_bytes": size_bytes, "dtype": "float32", "mode": "blocking"}
        metrics = {"time": seconds_metric(seconds), "algbw": rate_metric(size_bytes / seconds)}
        world = msgspec.structs.replace(WORLD, nodes=nodes)
        return ok(
            make_case("memory.copy", "parbench.bench.operations.local:copy", params), metrics=metrics, world=world
        )

    def ceiling(run: Run) -> Ceiling | None:
        return ceiling_of(run, summarize(run).rows)

    run = run_of(ok(collective()), copied(1e-3))
    plan = msgspec.structs.replace(run.info.plan, link_bytes_per_second=25e9)
    assert ceiling(msgspec.structs.replace(run, info=msgspec.structs.replace(run.info, plan=plan))) == link(25e9)
    copies = [copied(1e-3, 1 << 20), copied(4e-3, 1 << 24), copied(1e-6, 1 << 10)]
    assert ceiling(run_of(*copies)) == Ceiling(name=COPY, bytes_per_second=(1 << 24) / 4e-3)
    assert ceiling(run_of(copied(1e-3, nodes=2))) is ceiling(run_of(ok(collective()))) is None


def step_row(*calls: dict[str, Any]) -> Row:
    return row_of(ok(step(), details={"comm_calls": list(calls)}))


def predicted(row: Row, *records: Record) -> Prediction:
    found = predict_comm(row, curves_of(*records))
    assert found is not None
    return found


def grouped(latency: float, group_size: int | None = 2, **params: Any) -> list[Record]:
    """Return a curve on a group; one that is the whole world does not say its size."""
    details = {} if group_size is None else {"group_size": group_size}
    records = curve_records(latency=latency, **{"group": "pairs", "group_index": 0, **params})
    return [msgspec.structs.replace(record, details=details) for record in records]


def test_each_call_takes_what_its_curve_says_of_its_size_and_axes_are_summed() -> None:
    row = step_row(
        comm_call("all_reduce", MEGABYTE, "dp", count=3),
        comm_call("all_reduce", 4096, "tp"),
        comm_call("all_gather", 65536, "tp", count=2),
    )
    found = predicted(row, *curve_records("all_reduce"), *curve_records("all_gather", latency=70e-6))
    tp = 20e-6 + 4096 / 3e9 + 2 * (70e-6 + 65536 / 3e9)
    assert found.seconds_by_axis == pytest.approx({"dp": 3 * (20e-6 + MEGABYTE / 3e9), "tp": tp})
    assert found.seconds == pytest.approx(sum(found.seconds_by_axis.values()))
    assert (found.missing, found.extrapolated, found.notes) == ((), (), ())
    assert predicted(step_row()).seconds == 0
    sent = predicted(step_row(comm_call("sendrecv", axis="pp")), *curve_records("sendrecv"))
    assert sent.seconds == pytest.approx(20e-6 + MEGABYTE / 3e9)


def test_an_operation_without_a_curve_is_named_once_and_its_axis_unknown() -> None:
    row = step_row(comm_call(axis="dp"), comm_call(axis="tp"), *[comm_call("reduce_scatter", axis="tp")] * 2)
    found = predicted(row, *curve_records())
    assert list(found.seconds_by_axis) == ["dp"]
    assert found.missing == ("tp: reduce_scatter on 4 ranks",)
    assert found.seconds is None
    assert found.notes == ("predicted comm: no blocking float32 curve for tp: reduce_scatter on 4 ranks",)


def test_a_curve_of_another_mode_type_load_reduction_or_world_does_not_count() -> None:
    other: list[dict[str, Any]] = [{"mode": "pipelined"}, {"dtype": "float16"}, {"background": "gemm"}]
    for params in (*other, {"redop": "max"}, {"placement": "x"}):
        assert predicted(step_row(comm_call()), *curve_records(**params)).missing, params
    worlds: list[dict[str, Any]] = [{"size": 8}, {"backend": "nccl"}, {"device": "cuda"}]
    for more in worlds:
        assert predicted(step_row(comm_call()), *on_world(curve_records(), **more)).missing, more
    assert predicted(step_row(comm_call(ranks=2)), *grouped(50e-6, 3)).missing


def test_worlds_of_the_calls_size_come_before_groups_and_of_groups_the_slowest_at_once() -> None:
    row, rest = step_row(comm_call(ranks=2)), MEGABYTE / 3e9
    smaller = on_world(curve_records(), size=2)
    alone = [*grouped(30e-6), *grouped(40e-6, group_index=1)]
    together = [*grouped(35e-6, concurrent=True), *grouped(25e-6, group_index=1, concurrent=True)]
    for records, latency in (
        (smaller, 20e-6),
        (grouped(50e-6), 50e-6),
        ([*grouped(90e-6), *smaller], 20e-6),
        (alone, 40e-6),
        ([*alone, *together], 35e-6),
    ):
        assert predicted(row, *records).seconds == pytest.approx(latency + rest)
    whole = grouped(50e-6, None, group="contiguous:4")
    assert predicted(step_row(comm_call()), *whole).seconds == pytest.approx(50e-6 + rest)


def test_a_size_beyond_those_measured_is_flagged_in_words() -> None:
    for num_bytes, words in ((512, "512"), (1 << 25, "32M")):
        found = predicted(step_row(comm_call(num_bytes=num_bytes)), *curve_records())
        told = f"dp: all_reduce on 4 ranks, {words} a call, 1K to 16M were measured"
        assert found.extrapolated == (told,)
        assert found.notes == (f"predicted comm is extrapolated: {told}",)
        assert found.seconds == pytest.approx(20e-6 + num_bytes / 3e9)
    for num_bytes in (1024, 1 << 24):
        assert predicted(step_row(comm_call(num_bytes=num_bytes)), *curve_records()).extrapolated == ()


def test_without_readable_calls_on_which_launches_agree_there_is_no_prediction() -> None:
    unreadable: list[dict[str, Any]] = [{}, {"comm_calls": None}, {"comm_calls": "all"}]
    for details in (*unreadable, {"comm_calls": [{"axis": "dp", "op": "all_reduce"}]}):
        row = row_of(ok(step(), details=details))
        assert calls_of(row) is None, details
        assert predict_comm(row, curves_of(*curve_records())) is None, details

    def told(second: dict[str, Any]) -> tuple[Calls, ...] | None:
        calls = enumerate(([comm_call()], [second]))
        return calls_of(row_of(*(ok(step(), i, details={"comm_calls": one}) for i, one in calls), launches=2))

    assert told(comm_call()) == (Calls(axis="dp", op="all_reduce", num_bytes=MEGABYTE, ranks=4, count=1),)
    assert told(comm_call(count=2)) is None


def test_each_group_alone_meets_itself_with_all_groups() -> None:
    alone = [collective(group="pairs"), collective(group="pairs", group_index=1)]
    cases = [
        *alone,
        collective(group="pairs", concurrent=True),
        collective(group="pairs", group_index=1, concurrent=True),
    ]
    found = interference(
        rows_of(*(ok(case, seconds=s) for case, s in zip(cases, (1e-3, 2e-3, 3e-3, 5e-3), strict=True))), "concurrent"
    )
    assert [one.base.case.id for one in found] == [case.id for case in alone]
    assert [one.factors["together"].value for one in found] == pytest.approx([3.0, 2.5])


def test_each_load_has_its_factor_and_without_its_base_none() -> None:
    gemm, other = collective(background="gemm"), collective(background="all_to_all")
    records = [ok(collective(), seconds=2e-3), ok(gemm, seconds=3e-3), ok(other, seconds=8e-3)]
    (found,) = interference(rows_of(*records, ok(collective("broadcast"))))
    assert {name: one.value for name, one in found.factors.items()} == pytest.approx({"gemm": 1.5, "all_to_all": 4.0})
    assert interference(rows_of(ok(gemm))) == interference(rows_of(ok(collective(size_bytes=2048)), ok(gemm))) == ()
    assert contrasts(rows_of(ok(collective()))) == ()


def test_ratios_are_paired_by_launch_and_one_launch_joins_both_intervals() -> None:
    gemm = collective(background="gemm")
    base = [ok(collective(), launch, seconds) for launch, seconds in enumerate((1e-3, 2e-3, 4e-3))]
    beside = [ok(gemm, launch, s) for launch, s in enumerate((1.5e-3, 3e-3, 6e-3))]
    (found,) = interference(rows_of(*base, *beside, launches=3))
    factor = found.factors["gemm"]
    assert (factor.value, factor.low, factor.high) == pytest.approx((1.5, 1.5, 1.5))
    assert (
        factor.method
        == "ratio of times, geometric mean of 3 launch ratios, Student's t interval on logarithms, 2 degrees of freedom"
    )
    (found,) = interference(rows_of(*base[:2], ok(gemm, 0, 2e-3), launches=2))
    assert found.factors["gemm"].value == pytest.approx(2.0)
    assert slow_down(*rows_of(ok(collective(), 0), ok(gemm, 1), launches=2)) is None
    below = {"step_time": seconds_metric(-1e-3)}
    assert slow_down(*rows_of(ok(step(), metrics=below), ok(step("fsdp")))) is None
    below = {"time": msgspec.structs.replace(seconds_metric(1e-3), low=-1e-3)}
    one = slow_down(*rows_of(ok(collective(), metrics=below), ok(gemm, seconds=2e-3)))
    assert one is not None
    assert one.value == pytest.approx(2.0)
    assert one.low is None
    metrics = [{"time": seconds_metric(1e-3, reach=0.0)}, {"time": seconds_metric(2e-3, reach=0.2)}]
    one = slow_down(*rows_of(ok(collective(), metrics=metrics[0]), ok(gemm, metrics=metrics[1])))
    assert one is not None
    assert (one.low or 9) < 2.0 < (one.high or 0)
    assert (one.high or 0) / (one.low or 1) == pytest.approx(1.2 / 0.8)


def row_on(case: Case, ranks: int, seconds: float = 1e-3) -> Row:
    return row_of(*on_world([ok(case, seconds=seconds)], size=ranks))


def one_scaled(*rows: Row) -> Scaled:
    (found,) = scaled(rows)
    return found


def test_steps_should_grow_as_the_ranks_do_and_bus_bandwidth_should_stay() -> None:
    told = ((step(), 1e-3, 0.25), (step(), 0.25e-3, 1.0), (collective(), 2e-3, 0.5))  # a step's tokens are all ranks'
    for case, seconds, efficiency in told:
        assert one_scaled(row_on(case, 2), row_on(case, 8, seconds)).efficiency(8) == pytest.approx(efficiency)


def test_the_smallest_world_is_the_base_and_of_one_world_the_first_run_counts() -> None:
    found = one_scaled(row_on(step(), 8, 2e-3), row_on(step(), 4), row_on(step(), 2), row_on(step(), 2, 9e-3))
    assert found.first.world.size == 2
    assert found.rows[2].value("step_time") == pytest.approx(1e-3)
    assert found.efficiency(2) == pytest.approx(1.0)
    assert found.rate(3) is found.efficiency(3) is None
    assert [*found.rows] == [2, 4, 8]
    assert scaled([row_on(step(), 2), row_on(step(), 2)]) == ()
    assert scaled([row_on(collective(group="pairs"), n) for n in (2, 4)]) == ()
