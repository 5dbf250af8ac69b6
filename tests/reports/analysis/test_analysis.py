"""What a run's rows say together: findings, problems, what stands out or is emulated, and the words around tables."""

from pathlib import Path
from typing import Any

import msgspec
import reports_fixtures as fixtures
from compare_fixtures import launches
from compare_fixtures import run_of as run_to_compare
from nodes_fixtures import EMULATION, hosts_of, node_run, operation, world_of
from nodes_fixtures import run_of as run_on
from report_rows import found_in, found_of, matrix_case, run_of
from reports_fixtures import bad, collective, hang, make_plan, make_run, ok, pipeline_record, step
from traced import run_with, timeline, traced_record

from parbench.bench.launch.control_channel import LEFT_OUT
from parbench.bench.plan.plan import Skipped
from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run
from parbench.reports.analysis.summary import summarize
from parbench.reports.analysis.verdicts import bad_rows, emulations, not_measured, other_claims
from parbench.reports.regression.compare import compare
from parbench.reports.regression.compare_show import as_markdown, as_table
from parbench.reports.regression.compare_show import heading as heading_of_comparison
from parbench.reports.regression.rule import Rule
from parbench.reports.sections.one_run import heading, report_of


def test_every_row_with_a_measurement_stands_in_one_place() -> None:
    pairs = [ok(matrix_case(0, 1)), ok(matrix_case(1, 0))]
    found = found_in(ok(collective()), ok(step()), *pairs, bad(collective("broadcast")))
    names = [[row.case.name for row in rows] for rows in (found.communication, found.steps)]
    assert names == [["collective.all_reduce"], ["step.ddp"]]
    assert ([len(matrix.rows) for matrix in found.matrices], len(found.shown)) == ([2], 4)


def test_timelines_are_read_when_they_are_asked_for_and_before_the_rows_lose_them(tmp_path: Path) -> None:
    found = found_in(pipeline_record())
    assert found.pipelines[0].facts.measured is not None
    assert "measured" not in found.steps[0].records[0].details["pipeline"]
    assert found.unreadable == ()
    found = found_of(run_with(tmp_path, [(traced_record(), timeline())]))
    assert {"timelines", "late"} & set(vars(found)) == set()
    assert len(found.timelines) == 1
    assert found.late == ()
    assert "timelines" in vars(found)


def test_bad_rows_name_case_status_launches_and_reason() -> None:
    case, other = collective(), collective("broadcast")
    records = [hang(case, 0), bad(case, 1, "skipped", "not tried again"), bad(other, reason=""), ok(step())]
    first, second = bad_rows(summarize(run_of(*records, launches=2)))
    assert first.case == "collective.all_reduce size_bytes=1024 dtype=float32 mode=blocking"
    assert (first.status, first.launches, first.reason) == ("hang", "1/2", "rank 1 did not arrive within 60 s")
    assert second.reason == "no reason was recorded"


def test_skipped_by_the_plan_and_by_a_launch_are_not_measured() -> None:
    case = collective()
    skipped = Skipped(case=collective(size_bytes=1001), reason="does not divide")
    summary = summarize(make_run(make_plan([case], skipped=[skipped]), [bad(case, 0, "skipped", "no float8")]))
    found = [(one.status, one.launches, one.reason) for one in not_measured(summary)]
    assert found == [("skipped", "all", "does not divide"), ("skipped", "1/1", "no float8")]
    assert bad_rows(summary) == not_measured(summarize(run_of(ok(case)))) == ()


def notes_of(*records: Record, launches: int = 1) -> str:
    run = run_of(*records, launches=launches)
    return "\n".join(report_of(run).footnotes)


def heading_of(environment: dict[str, Any] | None, *records: Record, launches: int = 1) -> str:
    run = make_run(make_plan([collective()], launches=launches), records, environment)
    return heading(run, summarize(run))


def test_the_heading_says_what_was_run_where_and_on_what() -> None:
    assert heading_of(fixtures.ENVIRONMENT, ok(collective())) == (
        "preset node: 4 ranks on 1 node, gloo, cpu; 1 launch; host node-a; Example CPU; torch 2.13.0; "
        "started 2026-01-02T03:04:05.678Z; measuring took 500 ms"
    )
    unknown: list[dict[str, Any] | None] = [None, {}, {"host": None}, {"host": {"cpu_model": None}}]
    for environment in unknown:
        assert "; host node-a; started" in heading_of(environment, ok(collective())), environment
    assert "4 ranks, gloo, cpu; 2 launches;" in heading_of(None, launches=2)
    assert "; Example GPU; " in heading_of({"torch": {"gpu": "Example GPU"}}, ok(collective()))


def test_the_notes_name_convention_method_and_what_one_launch_cannot_tell() -> None:
    assert "follow nccl-tests" in notes_of(ok(collective()), ok(step(), n=7))
    alone, several = notes_of(ok(step())), notes_of(*(ok(collective(), i) for i in range(3)), launches=3)
    assert ["nccl-tests" in told for told in (alone, several)] == [False, True]
    assert ["intervals and noise are within this launch" in told for told in (alone, several)] == [True, False]
    assert "geometric mean of 3 launch medians, Student's t interval on logarithms, 2 degrees of freedom" in several
    assert "Where the time went" not in alone
    assert notes_of(bad(collective())) == ""


def test_what_cannot_be_claimed_is_said_once_with_how_many_cases() -> None:
    assert "Note (1 of 2 cases): functional only" in notes_of(ok(step()), ok(collective(), notes=["functional only"]))
    plan = msgspec.structs.replace(make_plan([collective()]), notes=("functional only",))
    for records in ([], [ok(collective(), notes=["functional only", "odd"])]):
        run = make_run(plan, records)
        text = "\n".join(report_of(run).footnotes)
        assert text.count("functional only") == 1
        assert "Note (all cases): functional only" in text
        assert ("Note (1 of 1 cases): odd" in text) is bool(records)


def test_what_the_budget_left_out_is_counted() -> None:
    cases = [collective(size_bytes=size) for size in (1, 2, 3)]
    records = [ok(case) for case in cases]
    records += [bad(case, launch, "skipped", LEFT_OUT) for case in cases[:2] for launch in (1, 2)]
    told = notes_of(*records, ok(cases[2], 1), bad(cases[2], 2, "skipped", LEFT_OUT), launches=3)
    assert "out of time (budget 1 min 30 s): 2 of 3 launches of 2 cases, 1 of 3 launches of 1 case." in told
    assert "Left out" not in notes_of(ok(collective()))


SHARED = "functional only: 4 ranks on 2 cores"


def with_plan_notes(run: Run, *notes: str) -> Run:
    plan = msgspec.structs.replace(run.info.plan, notes=notes)
    return msgspec.structs.replace(run, info=msgspec.structs.replace(run.info, plan=plan))


def test_emulation_is_found_once_in_records_and_plan_and_counted_where_not_all_bear_it() -> None:
    run = node_run()
    assert emulations(run) == emulations(with_plan_notes(run, EMULATION)) == (EMULATION,)
    assert emulations(node_run(notes=())) == ()
    both = with_plan_notes(run, EMULATION, SHARED)
    assert (emulations(both), other_claims(both)) == ((EMULATION,), (SHARED,))
    hosts = hosts_of(2, 1)
    records = [ok(operation(size), world=world_of(hosts)) for size in (1024, 2048, 4096)]
    records[0] = msgspec.structs.replace(records[0], notes=[EMULATION, EMULATION])
    assert emulations(run_on(records, hosts)) == (f"{EMULATION} (1 of 3 records)",)


def test_a_comparison_says_of_either_side_that_it_is_emulated() -> None:
    base, new = run_to_compare(launches()), run_to_compare(launches(notes=[EMULATION]))
    comparison = compare(base, new, Rule())
    assert heading_of_comparison(comparison)[3:] == (f"NEW is {EMULATION}",)
    assert f"NEW is {EMULATION}" in as_table(comparison).split("Families")[0]
    assert f"NEW is {EMULATION}" in as_markdown(comparison).split("### ")[0]
    assert heading_of_comparison(compare(new, base, Rule()))[3:] == (f"BASE is {EMULATION}",)
