from typing import Any

import msgspec
import pytest
from reports_fixtures import (
    ENVIRONMENT,
    METHOD,
    bad,
    collective,
    comm_call,
    make_plan,
    make_run,
    ok,
    pipeline_record,
    sample_run,
    step,
    training_metrics,
)

from bench.messages import LEFT_OUT
from bench.records import Record, Status
from reports.footnotes import footnotes, heading, verdict_words
from reports.summary import Verdict, summarize


def notes_of(*records: Record, launches: int = 1) -> str:
    run = make_run(make_plan([record.case for record in records], launches=launches), records)
    return "\n".join(footnotes(run, summarize(run)))


def heading_of(environment: dict[str, Any] | None, *records: Record) -> str:
    run = make_run(make_plan([record.case for record in records]), records, environment)
    return heading(run, summarize(run))


def test_the_heading_says_what_was_run_where_and_on_what() -> None:
    assert heading_of(ENVIRONMENT, ok(collective())) == (
        "preset node: 4 ranks on 1 node, gloo, cpu; 1 launch; host node-a; Example CPU; torch 2.13.0; "
        "started 2026-01-02T03:04:05.678Z; measuring took 500 ms"
    )


@pytest.mark.parametrize("environment", [None, {}, {"host": None}, {"host": {"cpu_model": None}}, {"torch": "odd"}])
def test_an_unknown_environment_is_left_out_of_the_heading(environment: dict[str, Any] | None) -> None:
    assert "; host node-a; started" in heading_of(environment, ok(collective()))


def test_without_records_nodes_are_unknown() -> None:
    run = make_run(make_plan([collective()], launches=2), [])
    assert "4 ranks, gloo, cpu; 2 launches;" in heading(run, summarize(run))


def test_the_gpu_is_named() -> None:
    assert "; Example GPU; " in heading_of({"torch": {"gpu": "Example GPU"}}, ok(collective()))


def words(counts: dict[Status, int], code: int, skipped: int = 0, missing: int = 0) -> str:
    return verdict_words(Verdict(counts=counts, skipped=skipped, missing=missing, planned=9, code=code))


def test_the_verdict_in_words() -> None:
    assert words({"ok": 3}, 0) == "fine: 3 ok"
    assert words({"ok": 3, "skipped": 1}, 0, skipped=2) == "fine: 3 ok, 3 skipped"
    assert words({"ok": 3, "hang": 1}, 4) == "something did not run: 3 ok, 1 hang"
    assert words({}, 4, missing=9) == "something did not run: 9 of 9 measurements without a record"
    assert words({"wrong": 1}, 1) == "a result is wrong: 1 wrong"
    assert words({}, 0) == "fine: nothing was planned"


def test_the_convention_is_named_where_there_are_bandwidths() -> None:
    assert "follow nccl-tests" in notes_of(ok(collective()))
    assert "nccl-tests" not in notes_of(ok(step()))


def test_the_intervals_method_is_named_once_without_its_count() -> None:
    text = notes_of(ok(collective()), ok(step(), n=7))
    assert METHOD.startswith("median of 120 iterations")
    assert text.count("Times: median of iterations of one launch, order-statistics interval.") == 1
    assert "[low, high] is a 95 % interval." in text


def test_one_launch_says_what_it_cannot_tell() -> None:
    assert "One launch: intervals say nothing" in notes_of(ok(collective()))
    several = notes_of(ok(collective(), 0), ok(collective(), 1), launches=2)
    assert "One launch:" not in several
    assert "geometric mean of 2 launch medians, t interval" in several


def test_what_cannot_be_claimed_is_said_with_how_many_cases() -> None:
    text = notes_of(ok(collective()), ok(step(), notes=["functional only"]))
    assert "Note (1 of 2 cases): functional only" in text


def test_what_the_whole_run_cannot_claim_is_said_once_even_without_records() -> None:
    plan = msgspec.structs.replace(make_plan([collective()]), notes=("functional only",))
    for records in ([], [ok(collective(), notes=["functional only", "odd"])]):
        run = make_run(plan, records)
        text = "\n".join(footnotes(run, summarize(run)))
        assert text.count("functional only") == 1
        assert "Note (all cases): functional only" in text
    assert "Note (1 of 1 cases): odd" in text


def test_failures_alone_have_no_method() -> None:
    assert notes_of(bad(collective())) == ""


def test_the_sample_names_both_methods() -> None:
    run = sample_run()
    text = "\n".join(footnotes(run, summarize(run)))
    assert "geometric mean of 3 launch medians" in text
    assert "median of iterations of one launch" in text


def test_what_the_budget_left_out_is_counted() -> None:
    cases = [collective(size_bytes=size) for size in (1, 2, 3)]
    records = [ok(case) for case in cases]
    records += [bad(case, launch, "skipped", LEFT_OUT) for case in cases[:2] for launch in (1, 2)]
    records += [ok(cases[2], 1), bad(cases[2], 2, "skipped", LEFT_OUT)]
    run = make_run(make_plan(cases, launches=3), records)
    told = "Left out when the budget of 1 min 30 s was spent: 2 of 3 launches of 2 cases, 1 of 3 launches of 1 case."
    assert told in footnotes(run, summarize(run))


def test_nothing_left_out_is_not_spoken_of() -> None:
    run = make_run(make_plan([collective()]), [ok(collective())])
    assert not any("Left out" in sentence for sentence in footnotes(run, summarize(run)))


def test_a_steps_prediction_and_identity_are_explained_where_there_are_any() -> None:
    plain = notes_of(ok(step()))
    assert "Predicted comm" not in plain
    assert "Where the time went" not in plain
    called = notes_of(ok(step(), details={"comm_calls": [comm_call()]}))
    assert called.count("Predicted comm: each collective of one step") == 1
    assert "Where the time went" not in called
    traced = notes_of(ok(step(), metrics=training_metrics()))
    assert "compute + exposed communication + copy + idle = the wall time of a traced step" in traced


def test_a_pipelines_identity_has_what_lies_outside_it() -> None:
    told = notes_of(pipeline_record())
    assert "copy + idle + outside (a pipeline's, such as the update) = the wall time of a traced step" in told
    assert "outside" not in notes_of(ok(step(), metrics=training_metrics()))
