"""Pipelines and steps as Chrome trace events: names, no overlap, and refused timelines."""

import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

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
from tests.support.refusals import usage_error as refused
from tests.support.report_rows import run_from_records
from tests.support.reports_fixtures import (
    collective_case,
    failed_record,
    ok_record,
    pipeline_case,
    pipeline_details,
    pipeline_metrics,
    pipeline_record,
    step_case,
)
from tests.support.traced import make_rank_timeline, make_timeline, traced_record, write_traced_run


def trace_of(*records: Record) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads(render_trace(run_from_records(*records)))
    return trace


def complete(events: Iterable[Event]) -> list[Event]:
    return [event for event in events if event["ph"] == "X"]


def process_names(events: Iterable[Event]) -> list[str]:
    """Return the processes' names in the order of pid, which counts from 0."""
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert [*named] == [*range(len(named))]
    return [*named.values()]


def assert_valid(events: list[Event], num_threads: int) -> None:
    """Check that every thread is named before its events, which do not overlap."""
    named: set[tuple[int, int | None]] = set()
    threads: dict[tuple[int, int], list[Event]] = {}
    for event in events:
        if event["ph"] == "M":
            named.add((event["pid"], event.get("tid")))
        else:
            assert {(event["pid"], None), (event["pid"], event["tid"])} <= named
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
    for thread in threads.values():
        for before, after in pairwise(thread):
            assert round(before["ts"] + before["dur"], 3) <= after["ts"]
    assert len(threads) == num_threads


def refusal(*records: Record, launches: int = 1) -> str:
    message = refused(render_trace, run_from_records(*records, launches=launches))
    assert "\n" not in message
    return message


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb"])
def test_trace_has_every_action_and_idle_time_once(schedule: str) -> None:
    details = pipeline_details(schedule, ranks=4, microbatches=8)
    events = trace_of(pipeline_record(schedule, ranks=4, microbatches=8))["traceEvents"]
    measured, predicted = details["measured"], details["predicted"]
    expected = [(rank, 1, *ran) for rank, actions in enumerate(measured) for ran in actions]
    expected += [(4 + rank, 1, *ran) for rank, actions in enumerate(predicted) for ran in actions]
    expected += [(rank, 2, cause, start, stop) for rank, start, stop, cause in details["idle"]]
    found = [(e["pid"], e["tid"], e["name"], e["ts"], e["ts"] + e["dur"]) for e in complete(events)]
    assert sorted(found) == sorted(expected)
    assert_valid(events, 3 * 4)


def test_trace_events_hold_stage_microbatch_or_cause() -> None:
    measured = [[["0F0", 0, 1500], ["0B0", 5000, 8000]], [["1F0", 2000, 3000], ["1B0", 3000, 5000]]]
    record = pipeline_record(measured=measured, predicted=None, idle=[[1, 0, 2000, "p2p"]])
    events = complete(trace_of(record)["traceEvents"])
    action = {"ph": "X", "name": "0F0", "cat": "F", "pid": 0, "tid": 1, "ts": 0, "dur": 1500}
    assert events[0] == {**action, "args": {"stage": 0, "kind": "F", "microbatch": 0}}
    (idle,) = [event for event in events if event["cat"] == "idle"]
    assert (idle["name"], idle["args"], idle["dur"]) == ("p2p", {"cause": "p2p"}, 2000)


def test_trace_of_several_cases_has_processes_and_clocks_for_each() -> None:
    timed = pipeline_record("1f1b", clock="ping-pong with rank 0", clock_uncertainty_seconds=2e-6)
    trace = trace_of(
        timed,
        pipeline_record("gpipe", ranks=3),
        ok_record(step_case()),
        ok_record(collective_case()),
    )
    expected = [f"1f1b: rank {rank}{kind}" for kind in ("", " (predicted)") for rank in range(2)]
    expected += [f"gpipe: rank {rank}{kind}" for kind in ("", " (predicted)") for rank in range(3)]
    assert process_names(trace["traceEvents"]) == expected
    clocks = trace["otherData"]["clocks"]
    assert list(clocks) == ["1f1b", "gpipe"]
    assert clocks["1f1b"]["uncertainty_seconds"] == 2e-6


def test_trace_leaves_out_cases_without_a_timeline() -> None:
    trace = trace_of(pipeline_record("1f1b"), pipeline_record("gpipe", measured=None))
    assert list(trace["otherData"]["left_out"]) == ["gpipe"]
    assert process_names(trace["traceEvents"])[0] == "rank 0"


def test_trace_without_a_common_clock_is_refused() -> None:
    for clock in (None, ""):
        assert "clock" in refusal(pipeline_record(clock=clock))


def test_trace_without_a_valid_timeline_is_refused() -> None:
    assert "1f1b" in refusal(pipeline_record(measured=None))
    overlapping = pipeline_record(measured=[[["0F0", 0, 10], ["0F1", 9, 20]], []])
    assert "0F1 on rank 0" in refusal(overlapping)
    for records in (
        (),
        (ok_record(step_case()),),
        (ok_record(collective_case()),),
        (failed_record(pipeline_case()),),
    ):
        assert "no timeline" in refusal(*records)
    details = {"pipeline": pipeline_details()}
    valid = ok_record(pipeline_case(), 0, metrics=pipeline_metrics(), details=details)
    wrong = failed_record(pipeline_case(), 1, "wrong", "gradients differ")
    assert "no timeline" in refusal(valid, wrong, launches=2)


def steps_of(*intervals: Interval) -> list[Event]:
    rank = RankTimeline(rank=0, start_us=0.0, stop_us=1000.0, intervals=intervals)
    return list(step_events(Timeline(clock="c", uncertainty_seconds=0.0, ranks=(rank,)), 0, ""))


def test_step_events_have_processes_of_ranks_and_threads_of_streams() -> None:
    events = list(step_events(make_timeline(), 0, "ddp: "))
    assert process_names(events) == ["ddp: rank 0", "ddp: rank 1"]
    threads = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads == {"phases", "compute", "copies", "comm dp (1 of 2)", "comm dp (2 of 2)"}
    assert_valid(events, 2 * 5)


def test_step_events_never_overlap_after_rounding() -> None:
    compute = [Interval("compute", "x", i / 1.5, (i + 1) / 1.5) for i in range(3000)]
    assert_valid(steps_of(*compute), 1)
    comm = [Interval(f"comm axis{i % 3}", "x", float(i), i + 2.5) for i in range(30)]
    events = complete(steps_of(*comm))
    assert len(events) == 30
    assert len({(event["tid"], event["args"]["axis"]) for event in events}) == 3


def test_step_events_add_up_to_the_metrics() -> None:
    events, metrics = complete(step_events(make_timeline(), 0, "")), traced_record().metrics
    for pid, tid, metric in ((0, 2, "compute"), (1, 2, "compute"), (0, 3, "exposed_copy")):
        durations = [e["dur"] for e in events if (e["pid"], e["tid"]) == (pid, tid)]
        assert sum(durations) == pytest.approx((metrics[metric].value or 0) * 1e6)


def test_step_events_have_phases_and_kernels() -> None:
    events = complete(step_events(make_timeline(), 0, ""))
    phases = [(e["name"], e["ts"], e["dur"]) for e in events if (e["pid"], e["tid"]) == (1, 1)]
    assert phases == [
        ("forward", 100.0, 3000.0),
        ("backward", 3100.0, 5500.0),
        ("update", 8600.0, 1500.0),
    ]
    document = for_analysis(make_rank_timeline(3))
    assert document["distributedInfo"] == {"rank": 3}
    categories = {(e["cat"], e["name"]) for e in complete(document["traceEvents"])}
    assert categories == {
        *(("user_annotation", name) for name, _, _ in phases),
        *(("kernel", name) for name in ("compute", "ncclDevKernel_all_reduce")),
        ("gpu_memcpy", "Memcpy copy"),
    }


def test_steps_and_pipelines_share_a_trace(tmp_path: Path) -> None:
    run = write_traced_run(
        tmp_path, [(traced_record(), make_timeline(3)), (pipeline_record(), None)]
    )
    trace = json.loads(render_trace(run))
    expected = [f"1f1b: rank {rank}{kind}" for kind in ("", " (predicted)") for rank in range(2)]
    expected += [f"step.ddp: rank {rank}" for rank in range(3)]
    assert process_names(trace["traceEvents"]) == expected
    assert trace["otherData"]["clocks"]["step.ddp"]["uncertainty_seconds"] == 2e-6


def test_each_case_and_rank_has_a_file_of_its_own(tmp_path: Path) -> None:
    record = traced_record()
    run = write_traced_run(tmp_path, [(record, make_timeline(3)), (pipeline_record(), None)])
    files = render_traces(run)
    assert set(files) == {f"{record.case.id}.json", f"{pipeline_record().case.id}.json"}
    events = json.loads(files[f"{record.case.id}.json"])["traceEvents"]
    assert process_names(events) == ["rank 0", "rank 1", "rank 2"]
    names = [f"{record.case.id}/rank-{rank}.json" for rank in range(3)]
    assert list(render_for_analysis(run)) == names


def test_step_without_a_clock_is_left_out_or_refused(tmp_path: Path) -> None:
    unclocked = (traced_record(), make_timeline(clock=""))
    trace = json.loads(
        render_trace(write_traced_run(tmp_path, [unclocked, (pipeline_record(), None)]))
    )
    assert trace["otherData"]["left_out"] == {"step.ddp": NO_CLOCK}
    run = write_traced_run(tmp_path, [unclocked])
    for render in (render_trace, render_for_analysis):
        with pytest.raises(UserError):
            render(run)
