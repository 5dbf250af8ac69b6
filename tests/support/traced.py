"""Timelines of training steps for the tests of reports/: two ranks, their streams, and metrics that agree with them."""

from collections.abc import Sequence
from pathlib import Path

from parbench.bench.plan.cases import Case
from parbench.bench.results.records import Interval, RankTimeline, Record, Timeline, encode_timeline
from parbench.bench.results.runs import Run, load_run, trace_name
from tests.support.reports_fixtures import (
    counted_metric,
    make_plan,
    make_run,
    ok_record,
    step_case,
    step_metrics,
    write_run,
)

CLOCK = "one host, one monotonic clock"


def make_rank_timeline(rank: int = 0, late_us: float = 0.0, *, axis: str = "dp") -> RankTimeline:
    """Return 10 ms of a step: 6 ms of arithmetic, and two messages that overlap each other, 3 ms of them exposed."""
    told = [
        ("phase", "forward", 0.0, 3000.0),
        ("phase", "backward", 3000.0, 8500.0),
        ("phase", "update", 8500.0, 10_000.0),
        ("compute", "compute", 0.0, 3000.0),
        ("compute", "compute", 3000.0, 5000.0),
        ("compute", "compute", 8500.0, 9500.0),
        (f"comm {axis}", "all_reduce", 4000.0, 7000.25),
        (f"comm {axis}", "all_reduce", 5000.0, 8000.0),
        ("copy", "copy", 9500.0, 9750.0),
    ]
    intervals = tuple(
        Interval(stream, name, a + late_us, b + late_us) for stream, name, a, b in told
    )
    return RankTimeline(
        rank=rank, start_us=late_us, stop_us=10_000.0 + late_us, intervals=intervals
    )


def make_timeline(ranks: int = 2, clock: str = CLOCK) -> Timeline:
    """Return a step whose rank r begins r x 100 us late."""
    every = tuple(make_rank_timeline(rank, 100.0 * rank) for rank in range(ranks))
    return Timeline(clock=clock, uncertainty_seconds=2e-6, ranks=every)


def traced_record(case: Case | None = None, launch: int = 0) -> Record:
    """Return the record of such a step: what its metrics say is what its timeline adds up to."""
    shares = {
        "compute": 6e-3,
        "exposed_comm.dp": 3e-3,
        "exposed_copy": 0.25e-3,
        "idle": 0.75e-3,
        "residual": 0.0,
    }
    metrics = step_metrics(10e-3) | {
        name: counted_metric(seconds, "s") for name, seconds in shares.items()
    }
    return ok_record(case or step_case("ddp"), launch, 10e-3, metrics=metrics)


def write_traced_run(folder: Path, traces: Sequence[tuple[Record, Timeline | bytes | None]]) -> Run:
    """Write a run's folder with a trace for each record that has one, and return the run as it is read back."""
    records = [record for record, _ in traces]
    cases = {record.case.id: record.case for record in records}.values()
    path = write_run(
        folder, make_run(make_plan(cases, launches=1 + max(one.launch for one in records)), records)
    )
    for record, trace in traces:
        if trace is not None:
            content = trace if isinstance(trace, bytes) else encode_timeline(trace)
            (path / trace_name(record)).write_bytes(content)
    return load_run(path)
