"""Pipelines and steps as Chrome trace events."""

import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from parbench.bench.results.records import Record
from parbench.reports.formats.chrome_trace import (
    Event,
    make_rank_document,
    render_for_analysis,
    render_trace,
    render_traces,
)
from parbench.reports.run_data import RunData
from tests.support.refusals import usage_error
from tests.support.reports.report_rows import run_from_records
from tests.support.reports.reports_fixtures import (
    collective_case,
    ok_record,
    pipeline_details,
    pipeline_record,
    step_case,
)
from tests.support.reports.traced import (
    make_rank_timeline,
    make_timeline,
    traced_record,
    write_traced_run,
)


def render(*records: Record) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads(render_trace(RunData(run_from_records(*records))))
    return trace


def find_spans(events: Iterable[Event]) -> list[Event]:
    return [event for event in events if event["ph"] == "X"]


def find_names(events: Iterable[Event], kind: str = "process_name") -> list[str]:
    return [event["args"]["name"] for event in events if event["name"] == kind]


def check_threads(events: list[Event], num_threads: int) -> None:
    """Check the number of threads, and that the spans of each do not overlap."""
    threads: dict[tuple[int, int], list[Event]] = {}
    for event in find_spans(events):
        threads.setdefault((event["pid"], event["tid"]), []).append(event)
    assert len(threads) == num_threads
    for spans in threads.values():
        for span, following in pairwise(spans):
            assert round(span["ts"] + span["dur"], 3) <= following["ts"]


def test_trace_has_every_action() -> None:
    details = pipeline_details("zb", ranks=4, microbatches=8)
    events = render(pipeline_record("zb", ranks=4, microbatches=8))["traceEvents"]
    expected: list[tuple[int, str, int, int]] = []
    for rank in range(4):
        expected += [(rank, *action) for action in details["measured"][rank]]
        expected += [(4 + rank, *action) for action in details["predicted"][rank]]
    spans = []
    for span in find_spans(events):
        start = span["ts"]
        spans.append((span["pid"], span["name"], start, start + span["dur"]))
    assert sorted(spans) == sorted(expected)
    check_threads(events, 2 * 4)


def test_cases_have_their_own_processes_and_clocks() -> None:
    precise = pipeline_record(
        "1f1b", clock="ping-pong with rank 0", clock_uncertainty_seconds=2e-6
    )
    untimed = pipeline_record("zb", measured=None)
    trace = render(precise, pipeline_record("gpipe"), untimed, ok_record(collective_case()))
    processes = find_names(trace["traceEvents"])
    assert len(processes) == 2 * 4
    assert processes[0] == "pp schedule=1f1b: rank 0"
    assert processes[-1] == "pp schedule=gpipe: rank 1 (predicted)"
    assert trace["otherData"]["clocks"]["pp schedule=1f1b"]["uncertainty_seconds"] == 2e-6
    assert list(trace["otherData"]["omissions"]) == ["pp schedule=zb"]


@pytest.mark.parametrize(
    ("record", "fact"),
    [(pipeline_record(clock=None), "clock"), (ok_record(step_case()), "no timeline")],
)
def test_trace_without_a_valid_timeline_is_refused(record: Record, fact: str) -> None:
    assert fact in usage_error(render_trace, RunData(run_from_records(record)))


def test_analysis_events_name_kernels_by_kind() -> None:
    """HolisticTraceAnalysis recognizes communication and copies by the names of kernels."""
    document = make_rank_document(make_rank_timeline(3))
    assert document["distributedInfo"] == {"rank": 3}
    spans = find_spans(document["traceEvents"])
    categories = {span["name"]: span["cat"] for span in spans}
    assert categories["forward"] == "user_annotation"
    assert categories["compute"] == "kernel"
    assert categories["ncclDevKernel_all_reduce"] == "kernel"
    assert categories["Memcpy copy"] == "gpu_memcpy"


def test_steps_and_pipelines_share_a_trace(tmp_path: Path) -> None:
    record = traced_record()
    run = write_traced_run(tmp_path, [(record, make_timeline(2)), (pipeline_record(), None)])
    data = RunData(run)
    events = json.loads(render_trace(data))["traceEvents"]
    assert find_names(events)[-2:] == ["step.ddp: rank 0", "step.ddp: rank 1"]
    streams = {"phases", "compute", "copies", "comm dp (1 of 2)", "comm dp (2 of 2)"}
    assert set(find_names(events, "thread_name")) == {"pipeline", *streams}
    check_threads(events, 2 * 2 + 2 * 5)
    files = [f"{record.case.id}.json", f"{pipeline_record().case.id}.json"]
    assert sorted(render_traces(data)) == sorted(files)
    rank_files = [f"{record.case.id}/rank-0.json", f"{record.case.id}/rank-1.json"]
    assert list(render_for_analysis(data)) == rank_files
