"""What records tell of pipelines: read as written, refused where they contradict themselves, compared where alike."""

import subprocess
import sys
from typing import Any

import msgspec
import pytest
from reports_fixtures import (
    bad,
    make_plan,
    make_run,
    ok,
    pipeline_details,
    pipeline_metrics,
    pipeline_record,
    pp,
    step,
)

from bench.errors import UserError
from bench.records import Record
from reports.data import as_json
from reports.facts import row_facts
from reports.parallel.pipeline import (
    CAUSES,
    KINDS,
    Idle,
    Pipeline,
    Ran,
    pipelines,
    read_pipeline,
    unreadable,
    without_timelines,
)
from reports.summary import Row, Summary, summarize


def summary_of(*records: Record) -> Summary:
    cases = {record.case.id: record.case for record in records}.values()
    return summarize(make_run(make_plan(cases, launches=1 + max(one.launch for one in records)), records))


def rows_of(*records: Record) -> tuple[Row, ...]:
    return summary_of(*records).rows


def read(*records: Record) -> Pipeline:
    (row,) = rows_of(*records)
    found = read_pipeline(row)
    assert found is not None
    return found


def record_of(**details: Any) -> Record:
    return ok(pp(), metrics=pipeline_metrics(), details={"pipeline": pipeline_details(**details)})


def refusal(**details: Any) -> str:
    with pytest.raises(UserError) as caught:
        read(record_of(**details))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_facts_are_read_as_they_were_written() -> None:
    found = read(record_of(ranks=4, microbatches=8))
    facts = found.facts
    assert (facts.schedule, facts.ranks, facts.microbatches, facts.chunks) == ("1f1b", 4, 8, 1)
    assert facts.stages_by_rank == ((0,), (1,), (2,), (3,))
    assert (facts.clock, facts.clock_uncertainty_seconds) == ("one host, one monotonic clock", 0.0)
    assert facts.comparison is None
    assert found.launch == 0


def test_actions_are_read_by_rank_in_order_of_time() -> None:
    mixed = [[["0B0", 30, 50], ["0F0", 0, 10], ["0F1", 10, 20]], [["1F0", 12, 22]]]
    found = read(record_of(measured=mixed))
    assert found.measured is not None
    assert [ran.name for ran in found.measured[0]] == ["0F0", "0F1", "0B0"]
    assert found.measured[1] == (
        Ran(rank=1, stage=1, kind="F", microbatch=0, start_microseconds=12, stop_microseconds=22),
    )


def test_every_kind_and_two_digit_numbers_are_read() -> None:
    stages = [[0, 12], [1, 11]]
    timeline = [[["12F10", 0, 1], ["12I10", 1, 2], ["12W10", 2, 3], ["0B3", 3, 4]], []]
    found = read(record_of(stages_by_rank=stages, chunks=2, measured=timeline))
    assert found.measured is not None
    ran = found.measured[0]
    assert [(one.stage, one.kind, one.microbatch) for one in ran] == [
        *((12, kind, 10) for kind in ("F", "I", "W")),
        (0, "B", 3),
    ]
    assert [found.chunk_of(one) for one in ran] == [1, 1, 1, 0]
    assert {one.kind for one in ran} == set(KINDS)


def test_idle_times_are_read_by_rank_with_their_cause() -> None:
    idle = [[1, 40, 50, "rest"], [0, 0, 10, "schedule"], [1, 0, 40, "p2p"]]
    found = read(record_of(idle=idle))
    assert found.idle is not None
    assert found.idle[0] == (Idle(rank=0, cause="schedule", start_microseconds=0, stop_microseconds=10),)
    assert [(one.cause, one.start_microseconds) for one in found.idle[1]] == [("p2p", 0), ("rest", 40)]
    assert {one.cause for of in found.idle for one in of} < set(CAUSES)


def test_what_is_absent_is_unknown() -> None:
    found = read(record_of(measured=None, predicted=None, idle=None, clock=None, activation_bytes_by_rank=None))
    assert (found.measured, found.predicted, found.idle, found.facts.clock) == (None, None, None, None)
    few = {"schedule": "gpipe", "ranks": 2, "microbatches": 4, "chunks": 1, "stages_by_rank": [[0], [1]]}
    only = read(ok(pp(), metrics={}, details={"pipeline": few}))
    assert (only.measured, only.facts.activation_bytes_by_rank, only.activation_bytes) == (None, None, None)
    assert read(record_of(measured=[[], []])).measured is None


def test_activations_are_measured_ones_or_else_the_fullest_ranks() -> None:
    assert read(record_of()).activation_bytes == 5 << 20
    metrics = {name: one for name, one in pipeline_metrics().items() if name != "memory.activations"}
    record = ok(pp(), metrics=metrics, details={"pipeline": pipeline_details(activation_bytes_by_rank=[7, 9])})
    assert read(record).activation_bytes == 9


def test_other_steps_and_bad_records_are_no_pipelines() -> None:
    rows = rows_of(ok(step("ddp")), pipeline_record(), bad(pp("gpipe"), details={"pipeline": pipeline_details()}))
    assert [one.row.case.params["schedule"] for one in pipelines(rows)] == ["1f1b"]
    assert unreadable(rows) == ()
    assert pipelines(rows_of(ok(step(), details={"pipeline": "of another kind"}))) == ()


def test_the_first_launch_with_a_timeline_tells_it() -> None:
    without = pipeline_record(launch=0, measured=None, clock="first")
    late = [pipeline_record(launch=i, clock=f"launch {i}") for i in (1, 2)]
    found = read(without, *late)
    assert (found.launch, found.facts.clock) == (1, "launch 1")
    assert read(without).launch == 0


@pytest.mark.parametrize("name", ["F0", "0X1", "0F", "-1F0", "0F0 ", "(0F0;1B0)OVERLAP_F_B"])
def test_a_name_that_is_no_action_is_refused(name: str) -> None:
    assert f"{name!r} on rank 0 is no action: those read 2F0" in refusal(measured=[[[name, 0, 1]], []])


def test_a_stage_on_another_rank_is_refused() -> None:
    assert "3F0 ran on rank 0, which holds stages 0" in refusal(predicted=[[["3F0", 0, 1]], []])


@pytest.mark.parametrize("which", ["measured", "predicted"])
def test_actions_that_overlap_are_refused(which: str) -> None:
    touching = [[["0F0", 0, 10], ["0F1", 10, 20]], []]
    read(record_of(**{which: touching}))
    overlapping = [[["0F0", 0, 10], ["0F1", 9, 20]], []]
    told = refusal(**{which: overlapping})
    assert "0F1 on rank 0 begins at 9 us, before 0F0 ends at 10 us" in told
    assert told.startswith("the pipeline of workload.pp schedule=1f1b microbatches=4 layers=4 is not as it should be: ")


def test_what_ends_before_it_begins_is_refused() -> None:
    assert "0F0 on rank 0 ends at 3 us, before it begins at 5 us" in refusal(measured=[[["0F0", 5, 3]], []])
    assert "rest on rank 1 ends at 3 us, before it begins at 5 us" in refusal(idle=[[1, 5, 3, "rest"]])


def test_idle_times_overlap_no_more_than_actions_do() -> None:
    twice = [[0, 0, 10, "rest"], [0, 5, 15, "p2p"]]
    assert "p2p on rank 0 begins at 5 us, before rest ends at 10 us" in refusal(idle=twice)


@pytest.mark.parametrize(
    ("details", "words"),
    [
        ({"stages_by_rank": [[0]]}, "stages_by_rank(1) != 2"),
        ({"measured": [[]] * 3}, "a timeline has 3 of 2 ranks"),
        ({"idle": [[2, 0, 1, "rest"]]}, "idle time of rank 2 of 2"),
        ({"idle": [[0, 0, 1, "lunch"]]}, "Invalid enum value 'lunch'"),
        ({"microbatches": "four"}, "Expected `int`, got `str`"),
        ({"measured": [[["0F0", 0]], []]}, "Expected `array` of length 3"),
    ],
)
def test_facts_that_contradict_themselves_are_refused(details: dict[str, Any], words: str) -> None:
    usual = pipeline_details()
    record = ok(pp(), metrics=pipeline_metrics(), details={"pipeline": usual | details})
    rows = rows_of(record)
    (told,) = unreadable(rows)
    assert words in told
    assert told.startswith("No pipeline facts: the pipeline of workload.pp ")
    assert pipelines(rows) == ()


# --- names ---


# --- what the page does not embed ---


def test_timelines_are_left_out_of_facts_and_data_and_nothing_else_is() -> None:
    record = msgspec.structs.replace(pipeline_record(), details=pipeline_record().details | {"other": {"measured": 1}})
    run = make_run(make_plan([record.case]), [record])
    thin = without_timelines(summarize(run))
    facts = dict(row_facts(thin.rows[0]))
    assert facts["pipeline.schedule"] == "1f1b"
    assert facts["pipeline.stages_by_rank"] == "0, 1"
    assert facts["other.measured"] == "1"
    assert not [name for name in facts if name in ("pipeline.measured", "pipeline.predicted", "pipeline.idle")]
    assert "0F0" in as_json(run, summarize(run))
    assert "0F0" not in as_json(run, thin)
    assert thin.rows[0].metrics == summarize(run).rows[0].metrics


def test_a_row_without_a_pipeline_stays_the_same() -> None:
    summary = summary_of(ok(step()), pipeline_record())
    thin = without_timelines(summary)
    assert thin.rows[0] is summary.rows[0]
    assert thin.verdict == summary.verdict


# --- schedules side by side ---


def test_it_needs_neither_torch_nor_numpy() -> None:
    code = "import sys, reports.parallel.pipeline; sys.exit(bool({'torch', 'numpy', 'matplotlib'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
