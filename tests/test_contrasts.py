"""Rows that differ in one thing alone are held against each other."""

import pytest
from reports_fixtures import collective, make_plan, make_run, ok, rate_metric, seconds_metric

from bench.cases import Case, make_case
from bench.params import Value
from bench.records import Record
from reports.contrasts import contention, contrasts, interference, loads, matrix_title, pairs, slow_down
from reports.summary import Row, summarize


def rows_of(*records: Record, launches: int = 1) -> tuple[Row, ...]:
    cases = {record.case.id: record.case for record in records}.values()
    return summarize(make_run(make_plan(cases, launches=launches), records)).rows


def pair(source: int, target: int, size_bytes: int = 1 << 20) -> Case:
    ends: dict[str, Value] = {"source": source, "target": target}
    params = {"size_bytes": size_bytes, "dtype": "float32", "mode": "blocking", **ends}
    return make_case("p2p.matrix", "bench.p2p:unidirectional", params)


def test_each_group_alone_meets_itself_with_all_groups() -> None:
    first, second = collective(group="pairs"), collective(group="pairs", member=1)
    both = [collective(group="pairs", together=True), collective(group="pairs", member=1, together=True)]
    seconds = [1e-3, 2e-3, 3e-3, 5e-3]
    found = contention(rows_of(*(ok(case, seconds=s) for case, s in zip([first, second, *both], seconds, strict=True))))
    assert [one.base.case.id for one in found] == [first.id, second.id]
    assert [one.factors["together"].value for one in found] == pytest.approx([3.0, 2.5])


def test_each_load_has_its_factor_and_what_has_no_load_is_not_there() -> None:
    base = collective()
    beside = [collective(beside="gemm"), collective(beside="all_to_all")]
    other = collective("broadcast")
    records = [ok(base, seconds=2e-3), ok(beside[0], seconds=3e-3), ok(beside[1], seconds=8e-3), ok(other)]
    (found,) = interference(rows_of(*records))
    assert {name: metric.value for name, metric in found.factors.items()} == pytest.approx(
        {"gemm": 1.5, "all_to_all": 4.0}
    )
    assert loads([found]) == ("gemm", "all_to_all")


def test_a_load_without_its_base_has_no_factor() -> None:
    assert interference(rows_of(ok(collective(beside="gemm")))) == ()
    assert interference(rows_of(ok(collective(size_bytes=2048)), ok(collective(beside="gemm")))) == ()


def test_ratios_are_paired_by_launch() -> None:
    base = [ok(collective(), launch, seconds) for launch, seconds in enumerate((1e-3, 2e-3, 4e-3))]
    beside = [ok(collective(beside="gemm"), launch, s) for launch, s in enumerate((1.5e-3, 3e-3, 6e-3))]
    (found,) = interference(rows_of(*base, *beside, launches=3))
    factor = found.factors["gemm"]
    assert (factor.value, factor.low, factor.high) == pytest.approx((1.5, 1.5, 1.5))
    assert factor.method == "ratio of times, geometric mean of 3 launch ratios, t interval"


def test_launches_that_measured_one_of_the_two_do_not_count() -> None:
    base = [ok(collective(), launch, seconds) for launch, seconds in enumerate((1e-3, 9e-3))]
    rows = rows_of(*base, ok(collective(beside="gemm"), 0, 2e-3), launches=2)
    (found,) = interference(rows)
    assert found.factors["gemm"].value == pytest.approx(2.0)
    base_row, other = rows_of(ok(collective(), 0), ok(collective(beside="gemm"), 1), launches=2)
    assert slow_down(base_row, other) is None


def test_one_launch_joins_both_intervals() -> None:
    metrics = {"time": seconds_metric(1e-3, reach=0.0)}
    wide = {"time": seconds_metric(2e-3, reach=0.2)}
    row, other = rows_of(ok(collective(), metrics=metrics), ok(collective(beside="gemm"), metrics=wide))
    factor = slow_down(row, other)
    assert factor is not None
    assert factor.low is not None
    assert factor.high is not None
    assert factor.low < 2.0 < factor.high
    assert factor.high / factor.low == pytest.approx(1.2 / 0.8)


def test_a_matrix_is_by_sender_and_receiver_of_one_size() -> None:
    rates = {(0, 1): 1e9, (1, 0): 2e9, (0, 2): 3e9, (2, 0): 4e9, (1, 2): 5e9}
    records = [
        ok(pair(*ends), metrics={"time": seconds_metric(1e-3), "busbw": rate_metric(rate)})
        for ends, rate in rates.items()
    ]
    small, large = pairs(rows_of(*records, *(ok(pair(*ends, 2 << 20)) for ends in ((0, 1), (1, 0)))))
    assert small.ranks == (0, 1, 2)
    assert [small.rate(0, target) for target in small.ranks] == [None, 1e9, 3e9]
    assert small.rate(2, 1) is None
    assert large.ranks == (0, 1)
    assert matrix_title(large) == "Rank to rank: bus bandwidth in GB/s, 2M float32, blocking"


def test_a_single_pair_is_no_matrix() -> None:
    assert pairs(rows_of(ok(pair(0, 1)))) == ()


def test_only_what_there_is_has_a_title() -> None:
    assert contrasts(rows_of(ok(collective()))) == ()
    (found,) = contrasts(rows_of(ok(collective()), ok(collective(beside="gemm"))))
    assert (found[0], found[1]) == ("Interference: slow-down beside a load", "beside ")
