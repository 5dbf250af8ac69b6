"""Pipelines as Chrome's trace events: what a viewer needs of each, in order, and refused where clocks are unknown."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from reports_fixtures import (
    bad,
    collective,
    make_plan,
    make_run,
    ok,
    pipeline_details,
    pipeline_metrics,
    pipeline_record,
    pp,
    step,
    step_metrics,
)
from traced import run_with, timeline, traced_record

from bench.errors import UserError
from bench.records import Record
from bench.runs import Run
from reports.chrome_trace import render_for_analysis, render_trace, render_traces
from reports.timelines import NO_CLOCK

Event = dict[str, Any]


def run_of(*records: Record) -> Run:
    return make_run(make_plan({record.case.id: record.case for record in records}.values()), records)


def trace_of(*records: Record) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(render_trace(run_of(*records)))
    return found


def events_of(*records: Record) -> list[Event]:
    events: list[Event] = trace_of(*records)["traceEvents"]
    return events


def complete(events: list[Event]) -> list[Event]:
    return [event for event in events if event["ph"] == "X"]


def names(events: list[Event], what: str) -> dict[tuple[int, int | None], str]:
    return {(one["pid"], one.get("tid")): one["args"]["name"] for one in events if one["name"] == what}


def refusal(*records: Record) -> str:
    with pytest.raises(UserError) as caught:
        render_trace(run_of(*records))
    assert "\n" not in str(caught.value)
    return str(caught.value)


TINY: dict[str, Any] = {
    "measured": [[["0F0", 0, 1500], ["0B0", 5000, 8000]], [["1F0", 2000, 3000], ["1B0", 3000, 5000]]],
    "predicted": [[["0F0", 0, 1000], ["0B0", 4000, 6000]], [["1F0", 1000, 2000], ["1B0", 2000, 4000]]],
    "idle": [[0, 1500, 5000, "schedule"], [1, 0, 2000, "p2p"], [1, 5000, 8000, "rest"]],
}


def test_an_action_is_a_complete_event_in_us_with_its_parts() -> None:
    events = complete(events_of(pipeline_record(**TINY)))
    assert events[0] == {
        "ph": "X",
        "name": "0F0",
        "cat": "F",
        "pid": 0,
        "tid": 1,
        "ts": 0,
        "dur": 1500,
        "args": {"stage": 0, "kind": "F", "microbatch": 0},
    }
    assert {name: value for name, value in events[5].items() if name != "args"} == {
        "ph": "X",
        "name": "p2p",
        "cat": "idle",
        "pid": 1,
        "tid": 2,
        "ts": 0,
        "dur": 2000,
    }
    assert events[5]["args"] == {"cause": "p2p"}


def test_every_action_and_idle_time_is_there_once() -> None:
    details = pipeline_details("zb", ranks=4, microbatches=8)
    events = complete(events_of(pipeline_record("zb", ranks=4, microbatches=8)))
    expected = [
        *((rank, 1, *one) for rank, actions in enumerate(details["measured"]) for one in actions),
        *((4 + rank, 1, *one) for rank, actions in enumerate(details["predicted"]) for one in actions),
        *((rank, 2, cause, start, stop) for rank, start, stop, cause in details["idle"]),
    ]
    told = [(one["pid"], one["tid"], one["name"], one["ts"], one["ts"] + one["dur"]) for one in events]
    assert sorted(told) == sorted(expected)


def test_ranks_are_processes_and_streams_threads() -> None:
    events = events_of(pipeline_record(**TINY))
    assert names(events, "process_name") == {
        (0, None): "rank 0",
        (1, None): "rank 1",
        (2, None): "rank 0 (predicted)",
        (3, None): "rank 1 (predicted)",
    }
    threads = names(events, "thread_name")
    assert {name for (_, tid), name in threads.items() if tid == 1} == {"pipeline"}
    assert {place for place, name in threads.items() if name == "idle causes"} == {(0, 2), (1, 2)}
    order = {one["pid"]: one["args"]["sort_index"] for one in events if one["name"] == "process_sort_index"}
    assert order == {0: 0, 1: 1, 2: 2, 3: 3}


def test_names_come_before_the_events_they_name() -> None:
    named: set[tuple[int, int | None]] = set()
    for event in events_of(pipeline_record(), pipeline_record("gpipe")):
        if event["ph"] == "M":
            named.add((event["pid"], event.get("tid")))
        else:
            assert {(event["pid"], None), (event["pid"], event["tid"])} <= named


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb"])
def test_events_of_a_thread_are_in_order_and_do_not_overlap(schedule: str) -> None:
    events = complete(events_of(pipeline_record(schedule, ranks=4, microbatches=8), pipeline_record("naive")))
    threads: dict[tuple[int, int], list[Event]] = {}
    for event in events:
        assert isinstance(event["ts"], int)
        assert event["dur"] >= 0
        threads.setdefault((event["pid"], event["tid"]), []).append(event)
    assert len(threads) == 3 * (4 + 2)
    for told in threads.values():
        for before, after in pairwise(told):
            assert before["ts"] + before["dur"] <= after["ts"]


def test_the_clock_and_the_run_stand_beside_the_events() -> None:
    trace = trace_of(pipeline_record(clock="ping-pong with rank 0", clock_uncertainty_seconds=2e-6))
    assert trace["displayTimeUnit"] == "ms"
    assert trace["otherData"] == {
        "run": "run-1",
        "parbench": "0.1.0",
        "clocks": {"1f1b": {"method": "ping-pong with rank 0", "uncertainty_seconds": 2e-6, "launch": 1}},
        "left_out": {},
    }


def test_several_cases_share_a_file_and_no_process() -> None:
    trace = trace_of(pipeline_record("1f1b"), pipeline_record("gpipe", ranks=3), ok(step()), ok(collective()))
    processes = names(trace["traceEvents"], "process_name")
    assert list(processes.values()) == [
        *("1f1b: rank 0", "1f1b: rank 1", "1f1b: rank 0 (predicted)", "1f1b: rank 1 (predicted)"),
        *("gpipe: rank 0", "gpipe: rank 1", "gpipe: rank 2"),
        *("gpipe: rank 0 (predicted)", "gpipe: rank 1 (predicted)", "gpipe: rank 2 (predicted)"),
    ]
    assert sorted(pid for pid, _ in processes) == list(range(10))
    assert list(trace["otherData"]["clocks"]) == ["1f1b", "gpipe"]


def test_a_case_without_a_timeline_is_left_out_by_name() -> None:
    trace = trace_of(pipeline_record("1f1b"), pipeline_record("gpipe", measured=None))
    assert trace["otherData"]["left_out"] == {"gpipe": "the record has no measured timeline"}
    assert names(trace["traceEvents"], "process_name")[0, None] == "rank 0"


def test_what_was_not_predicted_or_explained_is_not_there() -> None:
    events = events_of(pipeline_record(predicted=None, idle=None))
    assert set(names(events, "process_name").values()) == {"rank 0", "rank 1"}
    assert {event["tid"] for event in complete(events)} == {1}


@pytest.mark.parametrize("clock", [None, ""])
def test_ranks_on_unknown_clocks_are_not_merged(clock: str | None) -> None:
    told = refusal(pipeline_record(clock=clock))
    assert told == (
        "runs/run-1 holds no timeline to export: 1f1b: the record names no clock that its ranks share, and ranks on "
        "different clocks must not be merged"
    )


def test_a_functional_step_is_refused_with_its_own_reason() -> None:
    facts = pipeline_details(measured=None)
    record = ok(pp(), metrics=step_metrics(1.0), details={"pipeline": facts}, notes=["functional only: few cores"])
    assert refusal(record).endswith(": 1f1b: the record has no measured timeline: functional only: few cores")


def test_timelines_that_contradict_themselves_are_refused_with_the_reason() -> None:
    overlapping = pipeline_record(measured=[[["0F0", 0, 10], ["0F1", 9, 20]], []])
    assert "0F1 on rank 0 begins at 9 us, before 0F0 ends at 10 us" in refusal(overlapping)


@pytest.mark.parametrize("records", [(), (ok(step()),), (ok(collective()),), (bad(pp()),)])
def test_a_run_without_pipelines_is_refused(records: tuple[Record, ...]) -> None:
    assert refusal(*records).endswith(
        "no timeline to export: no case with a valid measurement left one, as training steps do"
    )


def test_a_wrong_step_has_no_timeline() -> None:
    facts = {"pipeline": pipeline_details()}
    records = [ok(pp(), 0, metrics=pipeline_metrics(), details=facts), bad(pp(), 1, "wrong", "gradients differ")]
    run = run_of(*records)
    plan = msgspec.structs.replace(run.info.plan, launches=2)
    run = msgspec.structs.replace(run, info=msgspec.structs.replace(run.info, plan=plan))
    with pytest.raises(UserError, match="no case with a valid measurement"):
        render_trace(run)


def test_it_needs_neither_torch_nor_matplotlib() -> None:
    code = "import sys, reports.chrome_trace; sys.exit(bool({'torch', 'numpy', 'matplotlib'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_steps_and_pipelines_share_a_document_and_no_process(tmp_path: Path) -> None:
    run = run_with(tmp_path, [(traced_record(), timeline(3)), (pipeline_record(), None)])
    trace = json.loads(render_trace(run))
    processes = names(trace["traceEvents"], "process_name")
    assert [processes[pid, None] for pid in range(7)] == [
        *("1f1b: rank 0", "1f1b: rank 1", "1f1b: rank 0 (predicted)", "1f1b: rank 1 (predicted)"),
        *("step.ddp: rank 0", "step.ddp: rank 1", "step.ddp: rank 2"),
    ]
    assert trace["otherData"]["clocks"]["step.ddp"] == {
        "method": "one host, one monotonic clock",
        "uncertainty_seconds": 2e-6,
        "launch": 1,
    }


def test_each_case_has_a_document_of_its_own(tmp_path: Path) -> None:
    record = traced_record()
    run = run_with(tmp_path, [(record, timeline()), (pipeline_record(), None)])
    files = render_traces(run)
    assert set(files) == {f"{record.case.id}.json", f"{pipeline_record().case.id}.json"}
    events = json.loads(files[f"{record.case.id}.json"])["traceEvents"]
    assert names(events, "process_name") == {(0, None): "rank 0", (1, None): "rank 1"}


def test_a_step_on_unknown_clocks_is_left_out_with_the_reason(tmp_path: Path) -> None:
    run = run_with(tmp_path, [(traced_record(), timeline(clock="")), (pipeline_record(), None)])
    assert json.loads(render_trace(run))["otherData"]["left_out"] == {"step.ddp": NO_CLOCK}
    alone = run_with(tmp_path, [(traced_record(), timeline(clock=""))])
    with pytest.raises(UserError, match="ddp: the trace names no clock"):
        render_trace(alone)
    with pytest.raises(UserError, match="holds no traced step to export"):
        render_for_analysis(alone)


def test_for_analysis_there_is_a_file_for_each_rank_of_each_step(tmp_path: Path) -> None:
    record = traced_record()
    files = render_for_analysis(run_with(tmp_path, [(record, timeline()), (pipeline_record(), None)]))
    assert list(files) == [f"{record.case.id}/rank-0.json", f"{record.case.id}/rank-1.json"]
    assert json.loads(files[f"{record.case.id}/rank-1.json"])["distributedInfo"] == {"rank": 1}
