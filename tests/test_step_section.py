"""The report on training steps: panels in order, each with its terms, and none that has nothing to say."""

from pathlib import Path

from reports_fixtures import make_plan, make_run, ok, pipeline_record, simulated, step, training_metrics
from traced import run_with, timeline, traced_record

from bench.records import Record
from bench.runs import Run
from reports.findings import Findings, find
from reports.step_section import PANELS, step_section
from reports.summary import summarize


def found_of(run: Run) -> Findings:
    return find(run, summarize(run))


def found_in(*records: Record) -> Findings:
    return found_of(make_run(make_plan([record.case for record in records]), records))


def ids(found: Findings) -> list[str]:
    section = step_section(found)
    return [panel.id for panel in section.panels] if section else []


def test_a_step_that_knows_nothing_more_has_its_time_alone() -> None:
    assert ids(found_in(ok(step()))) == ["steps-table"]
    assert ids(found_in()) == []


def test_every_panel_has_its_place(tmp_path: Path) -> None:
    trained = ok(step("fsdp"), metrics=training_metrics())
    other = pipeline_record(comparison=[simulated("zb_v", 0.018, 2)])
    run = run_with(tmp_path, [(trained, None), (traced_record(), timeline()), (other, None)])
    assert ids(found_of(run)) == [
        *("steps-table", "step-time", "step-timelines", "pipelines", "schedules-1", "step-memory")
    ]
    assert len(PANELS) == 5


def test_terms_are_those_of_the_panels_that_are_there() -> None:
    section = step_section(found_in(ok(step(), metrics=training_metrics())))
    assert section is not None
    told = {term.name: term.text for term in section.terms}
    assert "compute + exposed + copy + idle + residual = wall time" in told["exposed"]
    assert "F, B, I, W" not in told
    pipelined = step_section(found_in(pipeline_record()))
    assert pipelined is not None
    assert "(P-1)/(M+P-1)" in {term.name: term.text for term in pipelined.terms}["bubble fraction, bubble overhead"]


def test_notes_stand_below_the_table_once_with_the_steps_that_say_so() -> None:
    records = [ok(step(name), notes=["shared", *([f"{name}: own"] if name == "ddp" else [])]) for name in ("ddp", "tp")]
    section = step_section(found_in(*records))
    assert section is not None
    assert section.panels[0].notes == ("all steps: shared", "ddp: own")
    assert "notes" not in [column.title for column in section.panels[0].columns]


def test_a_timeline_that_cannot_be_drawn_says_why(tmp_path: Path) -> None:
    section = step_section(found_of(run_with(tmp_path, [(traced_record(), timeline(clock=""))])))
    assert section is not None
    (panel,) = [panel for panel in section.panels if panel.id == "step-timelines"]
    assert panel.rows == ()
    assert panel.notes[0].startswith("No timeline of step.ddp layers=4: the trace names no clock")


def test_facts_that_cannot_be_read_are_said_so() -> None:
    section = step_section(found_in(pipeline_record(measured=[[["nonsense", 0, 1]], []])))
    assert section is not None
    assert "nonsense" in section.notes[0]
