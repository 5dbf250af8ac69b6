"""The report on expert parallelism: steps, an atlas for each scope, loads, and what may be claimed below them."""

from reports_fixtures import ep, make_plan, make_run, mixture_record, ok, step

from bench.records import Record
from bench.runs import Run
from reports.findings import Findings, find
from reports.illustrations import illustrations
from reports.parallel.experts_section import experts_section
from reports.sections import sections
from reports.summary import summarize
from reports.tables import render_tables

BOTH = [mixture_record("ep_layer", "balanced"), mixture_record("ep_layer", "zipf", 1.25)]


def run_of(*records: Record) -> Run:
    return make_run(make_plan([record.case for record in records]), records)


def found_in(*records: Record) -> Findings:
    run = run_of(*records)
    return find(run, summarize(run))


def test_panels_come_in_order_with_their_claims() -> None:
    section = experts_section(found_in(*BOTH))
    assert section is not None
    assert [panel.id for panel in section.panels] == ["experts-table", "experts-atlas-1", "experts-load"]
    assert section.panels[0].notes == section.panels[1].notes == ("ep_layer: what it may claim",)
    assert "claim" not in [column.title for column in section.panels[0].columns]


def test_one_routing_has_no_atlas() -> None:
    section = experts_section(found_in(BOTH[0]))
    assert section is not None
    assert [panel.id for panel in section.panels] == ["experts-table", "experts-load"]


def test_other_steps_have_no_section_and_bad_facts_are_said() -> None:
    assert experts_section(found_in(ok(step()))) is None
    section = experts_section(found_in(ok(ep(), details={**BOTH[0].details, "expert_load": [[1] * 7]})))
    assert section is not None
    assert section.panels == ()
    assert "experts(7) % ep(2) != 0" in section.notes[0]


def test_it_stands_in_the_page_with_its_figures() -> None:
    found = found_in(*BOTH)
    assert "experts" in [section.id for section in sections(found)]
    drawn = illustrations(found)
    assert [len(drawn[name]) for name in ("experts-atlas-1", "experts-load")] == [1, 1]


def test_the_terminal_prints_it_and_loads_only_in_full() -> None:
    run = run_of(*BOTH)
    short = render_tables(run, summarize(run), width=None)
    assert "Expert parallelism\n" in short
    assert "Routing x capacity: ep_layer" in short
    assert "Who is chosen" not in short
    assert "Who is chosen" in render_tables(run, summarize(run), width=None, full=True)
