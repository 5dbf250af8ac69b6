"""The report of one run: heading, first screen, order of sections, and footnotes."""

from pathlib import Path

from parbench.bench.results.runs import Run
from parbench.reports.run_data import RunData
from parbench.reports.run_reports import chart_first_screen
from tests.support.reports.report_rows import (
    load_records,
    report_of,
    run_from_records,
)
from tests.support.reports.reports_fixtures import (
    ENVIRONMENT,
    collective_case,
    ok_record,
    step_case,
)
from tests.support.reports.traced import make_timeline, traced_record, write_traced_run


def test_first_screen_has_bandwidth_and_a_traced_step(tmp_path: Path) -> None:
    curve = [ok_record(collective_case(size_bytes=size)) for size in (1024, 1 << 20)]
    traces = [(traced_record(), make_timeline()), (curve[0], None), (curve[1], None)]
    bandwidth, step = chart_first_screen(RunData(write_traced_run(tmp_path, traces)))
    assert bandwidth.name == "bandwidth"
    assert step.title == "Profiled step: ddp"
    [step] = chart_first_screen(RunData(write_traced_run(tmp_path, traces[:1])))
    assert step.is_wide
    assert chart_first_screen(load_records(curve[0])) == []


def footnotes(run: Run) -> str:
    return "\n".join(report_of(run).footnotes)


def test_footnotes_name_the_methods_in_use() -> None:
    records = [ok_record(collective_case(), repetition) for repetition in range(3)]
    notes = footnotes(run_from_records(*records, repetitions=3))
    step_notes = footnotes(run_from_records(ok_record(step_case())))
    for fact in ("nccl-tests", "geometric means over the medians of repetitions"):
        assert fact in notes
        assert fact not in step_notes


def test_heading_names_setup_and_hardware() -> None:
    run = run_from_records(ok_record(step_case()), environment=ENVIRONMENT)
    heading = report_of(run).heading
    for fact in ("preset node", "4 ranks on 1 node", "gloo", "node-a", "Example CPU"):
        assert fact in heading
