"""What is emulated is said at the head of everything that shows a run."""

import msgspec
from compare_fixtures import launches
from compare_fixtures import run_of as run_to_compare
from nodes_fixtures import EMULATION, hosts_of, node_run, operation, run_of, world_of
from reports_fixtures import ok

from bench.runs import Run
from reports.comparing.compare import compare
from reports.comparing.compare_columns import heading
from reports.comparing.compare_formats import as_markdown, as_table
from reports.comparing.compare_rule import Rule
from reports.emulated import cannot_show, emulations, told_of_runs
from reports.markdown import render_markdown
from reports.page import render_page
from reports.summary import summarize
from reports.tables import render_tables

SHARED = "functional only: 4 ranks on 2 cores"


def with_plan_notes(run: Run, *notes: str) -> Run:
    plan = msgspec.structs.replace(run.info.plan, notes=notes)
    return msgspec.structs.replace(run, info=msgspec.structs.replace(run.info, plan=plan))


def test_notes_of_records_and_of_the_plan_are_found_once() -> None:
    run = node_run()
    assert emulations(run) == emulations(with_plan_notes(run, EMULATION)) == (EMULATION,)
    assert emulations(node_run(notes=())) == ()
    assert cannot_show(with_plan_notes(run, EMULATION, SHARED)) == (EMULATION, SHARED)


def test_what_not_all_records_bear_is_counted() -> None:
    hosts = hosts_of(2, 1)
    records = [ok(operation(size), world=world_of(hosts)) for size in (1024, 2048, 4096)]
    records[0] = msgspec.structs.replace(records[0], notes=[EMULATION, EMULATION])
    assert emulations(run_of(records, hosts)) == (f"{EMULATION} (1 of 3 records)",)


def test_of_several_runs_each_note_is_told_once_with_its_runs() -> None:
    real, played = node_run(notes=()), node_run()
    assert told_of_runs([real, played, played], emulations) == (f"What runs 2-3 cannot show: {EMULATION}",)
    assert told_of_runs([real, played], emulations) == (f"What run 2 cannot show: {EMULATION}",)
    assert told_of_runs([played, played], emulations) == (f"What no run can show: {EMULATION}",)
    assert told_of_runs([real], emulations) == ()


def test_page_markdown_and_terminal_say_it_at_their_head() -> None:
    run = node_run()
    summary = summarize(run)
    page = render_page(run, summary)
    assert page.index(EMULATION) < page.index("<nav")
    told = render_markdown(run, summary)
    assert told.index(f"**{EMULATION}**") < told.index("preset node")
    assert render_tables(run, summary, width=None).splitlines()[1] == EMULATION


def test_a_comparison_says_it_of_either_side() -> None:
    base = run_to_compare(launches())
    new = run_to_compare(launches(notes=[EMULATION]))
    comparison = compare(base, new, Rule())
    assert heading(comparison)[3:] == (f"NEW is {EMULATION}",)
    assert f"NEW is {EMULATION}" in as_table(comparison).split("Families")[0]
    assert f"NEW is {EMULATION}" in as_markdown(comparison).split("### ")[0]
    assert heading(compare(new, base, Rule()))[3:] == (f"BASE is {EMULATION}",)
