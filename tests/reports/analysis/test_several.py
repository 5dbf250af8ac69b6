"""Several runs: their differences, matched cases, scaling, verdict, and the folder of a sweep."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from parbench.bench.plan.cases import Case
from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run
from parbench.bench.text import UserError
from parbench.reports.analysis.several import (
    Point,
    RunSet,
    gather,
    load_sweep,
    runs_of,
    several,
)
from parbench.reports.analysis.summary import summarize
from parbench.reports.sections.several import report_of_several
from tests.support.nodes_fixtures import (
    failed_node_run,
    make_sweep_point,
    scaling_run,
    write_sweep,
)
from tests.support.report_rows import find_table, run_from_records, table_lines
from tests.support.reports_fixtures import (
    WORLD,
    collective_case,
    failed_record,
    ok_record,
    step_case,
    write_run,
)


def plan_run(
    *records: Record, environment: dict[str, Any] | None = None, **plan_fields: Any
) -> Run:
    run = run_from_records(*records, environment=environment)
    plan = replace(run.info.plan, **plan_fields)
    return replace(run, info=replace(run.info, plan=plan))


def join(*runs: Run, points: tuple[Point, ...] = (), lacking: tuple[str, ...] = ()) -> RunSet:
    return several([(run, summarize(run)) for run in runs], points, lacking)


def lines_of(run_set: RunSet, table_id: str) -> list[dict[str, str]]:
    return table_lines(find_table(report_of_several(run_set).sections, table_id))


def section_ids(run_set: RunSet) -> list[str]:
    return [section.id for section in report_of_several(run_set).sections]


FINE = plan_run(ok_record(step_case()))
FAILED = plan_run(failed_record(step_case()))
WRONG = plan_run(failed_record(step_case(), status="wrong"))


def differences_of(run_set: RunSet) -> dict[str, tuple[str, ...]]:
    return {difference.name: difference.texts for difference in run_set.differences}


def test_differences_are_listed_by_run() -> None:
    first = plan_run(environment={"torch": {"version": "2.12"}, "a": 1}, nproc=2)
    second = plan_run(environment={"torch": {"version": "2.13"}}, nproc=4)
    run_set = join(first, second)
    assert differences_of(run_set) == {
        "plan.nproc": ("2", "4"),
        "environment.torch.version": ("2.12", "2.13"),
        "environment.a": ("1", "-"),
    }
    assert "3 things" in run_set.words


def test_circumstances_are_not_another_setup() -> None:
    quiet = {"load": {"one_minute": 0.1}, "host": {"boot_id": "a"}}
    busy = {"load": {"one_minute": 3}, "host": {"boot_id": "b"}}
    run_set = join(plan_run(environment=quiet), plan_run(environment=busy))
    assert list(differences_of(run_set)) == ["environment.load.one_minute"]
    assert run_set.words.startswith("Same setup")


def test_cases_match_with_a_ratio() -> None:
    slow = plan_run(ok_record(step_case(), seconds=2e-3))
    (line,) = lines_of(join(FINE, slow), "beside-table")
    assert line["run 1, within this repetition"] == "1.00 ms [0.900, 1.10]"
    assert line["run 2 / first, within this repetition"].startswith("2.00 [1.7")


def test_cases_match_across_a_varied_parameter() -> None:
    small = plan_run(ok_record(step_case(bucket_mb=1)))
    large = plan_run(ok_record(step_case(bucket_mb=25)))
    run_set = join(small, large)
    assert differences_of(run_set) == {"step.ddp bucket_mb": ("1", "25")}
    assert len(lines_of(run_set, "beside-table")) == 1
    assert "beside" not in section_ids(join(FINE, FAILED))


@pytest.mark.parametrize(
    ("run_set", "code", "word"),
    [
        (join(FINE, FINE), 0, "FINE"),
        (join(FINE, FAILED), 4, "NOT FINE"),
        (join(FAILED, WRONG), 1, "NOT FINE"),
        (join(FINE, FINE, lacking=("Not run: a.",)), 4, "INCOMPLETE"),
    ],
)
def test_verdict_is_that_of_the_worst_run(run_set: RunSet, code: int, word: str) -> None:
    assert run_set.code == code
    assert run_set.verdict.word == word


def test_last_run_of_a_point_decides() -> None:
    point = Point(id="a")
    assert join(FAILED, FINE, points=(point, point)).code == 0
    assert join(FAILED, FINE, points=(point, Point(id="b"))).code == 4


def run_on(ranks: int, case: Case, seconds: float) -> Run:
    world = replace(WORLD, size=ranks)
    return plan_run(ok_record(case, seconds=seconds, world=world), nproc=ranks)


@pytest.mark.parametrize(
    ("case", "seconds", "efficiency"),
    [
        (step_case(), 1e-3, "25.0 %"),
        (step_case(), 0.25e-3, "100 %"),
        (collective_case(), 2e-3, "50.0 %"),
    ],
)
def test_scaling_expects_rate_or_busbw(case: Case, seconds: float, efficiency: str) -> None:
    run_set = join(run_on(2, case, 1e-3), run_on(8, case, seconds))
    (line,) = lines_of(run_set, "scaling-table")
    assert line["efficiency 8"] == efficiency


FIRST = make_sweep_point(1, "2 nodes x 1", distribution="cyclic")
SECOND = make_sweep_point(2, "4 nodes x 1")


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Return the folder of a sweep whose first point ran twice and whose second did not run."""
    points = [(FIRST, [scaling_run(2), scaling_run(2)]), (SECOND, [])]
    return write_sweep(tmp_path / "links", points)


def test_gather_reads_the_runs_of_a_sweep(sweep: Path, tmp_path: Path) -> None:
    separate = write_run(tmp_path / "separate", failed_node_run())
    run_set = gather([sweep, separate])
    labels = [run.point.label if run.point else "" for run in run_set.runs]
    assert labels == ["2 nodes x 1", "2 nodes x 1", ""]
    assert run_set.lacking == ("Not run: 4 nodes x 1.",)
    assert run_set.code == 4


def test_gather_leaves_out_a_damaged_run_of_a_sweep(sweep: Path) -> None:
    damaged = runs_of(sweep, load_sweep(sweep).points[0])[0]
    (damaged / "run.json").write_text('{"schema": 99}')
    run_set = gather([sweep], whole=True)
    assert len(run_set.runs) == 1
    assert "schema 99" in run_set.lacking[1]


def test_gather_refuses_a_sweep_without_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none of its 1 points has a run"):
        gather([write_sweep(tmp_path / "waiting", [(FIRST, [])])])


@pytest.mark.parametrize("content", [b"{", b'{"points": [{"id": "x"}, {"id": "x"}]}'])
def test_damaged_sweep_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "sweep.json").write_bytes(content)
    with pytest.raises(UserError, match=r"sweep\.json is not what parbench wrote"):
        gather([tmp_path])
