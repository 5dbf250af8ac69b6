from pathlib import Path

import msgspec
import pytest
from reports_fixtures import (
    WORLD,
    bad,
    collective,
    collective_metrics,
    hang,
    make_plan,
    make_run,
    ok,
    sample_run,
    seconds_metric,
    step,
    write_run,
)

from bench.messages import LEFT_OUT
from bench.plan import Skipped
from bench.records import Check, Record, Status
from bench.runs import Run, load_run
from reports.summary import Row, common_details, exit_code, num_ranks, summarize, verdict

CASE = collective()


def run_of(*records: Record, launches: int = 1) -> Run:
    return make_run(make_plan([CASE], launches=launches), records)


def row_of(*records: Record, launches: int = 1) -> Row:
    (row,) = summarize(run_of(*records, launches=launches)).rows
    return row


def test_rows_stand_in_the_plans_order_and_strangers_last() -> None:
    first, second, stranger = collective(size_bytes=2048), collective(), collective("broadcast")
    run = make_run(make_plan([first, second]), [ok(stranger), ok(second), ok(first)])
    assert [row.case.id for row in summarize(run).rows] == [first.id, second.id, stranger.id]


def test_launches_are_merged_into_one_row() -> None:
    row = row_of(ok(CASE, 0, 1e-3), ok(CASE, 1, 4e-3), launches=2)
    assert row.metrics["time"].value == pytest.approx(2e-3)
    assert row.metrics["time"].method == "geometric mean of 2 launch medians, t interval"
    assert (row.launches, row.planned, row.iterations) == (2, 2, 240)
    assert (row.status, row.world, row.kind, row.is_communication) == ("ok", WORLD, "collective", True)


@pytest.mark.parametrize(
    ("statuses", "worst"),
    [
        (("ok", "ok"), "ok"),
        (("ok", "skipped"), "skipped"),
        (("failed", "skipped"), "failed"),
        (("failed", "hang"), "hang"),
        (("wrong", "hang"), "wrong"),
        (("ok", "wrong"), "wrong"),
    ],
)
def test_the_worst_launch_decides_whichever_came_first(statuses: tuple[Status, Status], worst: Status) -> None:
    for order in (statuses, statuses[::-1]):
        records = [ok(CASE, i) if status == "ok" else bad(CASE, i, status) for i, status in enumerate(order)]
        assert row_of(*records, launches=2).status == worst


def test_a_launch_that_had_no_time_for_a_case_does_not_unmake_what_others_measured() -> None:
    row = row_of(ok(CASE, 0), bad(CASE, 1, "skipped", LEFT_OUT), launches=2)
    assert (row.status, row.launches, row.planned, row.notes) == ("ok", 1, 2, ())
    assert row_of(bad(CASE, 0, "skipped", LEFT_OUT)).status == "skipped"


def test_a_wrong_result_has_no_time_even_where_other_launches_were_right() -> None:
    wrong = bad(CASE, 1, "wrong", "2 elements differ", check=Check(passed=False, wrong=2))
    row = row_of(ok(CASE, 0), wrong, launches=2)
    assert row.metrics == {}
    assert row.check == Check(passed=False, wrong=2)


def test_metrics_of_failed_launches_do_not_count() -> None:
    broken = bad(CASE, 1, metrics=collective_metrics(CASE, 9.0))
    row = row_of(ok(CASE, 0, 1e-3), broken, launches=2)
    assert row.metrics["time"].value == 1e-3
    assert (row.launches, row.iterations) == (1, 120)


def test_reasons_are_said_once_and_the_follow_up_is_no_reason() -> None:
    records = [
        bad(CASE, 0, "failed", "it broke"),
        bad(CASE, 1, "hang", "it hung"),
        bad(CASE, 2, "failed", "it broke"),
        bad(CASE, 3, "skipped", "not tried again"),
    ]
    assert row_of(*records, launches=4).reasons == ("it hung", "it broke")
    assert row_of(bad(CASE, 0, "skipped", "no float8")).reasons == ("no float8",)


def test_more_launches_than_planned_are_never_more_than_all() -> None:
    row = row_of(ok(CASE, 0), ok(CASE, 1), ok(CASE, 2), launches=1)
    assert (row.launches, row.planned) == (3, 3)


def test_stops_steadiness_noise_and_notes_are_gathered() -> None:
    records = [
        ok(CASE, 0, stop="budget", grade="quiet", steady="drifting", notes=["a"]),
        ok(CASE, 1, stop="precision", grade="wild", notes=["a", "b"]),
        ok(CASE, 2, stop="precision", grade="fair"),
    ]
    row = row_of(*records, launches=3)
    assert row.stops == (("precision", 2), ("budget", 1))
    assert row.steady == (("flat", 2), ("drifting", 1))
    assert row.grade == "wild"
    assert row.notes == ("a", "b")


def test_what_was_never_checked_is_unknown() -> None:
    assert row_of(ok(CASE, check=Check())).check == Check(passed=None, wrong=None)
    assert row_of(ok(CASE, noise=None)).grade is None


def test_the_last_record_of_a_launch_counts_and_the_row_says_so() -> None:
    row = row_of(bad(CASE, 0), ok(CASE, 0, 5e-3))
    assert (row.status, row.launches, row.metrics["time"].value) == ("ok", 1, 5e-3)
    assert row.notes == ("some launches were measured more than once: the last record of each counts",)


def test_different_worlds_are_confessed() -> None:
    other = msgspec.structs.replace(WORLD, nodes=2)
    assert row_of(ok(CASE, 0), ok(CASE, 1, world=other), launches=2).notes == ("launches ran on different worlds",)


def test_the_headline_is_the_duration_that_the_row_has() -> None:
    assert row_of(ok(CASE)).headline == "time"
    steps = [step("ddp"), step("mine")]
    run = make_run(make_plan(steps), [ok(steps[0]), ok(steps[1], metrics={"time": seconds_metric(1.0)})])
    assert [row.headline for row in summarize(run).rows] == ["step_time", "time"]
    assert not any(row.is_communication for row in summarize(run).rows)


def test_other_metrics_are_carried() -> None:
    metrics = {"skew": seconds_metric(0.0), "bytes_sent.dp": seconds_metric(2.0)}
    assert list(row_of(ok(CASE, metrics=metrics)).metrics) == ["skew", "bytes_sent.dp"]


def test_details_that_differ_are_listed_by_launch() -> None:
    records = [ok(CASE, i, details={"same": 1, "ops_per_sample": 10 + i}) for i in range(2)]
    assert common_details(row_of(*records, launches=2)) == {"same": 1, "ops_per_sample": [10, 11]}


def test_the_ranks_are_the_groups_and_those_of_the_world_where_that_is_the_group() -> None:
    pair, whole, none = collective(group="pairs"), collective(group="world"), collective()
    records = [ok(pair, details={"group_size": 2}), ok(whole), ok(none, details={"group_size": 2})]
    rows = summarize(make_run(make_plan([pair, whole, none]), records)).rows
    assert [num_ranks(row) for row in rows] == [2, 4, 4]


def test_missing_records_are_counted_by_case() -> None:
    other = collective("broadcast")
    run = make_run(make_plan([CASE, other], launches=3), [ok(CASE, 0), ok(CASE, 1)])
    summary = summarize(run)
    assert [(one.case.id, one.launches, one.planned) for one in summary.missing] == [(CASE.id, 1, 3), (other.id, 3, 3)]
    assert (summary.verdict.missing, summary.verdict.planned, summary.verdict.code) == (4, 6, 4)
    assert not summary.verdict.fine


def test_what_the_plan_skipped_is_not_bad_and_not_told_twice() -> None:
    skipped = Skipped(case=collective(size_bytes=1001), reason="does not divide")
    run = make_run(make_plan([CASE], skipped=[skipped]), [ok(CASE), bad(skipped.case, 0, "skipped")])
    summary = summarize(run)
    assert [row.case.id for row in summary.rows] == [CASE.id]
    assert summary.skipped == (skipped,)
    assert (summary.verdict.skipped, summary.verdict.code, summary.verdict.fine) == (1, 0, True)


def test_the_verdict_counts_rows_by_status() -> None:
    found = verdict(sample_run())
    assert dict(found.counts) == {"ok": 53, "failed": 1, "hang": 1, "wrong": 1}
    assert found.code == 1


def test_a_run_without_records_did_not_run() -> None:
    found = verdict(run_of(launches=2))
    assert (dict(found.counts), found.missing, found.code) == ({}, 2, 4)


def test_a_line_cut_short_is_a_missing_record(tmp_path: Path) -> None:
    path = write_run(tmp_path, run_of(ok(CASE, 0), ok(CASE, 1), launches=2))
    file = path / "records.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    assert verdict(load_run(path)).missing == 1


@pytest.mark.parametrize(
    ("statuses", "missing", "code"),
    [
        ((), 0, 0),
        (("ok", "skipped"), 0, 0),
        (("ok",), 1, 4),
        (("ok", "failed"), 0, 4),
        (("hang",), 0, 4),
        (("hang", "wrong"), 2, 1),
    ],
)
def test_exit_code(statuses: tuple[Status, ...], missing: int, code: int) -> None:
    assert exit_code(statuses, missing=missing) == code


def test_a_hang_keeps_its_ranks() -> None:
    row = row_of(hang(CASE))
    assert [rank.state for rank in row.records[0].ranks] == ["waiting in all_reduce", "did not arrive"]
    assert row.measured == ()


def test_a_metric_that_is_missing_or_unknown_has_no_value() -> None:
    row = row_of(ok(collective(), seconds=0.25, metrics={"time": seconds_metric(0.25), "busbw": seconds_metric(None)}))
    assert (row.value("time"), row.value("busbw"), row.value("algbw")) == (0.25, None, None)
