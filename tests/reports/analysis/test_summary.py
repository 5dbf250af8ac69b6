"""Records as rows: launches merged, the worst one decides, the last record counts; verdicts and who comes late."""

from pathlib import Path

import msgspec
import pytest

from parbench.bench.launch.control_channel import LEFT_OUT
from parbench.bench.plan.plan import Skipped
from parbench.bench.results.metrics import MetricValue, merge_metrics
from parbench.bench.results.records import Check, Record, Status
from parbench.bench.results.runs import load_run
from parbench.bench.results.stats import Grade, mean_of, t_quantile
from parbench.reports.analysis.ranks import Late, late_rows
from parbench.reports.analysis.summary import common_details, exit_code, num_ranks, summarize
from tests.support import reports_fixtures as fixtures
from tests.support.late import late_record, samples
from tests.support.report_rows import run_from_records, summarize_row
from tests.support.reports_fixtures import (
    WORLD,
    collective_case,
    failed_record,
    hang_record,
    make_plan,
    make_run,
    ok_record,
    seconds_metric,
    write_run,
)

CASE = collective_case()


def test_merge_keeps_single_and_exact_metrics() -> None:
    metric = seconds_metric(0.25)
    merged = merge_metrics([{"time": metric}])["time"]
    assert merged == msgspec.structs.replace(metric, method=f"{metric.method}, within this launch")
    assert merge_metrics([{"time": merged}]) == {"time": merged}, "it is said once"
    exact = MetricValue(value=3 << 20, unit="B", better="lower", method="closed form")
    assert merge_metrics([{"bytes_sent.dp": exact}] * 5) == {"bytes_sent.dp": exact}
    assert merge_metrics([]) == {}


def test_merge_is_a_geometric_mean_with_t_interval() -> None:
    launches = [
        {"time": seconds_metric(s), "algbw": fixtures.rate_metric(1e6 / s)} for s in (1.0, 2.0, 4.0)
    ]
    launches[1]["time_p99"] = launches[2]["time_p99"] = seconds_metric(9.0)
    merged = merge_metrics(launches)
    assert list(merged) == ["time", "algbw", "time_p99"]
    time, expected = merged["time"], mean_of([1.0, 2.0, 4.0], "launch medians", "amount")
    assert time.value == pytest.approx(2.0)
    assert (time.low, time.high, time.unit, time.better) == (
        expected.low,
        expected.high,
        "s",
        "lower",
    )
    assert merged["algbw"].value == pytest.approx(
        1e6 / 2.0
    )  # bandwidths are never averaged arithmetically
    assert merged["algbw"].better == "higher"
    assert merged["time_p99"].value == pytest.approx(9.0)


def merged_of(name: str, *values: float | None, unit: str = "s") -> MetricValue:
    return merge_metrics([{name: MetricValue(value=value, unit=unit)} for value in values])[name]


def test_merge_depends_on_the_kind_of_metric() -> None:
    reach = t_quantile(0.975, 2) * 3**-0.5
    for values, low in (((1.0, 2.0, 3.0), 2 - reach), ((-2.0, -1.0, 0.0), -1 - reach)):
        found = merged_of("ect", *values)
        told = [found.value, found.low, found.high]
        assert told == pytest.approx([values[1], low, low + 2 * reach]), values
    share = merged_of("drop_rate", 0.0, 1.0, 2.0, unit="")
    assert [share.value, share.low, share.high] == pytest.approx([1.0, 0.0, 1 + reach]), (
        "no bound below zero"
    )
    assert merged_of("imbalance_slowdown", 1.0, 4.0, unit="").value == pytest.approx(2.0)
    assert merged_of("tracing_overhead", 0.0, 3.0, unit="").value == pytest.approx(1.0), (
        "of factors 1 and 4, less 1"
    )
    # of what only a user's own benchmark knows, rates are above zero, and others may be of either sign
    assert merged_of("mine", 1.0, 4.0).value == 2.5
    assert merged_of("mine", 1.0, 4.0, unit="ops/s").value == pytest.approx(2.0)
    impossible = merged_of("time", 0.0, 1.0)
    assert (impossible.value, impossible.low) == (None, None)


def test_merge_skips_unknown_values() -> None:
    found = merged_of("ect", None, 2.0, 4.0)
    assert found.value == 3.0
    assert "unknown in 1 of 3 launches" in found.method
    alone = MetricValue(
        value=2.0, unit="s", low=1.0, high=3.0, method="mean of 5 turns' differences, t interval"
    )
    found = merge_metrics(
        [{"ect": alone}, {"ect": MetricValue(value=None, unit="s", method="one turn")}]
    )["ect"]
    assert (found.value, found.low, found.high) == (2.0, 1.0, 3.0), "the interval of its own turns"
    unknown = [
        MetricValue(value=None, unit="s", method=method) for method in ("no clock", "no samples")
    ]
    merged = merge_metrics([{"skew": one} for one in unknown])["skew"]
    assert (merged.value, merged.method) == (None, "unknown in 2 of 2 launches")


def test_row_status_is_the_worst() -> None:
    told: dict[tuple[Status, Status], Status] = {
        ("ok", "ok"): "ok",
        ("ok", "skipped"): "skipped",
        ("failed", "skipped"): "failed",
        ("failed", "hang"): "hang",
        ("wrong", "hang"): "wrong",
        ("ok", "wrong"): "wrong",
    }
    for statuses, worst in told.items():
        for order in (statuses, statuses[::-1]):
            records = [
                ok_record(CASE, i) if status == "ok" else failed_record(CASE, i, status)
                for i, status in enumerate(order)
            ]
            assert summarize_row(*records, launches=2).status == worst, order


def test_row_ignores_repetitions_left_out() -> None:
    row = summarize_row(ok_record(CASE, 0), failed_record(CASE, 1, "skipped", LEFT_OUT), launches=2)
    assert (row.status, row.launches, row.planned, row.notes) == ("ok", 1, 2, ())
    assert summarize_row(failed_record(CASE, 0, "skipped", LEFT_OUT)).status == "skipped"


def test_row_of_a_wrong_result_has_no_metrics() -> None:
    wrong = failed_record(CASE, 1, "wrong", "2 elements differ", check=Check(passed=False, wrong=2))
    row = summarize_row(ok_record(CASE, 0), wrong, launches=2)
    assert row.metrics == {}
    assert row.check == Check(passed=False, wrong=2)
    row = summarize_row(
        ok_record(CASE, 0, 1e-3),
        failed_record(CASE, 1, metrics=fixtures.collective_metrics(CASE, 9.0)),
        launches=2,
    )
    assert (row.metrics["time"].value, row.launches, row.iterations) == (1e-3, 1, 120)
    assert summarize_row(hang_record(CASE)).measured == ()


def test_row_reasons_are_unique() -> None:
    told: list[tuple[Status, str]] = [
        ("failed", "it broke"),
        ("hang", "it hung"),
        ("failed", "it broke"),
    ]
    records = [
        failed_record(CASE, i, *one)
        for i, one in enumerate([*told, ("skipped", "not tried again")])
    ]
    assert summarize_row(*records, launches=4).reasons == ("it hung", "it broke")
    assert summarize_row(failed_record(CASE, 0, "skipped", "no float8")).reasons == ("no float8",)


def test_row_gathers_stops_steadiness_and_notes() -> None:
    records = [
        ok_record(CASE, 0, stop="budget", grade="stable", steady="drifting", notes=["a"]),
        ok_record(CASE, 1, stop="precision", grade="very noisy", notes=["a", "b"]),
        ok_record(CASE, 2, stop="precision", grade="fair"),
    ]
    row = summarize_row(*records, launches=3)
    assert row.stops == (("precision", 2), ("budget", 1))
    assert row.steady == (("flat", 2), ("drifting", 1))
    assert row.notes == ("a", "b")
    unknown = summarize_row(ok_record(CASE, check=Check(), noise=None))
    assert (unknown.check, unknown.grade) == (Check(passed=None, wrong=None), None)


def test_row_grade_is_the_variation_of_repetitions() -> None:
    """Launches of sigma .6 that agree are stable; quiet ones that differ by a mode are not; two tell nothing."""
    told: list[tuple[tuple[float, ...], Grade, Grade | None]] = [
        ((1.0, 1.02, 0.99), "very noisy", "stable"),
        ((1.0, 1.0, 1.5), "stable", "noisy"),
        ((1.0, 1.1, 0.95), "stable", "fair"),
        ((1.0, 2.0), "stable", None),
        ((1.0,), "very noisy", "very noisy"),
    ]
    for factors, noise, word in told:
        row = summarize_row(
            *(ok_record(CASE, i, factor * 1e-3, grade=noise) for i, factor in enumerate(factors)),
            launches=3,
        )
        assert row.grade == word, factors
        assert (row.scatter is None) == (len(factors) < 3)
    assert summarize_row(ok_record(CASE, n=19)).grade is None
    none = summarize_row(
        *(ok_record(CASE, i, metrics={"time": seconds_metric(None)}, noise=None) for i in (0, 1)),
        launches=2,
    )
    assert (none.scatter, none.grade) == (None, None)


def test_row_uses_last_record_and_notes_oddities() -> None:
    row = summarize_row(failed_record(CASE, 0), ok_record(CASE, 0, 5e-3))
    assert (row.status, row.launches, row.metrics["time"].value) == ("ok", 1, 5e-3)
    assert row.notes == (
        "some launches were measured more than once: the last record of each counts",
    )
    other = msgspec.structs.replace(WORLD, nodes=2)
    assert summarize_row(ok_record(CASE, 0), ok_record(CASE, 1, world=other), launches=2).notes == (
        "launches ran on different worlds",
    )


def test_row_details_and_ranks() -> None:
    records = [ok_record(CASE, i, details={"same": 1, "ops_per_sample": 10 + i}) for i in range(2)]
    assert common_details(summarize_row(*records, launches=2)) == {
        "same": 1,
        "ops_per_sample": [10, 11],
    }
    told = [
        (collective_case(group="pairs"), {"group_size": 2}),
        (collective_case(group="world"), {}),
        (CASE, {"group_size": 2}),
    ]
    assert [
        num_ranks(summarize_row(ok_record(case, details=details))) for case, details in told
    ] == [2, 4, 4]


def test_missing_records_are_counted_by_case() -> None:
    other = collective_case("broadcast")
    summary = summarize(
        make_run(make_plan([CASE, other], launches=3), [ok_record(CASE, 0), ok_record(CASE, 1)])
    )
    assert [(one.case.id, one.launches, one.planned) for one in summary.missing] == [
        (CASE.id, 1, 3),
        (other.id, 3, 3),
    ]
    assert (summary.tally.missing, summary.tally.planned, summary.tally.code) == (4, 6, 4)
    empty = summarize(make_run(make_plan([CASE], launches=2), [])).tally
    assert (dict(empty.counts), empty.missing, empty.code) == ({}, 2, 4)


def test_skipped_case_is_counted_once() -> None:
    skipped = Skipped(case=collective_case(size_bytes=1001), reason="does not divide")
    run = make_run(
        make_plan([CASE], skipped=[skipped]),
        [ok_record(CASE), failed_record(skipped.case, 0, "skipped")],
    )
    summary = summarize(run)
    assert [row.case.id for row in summary.rows] == [CASE.id]
    assert summary.skipped == (skipped,)
    assert (summary.tally.skipped, summary.tally.code) == (1, 0)


def test_tally_counts_statuses_and_truncated_records(tmp_path: Path) -> None:
    found = summarize(fixtures.sample_run()).tally
    assert dict(found.counts) == {"ok": 53, "failed": 1, "hang": 1, "wrong": 1}
    assert found.code == 1
    path = write_run(tmp_path, run_from_records(ok_record(CASE, 0), ok_record(CASE, 1), launches=2))
    file = path / "records.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    assert summarize(load_run(path)).tally.missing == 1


def test_exit_code_is_that_of_the_worst_status() -> None:
    told: list[tuple[tuple[Status, ...], int, int]] = [
        ((), 0, 0),
        (("ok", "skipped"), 0, 0),
        (("ok",), 1, 4),
        (("ok", "failed"), 0, 4),
        (("hang",), 0, 4),
        (("hang", "wrong"), 2, 1),
    ]
    for statuses, missing, code in told:
        assert exit_code(statuses, missing=missing) == code, statuses
    assert exit_code(("ok",), answered=False) == 4


def test_cut_run_needs_two_repetitions_per_case() -> None:
    other = collective_case(size_bytes=2048)
    cut = [failed_record(CASE, launch, "skipped", LEFT_OUT) for launch in range(3)]
    unable = failed_record(CASE, 0, "skipped", "no float8")
    for records, launches, code in (
        ([ok_record(CASE, 0), *cut[1:]], 3, 4),
        ([ok_record(CASE, 0), ok_record(CASE, 1), cut[2]], 3, 0),
        ([ok_record(CASE, 0)], 1, 0),
        ([ok_record(other, 0), cut[0]], 1, 4),
        ([ok_record(other, 0), unable], 1, 0),
        ([unable], 1, 4),
    ):
        assert summarize(run_from_records(*records, launches=launches)).tally.code == code, records


def late_in(folder: Path, *told: tuple[Record, bytes | None]) -> tuple[Late, ...]:
    path = write_run(
        folder,
        run_from_records(
            *(record for record, _ in told), launches=1 + max(one.launch for one, _ in told)
        ),
    )
    for record, content in told:
        if content is not None:
            (path / "samples" / f"{record.case.id}-{record.launch}.npz").write_bytes(content)
    run = load_run(path)
    return late_rows(run, summarize(run).rows)


def test_lateness_is_a_median_since_first_arrival(tmp_path: Path) -> None:
    for arrivals, expected in (
        ([[0, 100, 2000], [3000, 100, 0]], {0: 0.0, 1: 0.0}),
        ([[0, 100, 0], [3000, 900, 7000]], {0: 0.0, 1: 3e-6}),
    ):
        (one,) = late_in(tmp_path, (late_record(), samples(arrivals)))
        assert one.seconds_by_rank == pytest.approx(expected)
    told = [
        (late_record(launch=i), samples([[0], [microseconds * 1000]]))
        for i, microseconds in enumerate((1, 2, 9))
    ]
    (one,) = late_in(tmp_path, *told)
    assert one.seconds_by_rank == pytest.approx({0: 0.0, 1: 2e-6})
    (one,) = late_in(tmp_path, (late_record(), samples([[5000], [0]], ranks=(2, 6))))
    assert one.seconds_by_rank == pytest.approx({2: 5e-6, 6: 0.0})
