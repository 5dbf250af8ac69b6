"""Timelines of profiled steps as they are read from a run."""

import gzip
from pathlib import Path

import pytest

from parbench.bench.results.records import Record, Timeline
from parbench.reports.analysis.timelines import StepTimeline
from parbench.reports.run_data import RunData
from tests.support.reports.reports_fixtures import collective_case, ok_record
from tests.support.reports.traced import make_timeline, traced_record, write_traced_run


def read_traces(
    folder: Path, *traces: tuple[Record, Timeline | bytes | None]
) -> tuple[StepTimeline, ...]:
    return RunData(write_traced_run(folder, traces)).timelines


def test_timeline_is_that_of_the_first_repetition(tmp_path: Path) -> None:
    (step,) = read_traces(
        tmp_path,
        (traced_record(repetition=0), None),
        (traced_record(repetition=1), make_timeline(2)),
        (traced_record(repetition=2), make_timeline(4)),
        (ok_record(collective_case()), None),
    )
    assert step.repetition == 1
    assert step.timeline == make_timeline(2)


@pytest.mark.parametrize(
    ("trace", "reason"),
    [
        (make_timeline(clock=""), "no common clock"),
        (b"no gzip", "is damaged or was not written by parbench"),
        (gzip.compress(b"{}", mtime=0)[:-5], "is damaged or was not written by parbench"),
    ],
)
def test_bad_trace_is_refused_with_a_reason(
    tmp_path: Path, trace: Timeline | bytes, reason: str
) -> None:
    (step,) = read_traces(tmp_path, (traced_record(), trace))
    assert step.timeline is None
    assert reason in step.problem
