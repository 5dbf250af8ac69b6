"""Curves with their fits, predicted communication of a step, contrasts and scaling."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from parbench.bench.plan.cases import Case, make_case
from parbench.bench.results.details import Calls
from parbench.bench.results.fit import Point
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run
from parbench.reports.analysis.contrasts import contrasts, interference, slow_down
from parbench.reports.analysis.fits import (
    COPY,
    Ceiling,
    Curve,
    ceiling_of,
    fit_curves,
    points_of,
    size_of,
)
from parbench.reports.analysis.several import Scaled, scaled
from parbench.reports.analysis.steps import Prediction, calls_of, predict_comm
from parbench.reports.analysis.summary import Row, summarize
from tests.support.report_rows import run_from_records, summarize_row, summarize_rows
from tests.support.reports_fixtures import (
    WORLD,
    collective_case,
    comm_call,
    curve_records,
    failed_record,
    link_ceiling,
    ok_record,
    rate_metric,
    seconds_metric,
    step_case,
)

MEGABYTE = 1 << 20
SIZES = [1024 * 4**i for i in range(8)]


def on_world(records: list[Record], **world: Any) -> list[Record]:
    changed = msgspec.structs.replace(WORLD, **world)
    return [msgspec.structs.replace(record, world=changed) for record in records]


def curve_of(*records: Record, ceiling: Ceiling | None = None) -> Curve:
    (curve,) = fit_curves(summarize_rows(*records), ceiling)
    return curve


def modeled(model: Callable[[int], float], sizes: list[int] = SIZES) -> list[Record]:
    return [ok_record(collective_case(size_bytes=size), seconds=model(size)) for size in sizes]


def test_curve_has_rows_of_one_operation_by_size() -> None:
    curve = curve_of(*curve_records()[::-1])
    assert [size_of(row) for row in curve.rows] == SIZES
    (line,) = curve.fit.segments
    assert line.latency_seconds == pytest.approx(20e-6)
    assert line.bytes_per_second == pytest.approx(3e9)
    assert curve.busbw_factor == pytest.approx(1.5)
    assert fit_curves(summarize_rows(*curve_records()[:2]), None) == ()


def test_curve_leaves_out_rows_without_time_or_size() -> None:
    unusable = [
        ok_record(collective_case(size_bytes=5), metrics={"time": seconds_metric(None)}),
        ok_record(collective_case(size_bytes=6), metrics={"time": seconds_metric(0.0)}),
        ok_record(collective_case(size_bytes=7), metrics={"algbw": rate_metric(1e9)}),
        failed_record(collective_case(size_bytes=8), 0, "wrong", "3 elements differ"),
        ok_record(collective_case(size_bytes=0), metrics={"time": seconds_metric(1.0)}),
        ok_record(step_case("ddp")),
    ]
    assert [size_of(row) for row in curve_of(*unusable, *curve_records()).rows] == SIZES
    custom = make_case("p2p.mine", "m:f", {"size_bytes": "big"})
    assert (
        size_of(summarize_row(msgspec.structs.replace(ok_record(collective_case()), case=custom)))
        == 0
    )


def test_points_merge_repetitions() -> None:
    times = {0: 1.0e-3, 1: 1.1e-3, 2: 1.3e-3}
    rows = summarize_rows(
        *(ok_record(collective_case(), i, time) for i, time in times.items()), launches=3
    )
    time = rows[0].metrics["time"]
    assert time.low is not None
    expected = Point(
        size_bytes=1024, seconds=time.value or 0, low=time.low, high=time.high, launches=times
    )
    assert points_of(rows) == (expected,)
    assert expected.seconds == pytest.approx(1e-3 * (1.0 * 1.1 * 1.3) ** (1 / 3))


def test_efficiency_compares_fitted_busbw_with_the_link() -> None:
    assert curve_of(*curve_records(), ceiling=link_ceiling(9e9)).efficiency == pytest.approx(0.5)
    assert curve_of(*curve_records()).efficiency is None
    assert curve_of(*modeled(lambda size: 1e-5), ceiling=link_ceiling(9e9)).efficiency is None


def test_efficiency_is_that_of_the_last_segment() -> None:
    def switching(size: int) -> float:
        return 10e-6 + size / 1e9 if size <= 1 << 16 else 100e-6 + size / 5e9

    records = modeled(switching, [1024 * 2**i for i in range(17)])
    curve = curve_of(*records, ceiling=link_ceiling(15e9))
    assert len(curve.fit.segments) == 2
    assert curve.efficiency == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("algbw", [None, rate_metric(None), rate_metric(1e9)])
def test_efficiency_needs_measured_busbw(algbw: MetricValue | None) -> None:
    rates = {"algbw": algbw} if algbw else {}
    times = {size: seconds_metric(1e-5 + size / 1e9) for size in SIZES}
    records = [
        ok_record(collective_case(size_bytes=size), metrics={**rates, "time": time})
        for size, time in times.items()
    ]
    curve = curve_of(*records, ceiling=link_ceiling(25e9))
    assert (curve.busbw_factor, curve.efficiency) == (None, None)


def copied(seconds: float, size_bytes: int = 1 << 24, nodes: int = 1) -> Record:
    params: dict[str, Any] = {"size_bytes": size_bytes, "dtype": "float32", "mode": "blocking"}
    case = make_case("memory.copy", "parbench.bench.operations.local:copy", params)
    algbw = rate_metric(size_bytes / seconds)
    world = msgspec.structs.replace(WORLD, nodes=nodes)
    return ok_record(case, metrics={"time": seconds_metric(seconds), "algbw": algbw}, world=world)


def ceiling(run: Run) -> Ceiling | None:
    return ceiling_of(run, summarize(run).rows)


def test_ceiling_is_the_link_or_the_largest_local_copy() -> None:
    run = run_from_records(ok_record(collective_case()), copied(1e-3))
    plan = msgspec.structs.replace(run.info.plan, link_bytes_per_second=25e9)
    linked = msgspec.structs.replace(run, info=msgspec.structs.replace(run.info, plan=plan))
    assert ceiling(linked) == link_ceiling(25e9)
    copies = run_from_records(copied(1e-3, 1 << 20), copied(4e-3, 1 << 24), copied(1e-6, 1 << 10))
    assert ceiling(copies) == Ceiling(name=COPY, bytes_per_second=(1 << 24) / 4e-3)
    assert ceiling(run_from_records(copied(1e-3, nodes=2))) is None


def step_row(*calls: dict[str, Any]) -> Row:
    return summarize_row(ok_record(step_case(), details={"comm_calls": list(calls)}))


def predicted(row: Row, *records: Record) -> Prediction:
    prediction = predict_comm(row, fit_curves(summarize_rows(*records), None))
    assert prediction is not None
    return prediction


def grouped(latency: float, index: int = 0, size: int = 2, **params: Any) -> list[Record]:
    records = curve_records(latency=latency, group="pairs", group_index=index, **params)
    details = {"group_size": size}
    return [msgspec.structs.replace(record, details=details) for record in records]


def test_predict_comm_sums_calls_by_axis() -> None:
    row = step_row(
        comm_call("all_reduce", MEGABYTE, "dp", count=3),
        comm_call("all_reduce", 4096, "tp"),
        comm_call("all_gather", 65536, "tp", count=2),
    )
    gather = curve_records("all_gather", latency=70e-6)
    prediction = predicted(row, *curve_records("all_reduce"), *gather)
    tp = 20e-6 + 4096 / 3e9 + 2 * (70e-6 + 65536 / 3e9)
    dp = 3 * (20e-6 + MEGABYTE / 3e9)
    assert prediction.seconds_by_axis == pytest.approx({"dp": dp, "tp": tp})
    assert prediction.seconds == pytest.approx(dp + tp)
    assert (prediction.missing, prediction.notes) == ((), ())
    assert predicted(step_row()).seconds == 0


def test_predict_comm_names_operations_without_curve() -> None:
    calls = [comm_call("reduce_scatter", axis="tp")] * 2
    prediction = predicted(step_row(comm_call(axis="dp"), *calls), *curve_records())
    assert list(prediction.seconds_by_axis) == ["dp"]
    assert prediction.missing == ("tp: reduce_scatter on 4 ranks",)
    assert prediction.seconds is None
    assert "reduce_scatter on 4 ranks" in prediction.notes[0]


@pytest.mark.parametrize(
    "records",
    [
        curve_records(mode="pipelined"),
        curve_records(dtype="float16"),
        curve_records(background="gemm"),
        curve_records(redop="max"),
        curve_records(placement="x"),
        on_world(curve_records(), size=8),
        on_world(curve_records(), backend="nccl"),
        on_world(curve_records(), device="cuda"),
        grouped(50e-6, size=3),
    ],
)
def test_predict_comm_ignores_curves_of_other_settings(records: list[Record]) -> None:
    assert predicted(step_row(comm_call()), *records).missing


def test_predict_comm_prefers_worlds_then_slowest_group() -> None:
    world = on_world(curve_records(), size=2)
    single = [*grouped(30e-6), *grouped(40e-6, 1)]
    concurrent = [*grouped(35e-6, concurrent=True), *grouped(25e-6, 1, concurrent=True)]
    for records, latency in (
        ([*grouped(90e-6), *world], 20e-6),
        (single, 40e-6),
        ([*single, *concurrent], 35e-6),
    ):
        prediction = predicted(step_row(comm_call(ranks=2)), *records)
        assert prediction.seconds == pytest.approx(latency + MEGABYTE / 3e9)


@pytest.mark.parametrize(
    ("num_bytes", "is_flagged"), [(512, True), (1024, False), (1 << 24, False), (1 << 25, True)]
)
def test_predict_comm_flags_extrapolation(num_bytes: int, is_flagged: bool) -> None:
    prediction = predicted(step_row(comm_call(num_bytes=num_bytes)), *curve_records())
    assert len(prediction.extrapolated) == len(prediction.notes) == is_flagged
    assert prediction.seconds == pytest.approx(20e-6 + num_bytes / 3e9)


@pytest.mark.parametrize("calls", [None, "all", [{"axis": "dp", "op": "all_reduce"}]])
def test_predict_comm_needs_readable_calls(calls: Any) -> None:
    row = summarize_row(ok_record(step_case(), details={"comm_calls": calls}))
    assert calls_of(row) is None
    assert predict_comm(row, fit_curves(summarize_rows(*curve_records()), None)) is None


def test_calls_must_agree_between_repetitions() -> None:
    def agreed(*counts: int) -> tuple[Calls, ...] | None:
        details = [{"comm_calls": [comm_call(count=count)]} for count in counts]
        return calls_of(
            summarize_row(
                *(ok_record(step_case(), i, details=d) for i, d in enumerate(details)), launches=2
            )
        )

    assert agreed(1, 1) == (
        Calls(axis="dp", op="all_reduce", num_bytes=MEGABYTE, ranks=4, count=1),
    )
    assert agreed(1, 2) is None


def test_interference_compares_concurrent_groups() -> None:
    groups: list[dict[str, Any]] = [{"group": "pairs", "group_index": i} for i in range(2)]
    single = [ok_record(collective_case(**groups[i]), seconds=(i + 1) * 1e-3) for i in range(2)]
    concurrent = [
        ok_record(collective_case(**groups[i], concurrent=True), seconds=(3e-3, 5e-3)[i])
        for i in range(2)
    ]
    contrast = interference(summarize_rows(*single, *concurrent), "concurrent")
    assert [one.base.case for one in contrast] == [record.case for record in single]
    assert [one.factors["together"].value for one in contrast] == pytest.approx([3.0, 2.5])


def test_interference_has_a_factor_for_each_load() -> None:
    gemm, other = collective_case(background="gemm"), collective_case(background="all_to_all")
    loaded = [ok_record(gemm, seconds=3e-3), ok_record(other, seconds=8e-3)]
    (contrast,) = interference(summarize_rows(ok_record(collective_case(), seconds=2e-3), *loaded))
    factors = {name: factor.value for name, factor in contrast.factors.items()}
    assert factors == pytest.approx({"gemm": 1.5, "all_to_all": 4.0})
    assert (
        interference(summarize_rows(ok_record(collective_case(size_bytes=2048)), ok_record(gemm)))
        == ()
    )
    assert contrasts(summarize_rows(ok_record(collective_case()))) == ()


def repeated(case: Case, *times: float) -> list[Record]:
    return [ok_record(case, i, time) for i, time in enumerate(times)]


def test_ratio_is_paired_by_repetition() -> None:
    gemm = collective_case(background="gemm")
    base = repeated(collective_case(), 1e-3, 2e-3, 4e-3)
    loaded = repeated(gemm, 1.5e-3, 3e-3, 6e-3)
    (contrast,) = interference(summarize_rows(*base, *loaded, launches=3))
    factor = contrast.factors["gemm"]
    assert (factor.value, factor.low, factor.high) == pytest.approx((1.5, 1.5, 1.5))
    assert (
        slow_down(*summarize_rows(ok_record(collective_case(), 0), ok_record(gemm, 1), launches=2))
        is None
    )


def test_ratio_of_one_repetition_joins_both_intervals() -> None:
    case, gemm = collective_case(), collective_case(background="gemm")
    base = ok_record(case, metrics={"time": seconds_metric(1e-3, reach=0.0)})
    loaded = ok_record(gemm, metrics={"time": seconds_metric(2e-3, reach=0.2)})
    ratio = slow_down(*summarize_rows(base, loaded))
    assert ratio is not None
    assert ratio.low is not None
    assert ratio.high is not None
    assert ratio.low < 2.0 < ratio.high
    assert ratio.high / ratio.low == pytest.approx(1.2 / 0.8)
    below_zero = msgspec.structs.replace(seconds_metric(1e-3), low=-1e-3)
    ratio = slow_down(
        *summarize_rows(
            ok_record(case, metrics={"time": below_zero}), ok_record(gemm, seconds=2e-3)
        )
    )
    assert ratio is not None
    assert ratio.value == pytest.approx(2.0)
    assert ratio.low is None


def row_on(case: Case, ranks: int, seconds: float = 1e-3) -> Row:
    return summarize_row(*on_world([ok_record(case, seconds=seconds)], size=ranks))


def scaling(*rows: Row) -> Scaled:
    (series,) = scaled(rows)
    return series


@pytest.mark.parametrize(
    ("case", "seconds", "efficiency"),
    [(step_case(), 1e-3, 0.25), (step_case(), 0.25e-3, 1.0), (collective_case(), 2e-3, 0.5)],
)
def test_scaling_expects_rate_or_busbw(case: Case, seconds: float, efficiency: float) -> None:
    series = scaling(row_on(case, 2), row_on(case, 8, seconds))
    assert series.efficiency(8) == pytest.approx(efficiency)


def test_scaling_starts_at_the_smallest_world() -> None:
    rows = (
        row_on(step_case(), 8, 2e-3),
        row_on(step_case(), 4),
        row_on(step_case(), 2),
        row_on(step_case(), 2, 9e-3),
    )
    series = scaling(*rows)
    assert [*series.rows] == [2, 4, 8]
    assert series.rows[2].value("step_time") == pytest.approx(1e-3), "the first of a size"
    assert series.efficiency(2) == pytest.approx(1.0)
    assert series.rate(3) is series.efficiency(3) is None
    assert scaled([row_on(step_case(), 2), row_on(step_case(), 2)]) == ()
    assert scaled([row_on(collective_case(group="pairs"), n) for n in (2, 4)]) == ()
