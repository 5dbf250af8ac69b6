"""Several runs: in what they differ, told from what any two differ in, and rows matched though one thing differs."""

from typing import Any

import msgspec
import pytest
from reports_fixtures import bad, collective, make_plan, make_run, ok, step

from bench.plan import Spread
from bench.records import Record
from bench.runs import Run
from reports.nodes.sweep_folder import Point
from reports.several import Several, beside, several
from reports.summary import summarize


def run_of(*records: Record, environment: dict[str, Any] | None = None, **plan: Any) -> Run:
    run = make_run(make_plan({record.case.id: record.case for record in records}.values()), records, environment)
    return msgspec.structs.replace(
        run, info=msgspec.structs.replace(run.info, plan=msgspec.structs.replace(run.info.plan, **plan))
    )


def several_of(*runs: Run) -> Several:
    return several([(run, summarize(run)) for run in runs])


def test_runs_are_numbered_in_the_order_given() -> None:
    assert [one.name for one in several_of(run_of(ok(step())), run_of(ok(step()))).runs] == ["run 1", "run 2"]


def test_what_differs_is_told_run_by_run() -> None:
    found = several_of(
        run_of(ok(step()), environment={"torch": {"version": "2.12"}}, nproc=2),
        run_of(ok(step()), environment={"torch": {"version": "2.13"}}, nproc=4),
    )
    assert [(one.name, one.texts) for one in found.differences] == [
        ("plan.nproc", ("2", "4")),
        ("environment.torch.version", ("2.12", "2.13")),
    ]
    assert found.words.startswith("They differ in 2 things")


def test_one_difference_is_named_with_its_values() -> None:
    assert several_of(run_of(nproc=2), run_of(nproc=4)).words == "They differ in one thing, plan.nproc: 2, 4."


def test_what_any_two_runs_differ_in_is_no_difference() -> None:
    found = several_of(*(run_of(environment={"host": {"boot_id": boot}}) for boot in ("a", "b")))
    assert found.differences == ()
    assert found.words.startswith("They differ in nothing but circumstances")


def test_circumstances_are_told_and_not_taken_for_the_one_thing() -> None:
    loads = [{"load": {"one_minute": load}} for load in (0.1, 3.0)]
    found = several_of(*(run_of(environment=load) for load in loads))
    assert [(one.name, one.texts) for one in found.differences] == [("environment.load.one_minute", ("0.1", "3"))]
    assert found.words.startswith("They differ in nothing but circumstances")
    both = several_of(*(run_of(environment=load, nproc=2 * i) for i, load in enumerate(loads, start=1)))
    assert both.words == "They differ in one thing, plan.nproc: 2, 4."


def test_what_one_run_does_not_know_is_a_dash() -> None:
    found = several_of(run_of(environment={"a": 1}), run_of())
    assert [(one.name, one.texts) for one in found.differences] == [("environment.a", ("1", "-"))]


def test_cases_are_matched_by_what_they_are() -> None:
    found = several_of(run_of(ok(step()), ok(collective())), run_of(ok(step(), seconds=2e-3)))
    (one,) = beside(found)
    assert sorted(one.rows) == [1, 2]
    ratio = one.ratio(2)
    assert ratio is not None
    assert ratio.value == pytest.approx(2.0)
    assert ratio.low is not None
    assert ratio.high is not None
    assert ratio.low < 2.0 < ratio.high


def test_a_parameter_in_which_the_runs_differ_does_not_part_them() -> None:
    found = several_of(run_of(ok(step(bucket_mb=1))), run_of(ok(step(bucket_mb=25))))
    assert [(one.name, one.texts) for one in found.differences] == [("step.ddp bucket_mb", ("1", "25"))]
    assert len(beside(found)) == 1


def test_a_parameter_that_varies_within_a_run_does_part_them() -> None:
    first = run_of(ok(step(bucket_mb=1)), ok(step(bucket_mb=5)))
    assert beside(several_of(first, run_of(ok(step(bucket_mb=25))))) == ()


def test_what_one_run_alone_measured_stands_beside_nothing() -> None:
    assert beside(several_of(run_of(ok(step())), run_of(bad(step())))) == ()


def test_a_ratio_needs_both_times() -> None:
    unknown = ok(step(), metrics={"step_time": ok(step()).metrics["bytes_sent.dp"]})
    (one,) = beside(several_of(run_of(ok(step())), run_of(unknown)))
    assert one.ratio(3) is None
    assert one.ratio(1) is not None


def test_the_verdict_names_the_runs_that_are_not_fine() -> None:
    found = several_of(run_of(ok(step())), run_of(bad(step())))
    assert (found.fine, found.verdict_words) == (False, "not fine: run 2 of 2")
    assert several_of(run_of(ok(step())), run_of(ok(step()))).verdict_words == "fine: all 2 runs"


def test_what_follows_from_the_number_of_ranks_is_not_another_thing() -> None:
    two, four = ({"locality": dict.fromkeys(pairs, "same node")} for pairs in (["0-1"], ["0-1", "0-2"]))
    found = several_of(run_of(environment=two, nproc=2), run_of(environment=four, nproc=4))
    assert len(found.differences) == 2
    assert found.words == "They differ in one thing, plan.nproc: 2, 4."


def test_what_is_lacking_is_not_fine() -> None:
    runs = [(run, summarize(run)) for run in (run_of(ok(step())), run_of(ok(step())))]
    found = several(runs, lacking=("Not run: a.",))
    assert (found.fine, found.code) == (False, 4)
    assert found.verdict_words == "not complete, else fine: all 2 runs; 1 more that should be here is not"
    assert (several(runs).fine, several(runs).code) == (True, 0)


def test_the_worst_run_decides_the_exit_code() -> None:
    fine, failed, wrong = run_of(ok(step())), run_of(bad(step())), run_of(bad(step(), status="wrong"))
    assert several_of(fine, failed).code == 4
    assert several_of(fine, failed, wrong).code == 1
    assert several_of(fine, failed, wrong).verdict_words == "not fine: run 2, run 3 of 3"


def test_a_job_is_every_runs_own_and_its_nodes_a_circumstance() -> None:
    jobs = [{"slurm": {"job": job, "nodelist": f"n{job}"}, "variables": {"SLURM_JOB_ID": job}} for job in "12"]
    found = several_of(*(run_of(environment=one) for one in jobs))
    assert [one.name for one in found.differences] == ["environment.slurm.nodelist"]
    assert found.words.startswith("They differ in nothing but circumstances")


def test_of_a_point_that_ran_again_the_last_run_decides() -> None:
    failed, fine = ((run, summarize(run)) for run in (run_of(bad(step())), run_of(ok(step()))))
    point = Point(id="a")
    again, broken = several([failed, fine], [point, point]), several([fine, failed], [point, point])
    assert (again.fine, again.code, broken.fine, broken.code) == (True, 0, False, 4)
    assert several([failed, fine], [point, Point(id="b")]).code == several([failed, fine]).code == 4


def test_nodes_are_those_asked_for_where_no_rank_started() -> None:
    lost = run_of(bad(step()), spread=Spread(nodes=4, ntasks_per_node=1))
    assert [one.num_nodes for one in several_of(lost, run_of(ok(step()))).runs] == [4, 1]
