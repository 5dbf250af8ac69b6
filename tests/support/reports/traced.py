"""Timelines of training steps of two ranks, and records whose metrics agree with them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parbench.bench.results.records import (
    Interval,
    RankTimeline,
    Record,
    Timeline,
    encode_timeline,
)
from parbench.bench.results.runs import Run, load_run, make_trace_path
from tests.support.reports.reports_fixtures import (
    counted_metrics,
    make_plan,
    make_run,
    ok_record,
    step_case,
    step_metrics,
    write_run,
)


def make_rank_timeline(rank: int = 0, late_us: float = 0.0) -> RankTimeline:
    """Return 10 ms of a step with 6 ms of compute and two messages that overlap each other.

    3 ms of communication are exposed.
    """
    spans: list[tuple[Any, ...]] = [
        ("phase", "forward", 0.0, 3000.0),
        ("phase", "backward", 3000.0, 8500.0),
        ("phase", "update", 8500.0, 10_000.0),
        ("compute", "compute", 0.0, 3000.0),
        ("compute", "compute", 3000.0, 5000.0),
        ("compute", "compute", 8500.0, 9500.0),
        ("comm dp", "all_reduce", 4000.0, 7000.25, 1 << 20),
        ("comm dp", "all_reduce", 5000.0, 8000.0, 4 << 20),
        ("copy", "copy", 9500.0, 9750.0),
    ]
    intervals = [
        Interval(stream, name, start + late_us, stop + late_us, *num_bytes)
        for stream, name, start, stop, *num_bytes in spans
    ]
    return RankTimeline(
        rank=rank,
        start_us=late_us,
        stop_us=10_000.0 + late_us,
        intervals=tuple(intervals),
    )


def make_timeline(ranks: int = 2, clock: str = "one host, one monotonic clock") -> Timeline:
    """Return a step in which each rank begins 100 us after the rank before it."""
    timelines = tuple(make_rank_timeline(rank, 100.0 * rank) for rank in range(ranks))
    return Timeline(clock=clock, uncertainty_seconds=2e-6, ranks=timelines)


def traced_record(repetition: int = 0) -> Record:
    """Return the record of such a step, whose metrics are the sums of its timeline."""
    seconds = {
        "compute": 6e-3,
        "exposed_comm.dp": 3e-3,
        "exposed_copy": 0.25e-3,
        "idle": 0.75e-3,
    }
    metrics = step_metrics(10e-3) | counted_metrics("s", seconds)
    return ok_record(step_case("ddp"), repetition, 10e-3, metrics=metrics)


def write_traced_run(
    folder: Path, traces: Sequence[tuple[Record, Timeline | bytes | None]]
) -> Run:
    """Write a run's folder with the trace of each record that has one, and read it back."""
    records = [record for record, _ in traces]
    cases = {record.case.id: record.case for record in records}.values()
    repetitions = 1 + max(record.repetition for record in records)
    path = write_run(folder, make_run(make_plan(cases, repetitions=repetitions), records))
    for record, trace in traces:
        if trace is not None:
            content = trace if isinstance(trace, bytes) else encode_timeline(trace)
            (path / make_trace_path(record)).write_bytes(content)
    return load_run(path)
