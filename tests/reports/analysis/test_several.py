"""Several runs: in what they differ, how rows are matched, verdicts, and the tables that hold them side by side."""

from typing import Any

import msgspec
import pytest

from parbench.bench.machine.slurm_allocation import NodeLayout
from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run
from parbench.reports.analysis.several import Point, RunSet, beside, several
from parbench.reports.analysis.summary import summarize
from parbench.reports.report import Section
from parbench.reports.sections.several import report_of_several
from tests.support.nodes_fixtures import sample_node_run, scaling_run
from tests.support.report_rows import column_texts, find_table, run_from_records
from tests.support.reports_fixtures import (
    WORLD,
    collective_case,
    failed_record,
    ok_record,
    step_case,
)


def a_run(*records: Record, environment: dict[str, Any] | None = None, **plan: Any) -> Run:
    run = run_from_records(*records, environment=environment)
    return msgspec.structs.replace(
        run,
        info=msgspec.structs.replace(run.info, plan=msgspec.structs.replace(run.info.plan, **plan)),
    )


def of(*runs: Run, points: list[Point] | None = None) -> RunSet:
    pairs = [(run, summarize(run)) for run in runs]
    return several(pairs, points) if points else several(pairs)


FINE, FAILED = a_run(ok_record(step_case())), a_run(failed_record(step_case()))


def sections(found: RunSet) -> tuple[Section, ...]:
    return report_of_several(found).sections


def differences(found: RunSet) -> list[tuple[str, tuple[str, ...]]]:
    return [(one.name, one.texts) for one in found.differences]


def test_differences_are_listed_by_run() -> None:
    found = of(
        a_run(ok_record(step_case()), environment={"torch": {"version": "2.12"}, "a": 1}, nproc=2),
        a_run(ok_record(step_case()), environment={"torch": {"version": "2.13"}}, nproc=4),
    )
    assert [one.name for one in found.runs] == ["run 1", "run 2"]
    assert differences(found) == [
        ("plan.nproc", ("2", "4")),
        ("environment.torch.version", ("2.12", "2.13")),
        ("environment.a", ("1", "-")),
    ]
    assert found.words.startswith("They differ in 3 things")
    assert of(a_run(nproc=2), a_run(nproc=4)).words == "They differ in one thing, plan.nproc: 2, 4."


def test_differences_ignore_circumstances() -> None:
    boots = of(*(a_run(environment={"host": {"boot_id": boot}}) for boot in ("a", "b")))
    loads = of(*(a_run(environment={"load": {"one_minute": load}}) for load in (0.1, 3.0)))
    jobs = [
        {"slurm": {"job": job, "nodelist": f"n{job}"}, "variables": {"SLURM_JOB_ID": job}}
        for job in "12"
    ]
    slurm = of(*(a_run(environment=one) for one in jobs))
    assert differences(boots) == []
    assert differences(loads) == [("environment.load.one_minute", ("0.1", "3"))]
    assert differences(slurm) == [("environment.slurm.nodelist", ("n1", "n2"))]
    for found in (boots, loads, slurm):
        assert found.words.startswith("Same setup")
    ranks = [{"locality": dict.fromkeys(pairs, "same node")} for pairs in (["0-1"], ["0-1", "0-2"])]
    busy: list[dict[str, Any]] = [{"load": {"one_minute": load}} for load in (0.1, 3.0)]
    for both in (ranks, busy):
        found = of(*(a_run(environment=one, nproc=2 * i) for i, one in enumerate(both, start=1)))
        assert len(found.differences) == 2
        assert found.words == "They differ in one thing, plan.nproc: 2, 4."


def test_cases_match_across_a_varied_parameter() -> None:
    (one,) = beside(
        of(
            a_run(ok_record(step_case()), ok_record(collective_case())),
            a_run(ok_record(step_case(), seconds=2e-3)),
        )
    )
    assert sorted(one.rows) == [1, 2]
    ratio = one.ratio(2)
    assert ratio is not None
    assert ratio.value == pytest.approx(2.0)
    assert (ratio.low or 9) < 2.0 < (ratio.high or 0)
    found = of(a_run(ok_record(step_case(bucket_mb=1))), a_run(ok_record(step_case(bucket_mb=25))))
    assert differences(found) == [("step.ddp bucket_mb", ("1", "25"))]
    assert len(beside(found)) == 1
    varies = a_run(ok_record(step_case(bucket_mb=1)), ok_record(step_case(bucket_mb=5)))
    assert (
        beside(of(varies, a_run(ok_record(step_case(bucket_mb=25)))))
        == beside(of(FINE, FAILED))
        == ()
    )
    (one,) = beside(
        of(
            FINE,
            a_run(
                ok_record(
                    step_case(),
                    metrics={"step_time": ok_record(step_case()).metrics["bytes_sent.dp"]},
                )
            ),
        )
    )
    assert (one.ratio(3), one.ratio(1) is None) == (None, False)


def test_verdict_is_that_of_the_worst_run() -> None:
    wrong = a_run(failed_record(step_case(), status="wrong"))
    told: list[tuple[tuple[Run, ...], int, str]] = [
        ((FINE, FINE), 0, "FINE all 2 runs"),
        ((FINE, FAILED), 4, "NOT FINE run 2 of 2"),
        ((FINE, FAILED, wrong), 1, "NOT FINE run 2, run 3 of 3"),
    ]
    for runs, code, words in told:
        found = of(*runs)
        assert (found.code, f"{found.verdict.word} {found.verdict.told}") == (code, words)
    lacking = several([(run, summarize(run)) for run in (FINE, FINE)], lacking=("Not run: a.",))
    assert lacking.code == 4
    assert lacking.verdict.word == "INCOMPLETE"
    assert lacking.verdict.told == "all 2 runs are fine; 1 more that should be here is not"


def test_last_run_of_a_point_decides() -> None:
    point = Point(id="a")
    again, broken = of(FAILED, FINE, points=[point, point]), of(FINE, FAILED, points=[point, point])
    assert (again.code, broken.code) == (0, 4)
    assert of(FAILED, FINE, points=[point, Point(id="b")]).code == 4
    lost = a_run(failed_record(step_case()), spread=NodeLayout(nodes=4, ntasks_per_node=1))
    assert [one.num_nodes for one in of(lost, FINE).runs] == [
        4,
        1,
    ]  # those asked for where no rank started


def run_on(ranks: int, seconds: float = 1e-3) -> Run:
    world = msgspec.structs.replace(WORLD, size=ranks)
    run = a_run(
        *(
            ok_record(case, seconds=seconds, world=world)
            for case in (step_case(), collective_case())
        ),
        nproc=ranks,
    )
    return msgspec.structs.replace(
        run, info=msgspec.structs.replace(run.info, id=f"run-on-{ranks}")
    )


def cells(found: RunSet, table_id: str) -> list[dict[str, str]]:
    table = find_table(sections(found), table_id)
    return [column_texts(table.columns, row) for row in table.rows]


def ids(found: RunSet) -> list[str]:
    return [section.id for section in sections(found)]


def test_report_has_runs_differences_and_ratios() -> None:
    found, alike = of(run_on(2), run_on(4)), of(run_on(2), run_on(2, 2e-3))
    first, second = cells(found, "runs-table")
    assert (first["run"], first["id"], first["verdicts"]) == (
        "run 1",
        "run-on-2",
        "CORRECT, COMPLETE, NOISE UNKNOWN",
    )
    assert "4 ranks on 1 node" in second["what"]
    assert cells(found, "differences-table") == [{"what": "plan.nproc", "run 1": "2", "run 2": "4"}]
    first, _ = cells(alike, "beside-table")
    assert first["run 1, within this launch"] == "1.00 ms [0.900, 1.10]"
    assert first["run 2 / first, within this launch"].startswith("2.00 [1.7")
    assert ids(alike) == ["runs", "differences", "beside"]


def test_runs_table_shows_nodes_and_placement() -> None:
    first, second = cells(of(sample_node_run("cyclic"), scaling_run(1, 2)), "runs-table")
    assert (first["nodes"], first["placement"], first["hosts"]) == ("4", "cyclic", "n1, n2, n3, n4")
    assert (second["nodes"], second["placement"], second["hosts"]) == ("1", "-", "n1")
    shared = a_run(ok_record(step_case()), notes=("functional only: 4 ranks on 2 cores",))
    section, *_ = sections(of(FINE, shared))
    assert section.notes == ("What run 2 cannot show: functional only: 4 ranks on 2 cores",)


def test_over_nodes_replaces_scaling_by_ranks() -> None:
    """By ranks, block and cyclic runs of one size would be one series, and the first would hide the other."""
    told = ids(of(scaling_run(2, 2), scaling_run(4, 2), scaling_run(4, 2, "cyclic")))
    assert "over-nodes" in told
    assert "scaling" not in told
    shown = sections(of(sample_node_run(), scaling_run(1, 2), scaling_run(2, 2)))
    ids_shown = [
        section.id for section in shown if any(table.where != "page" for table in section.tables)
    ]
    assert ids_shown == ["runs", "over-nodes"]  # none widens with the runs
