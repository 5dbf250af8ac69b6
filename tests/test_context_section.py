"""The report on context parallelism: tables, verdicts below them, figures under the first, nothing without content."""

from reports_fixtures import context_details, context_record, cp, make_plan, make_run, ok, step

from bench.records import Record
from bench.runs import Run
from reports.findings import Findings, find
from reports.illustrations import illustrations
from reports.parallel.context_section import context_section
from reports.sections import sections
from reports.summary import summarize
from reports.tables import render_tables


def run_of(*records: Record) -> Run:
    return make_run(make_plan([record.case for record in records]), records)


def found_in(*records: Record) -> Findings:
    run = run_of(*records)
    return find(run, summarize(run))


BOTH = [context_record(method, 0.02, sequence) for method in ("ring", "zigzag") for sequence in (64, 128)]


def test_steps_and_hops_are_tables_with_the_verdicts_below() -> None:
    section = context_section(found_in(*BOTH))
    assert section is not None
    table, hops = section.panels
    assert (len(table.rows), len(hops.rows)) == (4, 8)
    assert [note.partition(",")[0] for note in table.notes[:2]] == ["At sequence 64", "At sequence 128"]
    assert "1 + 1/g" in table.notes[-1]


def test_steps_without_hops_have_one_table() -> None:
    section = context_section(found_in(context_record(attention_steps=[])))
    assert section is not None
    assert [panel.id for panel in section.panels] == ["context-table"]
    assert section.panels[0].notes == ()


def test_other_steps_have_no_section() -> None:
    assert context_section(found_in(ok(step()))) is None


def test_what_cannot_be_read_is_said() -> None:
    found = found_in(ok(cp(), details={**context_details(), "sequence": 63}))
    section = context_section(found)
    assert section is not None
    assert section.panels == ()
    assert "sequence(63) % tokens_per_rank(32) != 0" in section.notes[0]


def test_it_stands_in_the_page_with_its_figure() -> None:
    found = found_in(*BOTH)
    assert "context" in [section.id for section in sections(found)]
    (chart,) = illustrations(found)["context-table"]
    assert "<figcaption>Methods compared: cp = 2, causal mask</figcaption>" in chart


def test_the_terminal_prints_it_and_hops_only_in_full() -> None:
    run = run_of(*BOTH)
    short = render_tables(run, summarize(run), width=None)
    assert "Context parallelism\n" in short
    assert "At sequence 64, cp = 2" in short
    assert "Attention's communications" not in short
    assert "Attention's communications" in render_tables(run, summarize(run), width=None, full=True)
