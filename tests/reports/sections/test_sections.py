"""The whole report as sections: in order, with anchors that differ, words explained, nothing without content."""

from pathlib import Path
from typing import Literal

import msgspec
import pytest

from parbench.bench.files import encode_json
from parbench.bench.results.details import PLAN_FILE, Component, StepCheck, Validation
from parbench.bench.results.records import Arrival
from parbench.bench.results.runs import Run
from parbench.bench.text import write_whole
from parbench.reports.analysis.analysis import Analysis
from parbench.reports.report import Section
from parbench.reports.sections.nodes import arrival_section
from parbench.reports.sections.predictions import predicted_section
from parbench.reports.sections.steps import step_section
from tests.support import reports_fixtures as fixtures
from tests.support.report_rows import (
    analyze_records,
    analyze_run,
    cell_texts,
    column_texts,
    make_sections,
    matrix_case,
    require,
    run_from_records,
)
from tests.support.reports_fixtures import (
    collective_case,
    collective_metrics,
    failed_record,
    ok_record,
    pipeline_record,
    simulated_schedule,
    step_case,
    training_metrics,
)
from tests.support.traced import make_timeline, traced_record, write_traced_run


def test_sections_are_ordered_with_unique_anchors() -> None:
    grouped = [
        ok_record(collective_case(group="pairs", group_index=0)),
        ok_record(collective_case(group="pairs", group_index=0, concurrent=True)),
    ]
    told = make_sections(
        analyze_records(ok_record(step_case()), *grouped, ok_record(collective_case()))
    )
    assert [section.id for section in told] == ["communication", "contrasts", "groups", "steps"]
    assert (
        make_sections(analyze_records(failed_record(collective_case())))
        == make_sections(analyze_records())
        == ()
    )
    matrix = make_sections(
        analyze_records(ok_record(matrix_case(0, 1)), ok_record(matrix_case(1, 0)))
    )
    assert [(section.id, len(section.tables[0].rows)) for section in matrix] == [("pairs", 2)]
    sample = make_sections(analyze_run(fixtures.sample_run()))
    tables = [table for section in sample for table in section.on_page]
    ids = [*(section.id for section in sample), *(table.id for table in tables)]
    assert len(ids) == len(set(ids))
    assert all(column.help for table in tables for column in table.columns)


def test_arrival_section_shows_an_unknown_rank() -> None:
    metrics = collective_metrics(collective_case(), 1e-3) | {"skew": fixtures.seconds_metric(5e-5)}
    told = {"method": "ping-pong", "uncertainty": 2e-6, "late_rank": 3, "share": 0.75}
    arrival = msgspec.convert({**told, "last_out_rank": None, "last_out_share": None}, Arrival)
    found = analyze_records(
        ok_record(collective_case(), metrics=metrics, arrival=arrival),
        ok_record(collective_case("broadcast", 65536, root=1)),
    )
    (table,) = require(arrival_section(found)).tables
    [cells] = [column_texts(table.columns, row) for row in table.rows]
    assert (cells["late rank"], cells["in"], cells["last out"]) == ("3", "75.0 %", "-")
    assert table.notes == ("Clocks: ping-pong, right within 2.00 us.",)


def step_ids(found: Analysis) -> list[str]:
    section = step_section(found)
    return [table.id for table in section.on_page] if section else []


def test_step_section_has_panels_with_content(tmp_path: Path) -> None:
    assert step_ids(analyze_records(ok_record(step_case()))) == ["steps-table", "strategies"]
    assert step_ids(analyze_records()) == []
    trained = ok_record(step_case("fsdp"), metrics=training_metrics())
    other = pipeline_record(comparison=[simulated_schedule("zb_v", 0.018, 2)])
    run = write_traced_run(
        tmp_path, [(trained, None), (traced_record(), make_timeline()), (other, None)]
    )
    assert step_ids(analyze_run(run)) == [
        *(
            "steps-table",
            "step-time",
            "strategies",
            "step-timelines",
            "pipelines",
            "schedules-1",
            "schedules-1-simulated",
            "step-memory",
        )
    ]


def test_step_section_explains_missing_timelines(tmp_path: Path) -> None:
    section = require(
        step_section(
            analyze_run(write_traced_run(tmp_path, [(traced_record(), make_timeline(clock=""))]))
        )
    )
    (table,) = [table for table in section.tables if table.id == "step-timelines"]
    assert table.rows == ()
    assert table.notes[0].startswith("No timeline of step.ddp layers=4: the trace names no clock")
    unreadable = require(
        step_section(analyze_records(pipeline_record(measured=[[["nonsense", 0, 1]], []])))
    )
    assert "nonsense" in unreadable.notes[0]


BYTES = Component(name="bytes dp", predicted=2048.0, measured=2048.0, unit="B")
TIME = Component(name="step", predicted=0.012, measured=0.010, unit="s")
WIDE = Component(name="comm dp", predicted=0.012, measured=0.010, unit="s", low=0.007, high=0.0143)
NOTHING = Component(name="bytes tp", predicted=0.0, measured=None, unit="B")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return msgspec.structs.replace(run_from_records(ok_record(step_case())), path=tmp_path)


def predictions(run: Run, found: Validation) -> Section:
    write_whole(run.path / PLAN_FILE, encode_json(found))
    return require(predicted_section(analyze_run(run)))


def row(
    *components: Component,
    notes: tuple[str, ...] = (),
    compute: Literal["measured", "declared"] = "measured",
) -> StepCheck:
    told = list(components)
    return StepCheck(
        case="a",
        label="ddp",
        ranks=2,
        rule="r",
        compute=compute,
        components=told,
        notes=list(notes),
    )


def test_predicted_section_shows_the_plan_file(run: Run) -> None:
    assert predicted_section(analyze_run(run)) is None
    rows = [row(BYTES, TIME, NOTHING, WIDE, notes=("its compute is of another pass",))]
    found = Validation(run="run-1", fits="run-1", rows=rows, left_out={"cp": "not priced"})
    (table,) = predictions(run, found).tables
    assert cell_texts(table) == [
        ["ddp", "bytes dp", "2.00 KiB", "2.00 KiB", "+0.0%"],
        ["ddp", "step", "12.0 ms", "10.0 ms", "+20.0%"],
        ["ddp", "bytes tp", "0 B", "-", "-"],
        ["ddp", "comm dp", "12.0 ms", "10.0 ms [7.00, 14.3]", "+20.0% (within the interval)"],
    ]
    assert {"ddp: its compute is of another pass", "Not predicted: cp: not priced"} < {*table.notes}
    assert Component(name="b", predicted=1.0, measured=0.0, unit="B").error is None


def test_predicted_section_survives_a_damaged_file(run: Run) -> None:
    told = dict.fromkeys(
        (b"{", b'{"schema": 1}', b"\xff"), "is not what parbench plan --validate wrote"
    )
    for content, expected in {
        **told,
        b'{"schema": 2, "rows": []}': "plan.json: schema 2 is newer than 1",
    }.items():
        (run.path / PLAN_FILE).write_bytes(content)
        section = require(predicted_section(analyze_run(run)))
        assert section.tables == ()
        assert expected in section.notes[0], content
