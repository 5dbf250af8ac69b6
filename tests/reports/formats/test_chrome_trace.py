"""Pipelines and steps as Chrome trace events."""

import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from parbench.bench.results.records import Record
from parbench.reports.formats.chrome_trace import (
    Event,
    render_trace,
)
from parbench.reports.run_data import RunData
from tests.support.refusals import usage_error
from tests.support.reports.report_rows import run_from_records
from tests.support.reports.reports_fixtures import (
    collective_case,
    ok_record,
    pipeline_details,
    pipeline_record,
)
from tests.support.reports.traced import (
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
    spans = []
    for span in find_spans(events):
        start = span["ts"]
        spans.append((span["pid"], span["name"], start, start + span["dur"]))
    assert sorted(spans) == sorted(expected)


def test_cases_have_their_own_processes() -> None:
    untimed = pipeline_record("zb", measured=None)
    records = [pipeline_record("1f1b"), pipeline_record("gpipe"), untimed]
    trace = render(*records, ok_record(collective_case()))
    assert find_names(trace["traceEvents"]) == [
        "pp schedule=1f1b: rank 0",
        "pp schedule=1f1b: rank 1",
        "pp schedule=gpipe: rank 0",
        "pp schedule=gpipe: rank 1",
    ]


def test_trace_without_a_common_clock_is_refused() -> None:
    data = RunData(run_from_records(pipeline_record(clock=None)))
    assert "clock" in usage_error(render_trace, data)


def test_steps_and_pipelines_share_a_trace(tmp_path: Path) -> None:
    records = [(traced_record(), make_timeline(2)), (pipeline_record(), None)]
    events = json.loads(render_trace(RunData(write_traced_run(tmp_path, records))))[
        "traceEvents"
    ]
    assert find_names(events)[-2:] == ["step.ddp: rank 0", "step.ddp: rank 1"]
    streams = {"phases", "compute", "copies", "comm dp (1 of 2)", "comm dp (2 of 2)"}
    assert set(find_names(events, "thread_name")) == {"pipeline", *streams}
    check_threads(events, 2 * 1 + 2 * 5)
