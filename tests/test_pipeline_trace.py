"""Pipelines as trace events: what ran, why ranks idled, what was predicted, and when nothing may be drawn."""

from typing import Any

import msgspec
import pytest
from reports_fixtures import make_plan, make_run, ok, pipeline_details, pipeline_record, pp, step_metrics

from bench.records import Record
from reports.parallel.pipeline import Pipeline, pipelines
from reports.parallel.pipeline_trace import pipeline_clock, pipeline_events, why_not
from reports.summary import summarize


def read(record: Record) -> Pipeline:
    (found,) = pipelines(summarize(make_run(make_plan([record.case]), [record])).rows)
    return found


def test_processes_begin_where_asked_and_bear_the_prefix() -> None:
    events = list(pipeline_events(read(pipeline_record(ranks=2)), 10, "mine: "))
    told = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert told == {
        10: "mine: rank 0",
        11: "mine: rank 1",
        12: "mine: rank 0 (predicted)",
        13: "mine: rank 1 (predicted)",
    }


def test_every_action_is_there_once_and_idle_time_beside_it() -> None:
    details = pipeline_details("gpipe", ranks=2, microbatches=4)
    events = [one for one in pipeline_events(read(pipeline_record("gpipe")), 0) if one["ph"] == "X"]
    actions = [(one["name"], one["ts"], one["ts"] + one["dur"]) for one in events if one["tid"] == 1 and one["pid"] < 2]
    assert sorted(actions) == sorted(tuple(one) for actions in details["measured"] for one in actions)
    idle = sum(one["dur"] for one in events if one["tid"] == 2)
    assert idle == sum(stop - start for _, start, stop, _ in details["idle"])


def test_the_clock_is_told_with_its_uncertainty_and_launch() -> None:
    one = read(pipeline_record(clock="ping-pong", clock_uncertainty_seconds=3e-6))
    assert pipeline_clock(one) == {"method": "ping-pong", "uncertainty_seconds": 3e-6, "launch": 1}


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({}, ""),
        ({"measured": None}, "no measured timeline"),
        ({"clock": None}, "names no clock"),
        ({"clock": ""}, "names"),
    ],
)
def test_what_cannot_be_drawn_says_why(more: dict[str, Any], reason: str) -> None:
    told = why_not(read(pipeline_record(**more)))
    assert bool(told) == bool(reason)
    assert reason in told


def test_a_functional_step_gives_its_own_reason() -> None:
    facts = {"pipeline": pipeline_details(measured=None)}
    record = ok(pp(), metrics=step_metrics(1.0), details=facts, notes=["functional only: few cores"])
    assert why_not(read(msgspec.structs.replace(record))).endswith("timeline: functional only: few cores")
