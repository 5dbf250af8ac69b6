from reports_fixtures import bad, collective, hang, make_plan, make_run, ok, sample_run

from bench.plan import Skipped
from reports.problems import bad_rows, not_measured
from reports.summary import summarize


def test_bad_rows_name_case_status_launches_and_reason() -> None:
    case = collective()
    records = [hang(case, 0), bad(case, 1, "skipped", "not tried again")]
    (problem,) = bad_rows(summarize(make_run(make_plan([case], launches=2), records)))
    assert problem.case == "collective.all_reduce size_bytes=1024 dtype=float32 mode=blocking"
    assert (problem.status, problem.launches, problem.reason) == ("hang", "1/2", "rank 1 did not arrive within 60 s")
    assert problem.row is not None
    assert problem.row.records[0].ranks[1].state == "did not arrive"


def test_a_missing_reason_is_said() -> None:
    case = collective()
    (problem,) = bad_rows(summarize(make_run(make_plan([case]), [bad(case, reason="")])))
    assert problem.reason == "no reason was recorded"


def test_ok_rows_are_no_problem() -> None:
    case = collective()
    summary = summarize(make_run(make_plan([case]), [ok(case)]))
    assert bad_rows(summary) == ()
    assert not_measured(summary) == ()


def test_skipped_by_the_plan_and_by_a_launch_are_not_measured() -> None:
    case = collective()
    skipped = Skipped(case=collective(size_bytes=1001), reason="does not divide")
    run = make_run(make_plan([case], skipped=[skipped]), [bad(case, 0, "skipped", "no float8")])
    summary = summarize(run)
    found = [(one.status, one.launches, one.reason) for one in not_measured(summary)]
    assert found == [("skipped", "all", "does not divide"), ("skipped", "1/1", "no float8")]
    assert bad_rows(summary) == ()


def test_missing_cases_are_one_line_for_a_name() -> None:
    cases = [collective(size_bytes=1024 * i) for i in (1, 2, 3)] + [collective("broadcast")]
    summary = summarize(make_run(make_plan(cases, launches=2), [ok(cases[0], 0)]))
    first, second = not_measured(summary)
    assert (first.case, first.launches) == ("collective.all_reduce (3 cases)", "5/6")
    assert (second.case, second.launches) == (cases[3].label, "2/2")
    assert first.status == second.status == "not measured"


def test_the_sample_has_each_kind() -> None:
    summary = summarize(sample_run())
    assert [one.status for one in bad_rows(summary)] == ["hang", "wrong", "failed"]
    assert [one.status for one in not_measured(summary)] == ["skipped", "not measured"]
