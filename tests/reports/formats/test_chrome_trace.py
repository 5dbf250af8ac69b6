"""Pipelines and steps as Chrome's trace events: what viewers need, no overlap, refused where clocks are unknown."""

import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import reports_fixtures as fixtures
from refusals import refusal as refused
from report_rows import run_of
from reports_fixtures import bad, collective, ok, pipeline_details, pipeline_metrics, pipeline_record, pp, step
from traced import rank_timeline, run_with, timeline, traced_record

from parbench.bench.results.records import Interval, RankTimeline, Record, Timeline
from parbench.bench.text import UserError
from parbench.reports.analysis.steps import NO_CLOCK
from parbench.reports.formats.chrome_trace import (
    Event,
    for_analysis,
    render_for_analysis,
    render_trace,
    render_traces,
    step_events,
)


def trace_of(*records: Record) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(render_trace(run_of(*records)))
    return found


def events_of(*records: Record) -> list[Event]:
    events: list[Event] = trace_of(*records)["traceEvents"]
    return events


def complete(events: Iterable[Event]) -> list[Event]:
    return [event for event in events if event["ph"] == "X"]


def names(events: Iterable[Event], what: str) -> dict[tuple[int, Any], str]:
    return {(one["pid"], one.get("tid")): one["args"]["name"] for one in events if one["name"] == what}


def threads_without_overlap(events: Iterable[Event]) -> dict[tuple[int, int], list[Event]]:
    threads: dict[tuple[int, int], list[Event]] = {}
    for event in complete(events):
        assert event["dur"] == round(event["dur"], 3) >= 0
        threads.setdefault((event["pid"], event["tid"]), []).append(event)
    for told in threads.values():
        for before, after in pairwise(told):
            assert round(before["ts"] + before["dur"], 3) <= after["ts"]
    return threads


def assert_named_before_told(events: Iterable[Event]) -> None:
    named: set[tuple[int, Any]] = set()
    for event in events:
        if event["ph"] == "M":
            named.add((event["pid"], event.get("tid")))
        else:
            assert {(event["pid"], None), (event["pid"], event["tid"])} <= named


def refusal(*records: Record, launches: int = 1) -> str:
    told = refused(render_trace, run_of(*records, launches=launches))
    assert "\n" not in told
    return told


TINY: dict[str, Any] = {
    "measured": [[["0F0", 0, 1500], ["0B0", 5000, 8000]], [["1F0", 2000, 3000], ["1B0", 3000, 5000]]],
    "predicted": [[["0F0", 0, 1000], ["0B0", 4000, 6000]], [["1F0", 1000, 2000], ["1B0", 2000, 4000]]],
    "idle": [[0, 1500, 5000, "schedule"], [1, 0, 2000, "p2p"], [1, 5000, 8000, "rest"]],
}


def test_an_action_is_a_complete_event_in_us_with_its_parts() -> None:
    events = complete(events_of(pipeline_record(**TINY)))
    told = {"ph": "X", "name": "0F0", "cat": "F", "pid": 0, "tid": 1, "ts": 0, "dur": 1500}
    assert events[0] == {**told, "args": {"stage": 0, "kind": "F", "microbatch": 0}}
    told = {"ph": "X", "name": "p2p", "cat": "idle", "pid": 1, "tid": 2, "ts": 0, "dur": 2000}
    assert events[5] == {**told, "args": {"cause": "p2p"}}


def test_every_action_and_idle_time_is_there_once_and_nothing_overlaps() -> None:
    for schedule in ("gpipe", "1f1b", "zb"):
        details = pipeline_details(schedule, ranks=4, microbatches=8)
        every = events_of(pipeline_record(schedule, ranks=4, microbatches=8))
        expected = [
            *((rank, 1, *one) for rank, actions in enumerate(details["measured"]) for one in actions),
            *((4 + rank, 1, *one) for rank, actions in enumerate(details["predicted"]) for one in actions),
            *((rank, 2, cause, start, stop) for rank, start, stop, cause in details["idle"]),
        ]
        told = [(one["pid"], one["tid"], one["name"], one["ts"], one["ts"] + one["dur"]) for one in complete(every)]
        assert sorted(told) == sorted(expected)
        assert all(isinstance(one["ts"], int) for one in complete(every))
        assert len(threads_without_overlap(every)) == 3 * 4
    assert_named_before_told(events_of(pipeline_record(), pipeline_record("gpipe")))


def test_cases_share_a_file_with_their_clocks_and_no_process_and_one_without_a_timeline_is_left_out_by_name() -> None:
    timed = pipeline_record("1f1b", clock="ping-pong with rank 0", clock_uncertainty_seconds=2e-6)
    trace = trace_of(timed, pipeline_record("gpipe", ranks=3), ok(step()), ok(collective()))
    expected = [("1f1b", rank, more) for more in ("", " (predicted)") for rank in range(2)]
    expected += [("gpipe", rank, more) for more in ("", " (predicted)") for rank in range(3)]
    told = {(pid, None): f"{label}: rank {rank}{more}" for pid, (label, rank, more) in enumerate(expected)}
    assert names(trace["traceEvents"], "process_name") == told
    assert list(trace["otherData"]["clocks"]) == ["1f1b", "gpipe"]
    trace = trace_of(timed, pipeline_record("gpipe", measured=None))
    clock = {"method": "ping-pong with rank 0", "uncertainty_seconds": 2e-6, "launch": 1}
    left_out = {"gpipe": "the record has no measured timeline"}
    about = {"run": "run-1", "parbench": "0.1.0", "clocks": {"1f1b": clock}, "left_out": left_out}
    assert (trace["displayTimeUnit"], trace["otherData"]) == ("ms", about)
    assert names(trace["traceEvents"], "process_name")[0, None] == "rank 0"


def test_what_has_no_timeline_that_can_be_trusted_is_refused_with_the_reason() -> None:
    for clock in (None, ""):
        assert refusal(pipeline_record(clock=clock)) == (
            "runs/run-1 holds no timeline to export: 1f1b: the record names no clock that its ranks share, and ranks "
            "on different clocks must not be merged"
        )
    details = {"pipeline": pipeline_details(measured=None)}
    functional = ok(pp(), metrics=fixtures.step_metrics(1.0), details=details, notes=["functional only: few cores"])
    assert refusal(functional).endswith(": 1f1b: the record has no measured timeline: functional only: few cores")
    overlapping = pipeline_record(measured=[[["0F0", 0, 10], ["0F1", 9, 20]], []])
    assert "0F1 on rank 0 begins at 9 us, before 0F0 ends at 10 us" in refusal(overlapping)
    nothing = "no timeline to export: no case with a valid measurement left one, as training steps do"
    for records in ((), (ok(step()),), (ok(collective()),), (bad(pp()),)):
        assert refusal(*records).endswith(nothing)
    whole = ok(pp(), 0, metrics=pipeline_metrics(), details={"pipeline": pipeline_details()})
    assert refusal(whole, bad(pp(), 1, "wrong", "gradients differ"), launches=2).endswith(nothing)


def step_trace(one: Timeline | None = None, first: int = 0, prefix: str = "") -> list[Event]:
    return list(step_events(one or timeline(), first, prefix))


def of(*intervals: Interval) -> Timeline:
    rank = RankTimeline(rank=0, start_us=0.0, stop_us=1000.0, intervals=intervals)
    return Timeline(clock="c", uncertainty_seconds=0.0, ranks=(rank,))


def test_a_steps_ranks_are_processes_and_its_streams_threads_without_overlap() -> None:
    every = step_trace(first=4, prefix="ddp: ")
    assert names(every, "process_name") == {(4, None): "ddp: rank 0", (5, None): "ddp: rank 1"}
    threads = {name for (pid, _), name in names(every, "thread_name").items() if pid == 4}
    assert threads == {"phases", "compute", "copies", "comm dp (1 of 2)", "comm dp (2 of 2)"}
    assert len(threads_without_overlap(every)) == 2 * 5
    assert_named_before_told(every)
    threads_without_overlap(step_trace(of(*(Interval("compute", "x", i / 1.5, (i + 1) / 1.5) for i in range(3000)))))
    many = step_trace(of(*(Interval(f"comm axis{i % 3}", "x", float(i), i + 2.5) for i in range(30))))
    for told in threads_without_overlap(many).values():
        assert len({event["args"]["axis"] for event in told}) == 1
    assert len(complete(many)) == 30


def test_a_streams_events_add_up_to_the_rows_numbers() -> None:
    every, metrics = complete(step_trace()), traced_record().metrics
    for pid, tid, metric in ((0, 2, "compute"), (1, 2, "compute"), (0, 3, "exposed_copy"), (1, 3, "exposed_copy")):
        told = [event["dur"] for event in every if (event["pid"], event["tid"]) == (pid, tid)]
        assert sum(told) == pytest.approx((metrics[metric].value or 0) * 1e6)

    def microseconds(told: Iterable[Event]) -> set[int]:
        return {us for one in told for us in range(round(one["ts"]), round(one["ts"] + one["dur"]))}

    covered = microseconds(event for event in every if event["pid"] == 0 and "axis" in event["args"])
    hidden = microseconds(event for event in every if event["pid"] == 0 and event["cat"] == "kernel")
    assert len(covered - hidden) == pytest.approx((metrics["exposed_comm.dp"].value or 0) * 1e6, abs=1)


def test_phases_and_kernels_are_named_in_the_fields_terms() -> None:
    told = [event for event in complete(step_trace()) if event["pid"] == 1 and event["tid"] == 1]
    phases = [("forward", 100.0, 3000.0), ("backward", 3100.0, 5500.0), ("update", 8600.0, 1500.0)]
    assert [(one["name"], one["ts"], one["dur"]) for one in told] == phases
    assert all(one["cat"] == "user_annotation" and one["args"] == {} for one in told)
    document = for_analysis(rank_timeline(3))
    assert document["distributedInfo"] == {"rank": 3}
    every = complete(document["traceEvents"])
    kernels = {("kernel", "compute"), ("kernel", "ncclDevKernel_all_reduce"), ("gpu_memcpy", "Memcpy copy")}
    hosts = {("user_annotation", phase) for phase, _, _ in phases}
    assert {(one["cat"], one["name"]) for one in every} == kernels | hosts
    assert len({one["args"]["stream"] for one in every if "stream" in one["args"]}) == 4


def test_steps_and_pipelines_share_a_document_and_no_process_or_have_one_each(tmp_path: Path) -> None:
    record = traced_record()
    run = run_with(tmp_path, [(record, timeline(3)), (pipeline_record(), None)])
    trace = json.loads(render_trace(run))
    told = [f"1f1b: rank {rank}{more}" for more in ("", " (predicted)") for rank in range(2)]
    told += [f"step.ddp: rank {rank}" for rank in range(3)]
    assert names(trace["traceEvents"], "process_name") == {(pid, None): name for pid, name in enumerate(told)}
    clock = {"method": "one host, one monotonic clock", "uncertainty_seconds": 2e-6, "launch": 1}
    assert trace["otherData"]["clocks"]["step.ddp"] == clock
    files = render_traces(run)
    assert set(files) == {f"{record.case.id}.json", f"{pipeline_record().case.id}.json"}
    events = json.loads(files[f"{record.case.id}.json"])["traceEvents"]
    assert names(events, "process_name") == {(rank, None): f"rank {rank}" for rank in range(3)}
    files = render_for_analysis(run)
    assert list(files) == [f"{record.case.id}/rank-{rank}.json" for rank in range(3)]
    assert json.loads(files[f"{record.case.id}/rank-1.json"])["distributedInfo"] == {"rank": 1}


def test_a_step_on_unknown_clocks_is_left_out_with_the_reason(tmp_path: Path) -> None:
    run = run_with(tmp_path, [(traced_record(), timeline(clock="")), (pipeline_record(), None)])
    assert json.loads(render_trace(run))["otherData"]["left_out"] == {"step.ddp": NO_CLOCK}
    alone = run_with(tmp_path, [(traced_record(), timeline(clock=""))])
    with pytest.raises(UserError, match="ddp: the trace names no clock"):
        render_trace(alone)
    with pytest.raises(UserError, match="holds no traced step to export"):
        render_for_analysis(alone)
