"""What the rows of a run say together: places, problems, heading, notes and emulation."""

from typing import Any

import msgspec

from parbench.bench.launch.control_channel import LEFT_OUT
from parbench.bench.plan.plan import Skipped
from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run
from parbench.reports.analysis.summary import summarize
from parbench.reports.analysis.verdicts import bad_rows, emulations, not_measured, other_claims
from parbench.reports.regression.compare import compare
from parbench.reports.regression.compare_show import as_markdown, as_table
from parbench.reports.regression.rule import Rule
from parbench.reports.sections.one_run import heading, report_of
from tests.support import reports_fixtures as fixtures
from tests.support.compare_fixtures import make_repetitions
from tests.support.compare_fixtures import run_from_records as run_to_compare
from tests.support.nodes_fixtures import (
    EMULATION,
    make_group_case,
    make_hosts,
    make_world,
    sample_node_run,
)
from tests.support.nodes_fixtures import make_node_run as run_on
from tests.support.report_rows import analyze_records, matrix_case, run_from_records
from tests.support.reports_fixtures import (
    collective_case,
    failed_record,
    hang_record,
    make_plan,
    make_run,
    ok_record,
    step_case,
)

SHARED = "functional only: 4 ranks on 2 cores"


def test_each_measured_row_has_one_place() -> None:
    pairs = [ok_record(matrix_case(0, 1)), ok_record(matrix_case(1, 0))]
    analysis = analyze_records(
        ok_record(collective_case()),
        ok_record(step_case()),
        *pairs,
        failed_record(collective_case("broadcast")),
    )
    assert [row.case.name for row in analysis.communication] == ["collective.all_reduce"]
    assert [row.case.name for row in analysis.steps] == ["step.ddp"]
    assert [len(matrix.rows) for matrix in analysis.matrices] == [2]


def test_bad_rows_have_status_repetitions_and_reason() -> None:
    records = [
        hang_record(collective_case(), 0),
        failed_record(collective_case(), 1, "skipped", "not tried again"),
    ]
    records += [failed_record(collective_case("broadcast"), reason=""), ok_record(step_case())]
    first, second = bad_rows(summarize(run_from_records(*records, launches=2)))
    assert (first.case, first.status, first.launches) == (collective_case().label, "hang", "1/2")
    assert first.reason == "rank 1 did not arrive within 60 s"
    assert second.reason == "no reason was recorded"


def test_not_measured_includes_skips_of_plan_and_run() -> None:
    skipped = Skipped(case=collective_case(size_bytes=1001), reason="does not divide")
    plan = make_plan([collective_case()], skipped=[skipped])
    summary = summarize(
        make_run(plan, [failed_record(collective_case(), 0, "skipped", "no float8")])
    )
    assert [(row.launches, row.reason) for row in not_measured(summary)] == [
        ("all", "does not divide"),
        ("1/1", "no float8"),
    ]
    assert bad_rows(summary) == ()


def footnotes(run: Run) -> str:
    return "\n".join(report_of(run).footnotes)


def heading_of(environment: dict[str, Any] | None) -> str:
    run = make_run(make_plan([collective_case()]), [ok_record(collective_case())], environment)
    return heading(run, summarize(run))


def test_heading_names_setup_and_known_hardware() -> None:
    text = heading_of(fixtures.ENVIRONMENT)
    facts = (
        "preset node",
        "4 ranks on 1 node",
        "gloo",
        "node-a",
        "Example CPU",
        "2026-01-02T03:04",
    )
    assert [fact for fact in facts if fact not in text] == []
    assert "node-a" in heading_of({"host": {"cpu_model": None}})
    assert "Example GPU" in heading_of({"torch": {"gpu": "Example GPU"}})


def test_footnotes_name_the_methods_in_use() -> None:
    single = footnotes(run_from_records(ok_record(step_case())))
    several = footnotes(
        run_from_records(*(ok_record(collective_case(), i) for i in range(3)), launches=3)
    )
    for fact in ("nccl-tests", "geometric mean of 3 launch medians"):
        assert fact in several
        assert fact not in single
    assert footnotes(run_from_records(failed_record(collective_case()))) == ""


def test_footnotes_count_notes_once() -> None:
    noted = ok_record(collective_case(), notes=[SHARED])
    assert f"1 of 2 cases): {SHARED}" in footnotes(run_from_records(ok_record(step_case()), noted))
    plan = msgspec.structs.replace(make_plan([collective_case()]), notes=(SHARED,))
    text = footnotes(make_run(plan, [noted]))
    assert (text.count(SHARED), f"all cases): {SHARED}" in text) == (1, True)


def test_footnotes_count_what_the_budget_left_out() -> None:
    cases = [collective_case(size_bytes=size) for size in (1, 2, 3)]
    records = [ok_record(case) for case in cases] + [ok_record(cases[2], 1)]
    missing = [(cases[0], 1), (cases[0], 2), (cases[1], 1), (cases[1], 2), (cases[2], 2)]
    records += [failed_record(case, launch, "skipped", LEFT_OUT) for case, launch in missing]
    text = footnotes(run_from_records(*records, launches=3))
    assert "2 of 3 launches of 2 cases, 1 of 3 launches of 1 case" in text


def with_plan_notes(run: Run, *notes: str) -> Run:
    plan = msgspec.structs.replace(run.info.plan, notes=notes)
    return msgspec.structs.replace(run, info=msgspec.structs.replace(run.info, plan=plan))


def test_emulation_is_found_in_records_and_plan() -> None:
    run = sample_node_run()
    assert emulations(run) == emulations(with_plan_notes(run, EMULATION)) == (EMULATION,)
    assert emulations(sample_node_run(notes=())) == ()
    both = with_plan_notes(run, EMULATION, SHARED)
    assert (emulations(both), other_claims(both)) == ((EMULATION,), (SHARED,))


def test_emulation_of_some_records_is_counted() -> None:
    hosts = make_hosts(2, 1)
    records: list[Record] = [
        ok_record(make_group_case(s), world=make_world(hosts)) for s in (1024, 2048, 4096)
    ]
    records[0] = msgspec.structs.replace(records[0], notes=[EMULATION, EMULATION])
    assert emulations(run_on(records, hosts)) == (f"{EMULATION} (1 of 3 records)",)


def test_comparison_names_the_emulated_side() -> None:
    base, new = (
        run_to_compare(make_repetitions()),
        run_to_compare(make_repetitions(notes=[EMULATION])),
    )
    comparison = compare(base, new, Rule())
    assert f"NEW is {EMULATION}" in as_table(comparison).split("Families")[0]
    assert f"NEW is {EMULATION}" in as_markdown(comparison).split("### ")[0]
    assert f"BASE is {EMULATION}" in as_table(compare(new, base, Rule()))
