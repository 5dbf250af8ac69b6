"""The child that measures one point: its command, its outcome, and the dead nodes of its job."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from parbench.bench.results.records import RankState, Record
from parbench.bench.results.runs import create_run, open_writer, write_run_info
from parbench.cli import main
from parbench.slurm.job.point_run import (
    Attempt,
    Child,
    Command,
    DeadNodes,
    begun_run,
    outcome_of,
    parbench_run,
)
from tests.support.fakes import make_fake_case, make_plan
from tests.support.reports_fixtures import failed_record, ok_record, out_of_budget_record
from tests.support.sweeps import FakeSlurm, make_folder, make_point, make_sweep

CASES = (make_fake_case(0), make_fake_case(1), make_fake_case(2))
POINT = make_point()


def make_attempt(parent: Path, **fields: Any) -> Attempt:
    sweep = make_sweep([POINT])
    defaults = {
        "folder": make_folder(parent, sweep),
        "sweep": sweep,
        "point": POINT,
        "nodes": ("n1", "n3"),
        "run": None,
    }
    return Attempt(**{**defaults, **fields})


def run_child(attempt: Attempt, command: Command) -> Child:
    child = Child(attempt, command)
    child.end(30.0)
    return child


def write_run(parent: Path, *records: Record, hosts: list[str] | None = None) -> Path:
    """Write a run of three cases and return its folder."""
    run, info = create_run(parent, make_plan(CASES), "0")
    write_run_info(run, msgspec.structs.replace(info, environment={"hosts": hosts}))
    with open_writer(run) as writer:
        for record in records:
            writer.write(record)
    return run


def test_parbench_run_is_a_valid_command(tmp_path: Path) -> None:
    args = parbench_run(make_attempt(tmp_path, sweep=make_sweep([POINT], link="400Gbit")))
    line = " ".join(args)
    assert "--nodelist n1,n3 --launcher srun --nodes 2 --ntasks-per-node 1" in line
    assert f"--plan {tmp_path}/sweep/points/{POINT.id}.json" in line
    assert f"--out {tmp_path}/sweep/runs/{POINT.id} --link 400Gbit" in line
    result = CliRunner().invoke(main, args[3:])
    assert result.exit_code == 2, "there is no allocation"
    assert "srun" in result.output


def test_parbench_run_resumes_a_begun_run(tmp_path: Path) -> None:
    args = parbench_run(make_attempt(tmp_path, run=tmp_path / "r"))
    assert args[4:] == ["--json", "--nodelist", "n1,n3", "--resume", str(tmp_path / "r")]


def test_child_gets_variables_and_srun_options(tmp_path: Path) -> None:
    attempt = make_attempt(
        tmp_path,
        point=make_point(variables={"A": "7"}),
        sweep=make_sweep([POINT], srun_options=("--container-image=a", "--mem=0")),
    )
    script = 'echo "$A" $PARBENCH_SRUN_OPTIONS >&2'
    child = run_child(attempt, lambda _: ["sh", "-c", script])
    assert child.last_line() == "7 --container-image=a --mem=0"


OK_0, OK_1, OK_2 = (ok_record(case) for case in CASES)
WRONG_2 = failed_record(CASES[2], status="wrong")
OUT_OF_BUDGET_2 = out_of_budget_record(CASES[2])


@pytest.mark.parametrize("last", [OK_2, OUT_OF_BUDGET_2])
def test_outcome_with_all_records_is_done(last: Record, tmp_path: Path) -> None:
    outcome = outcome_of(write_run(tmp_path, OK_0, OK_1, last), 0, "")
    assert outcome.state == "done"
    assert outcome.reason == ""
    assert outcome.measured == 3


def test_outcome_with_wrong_results_names_them_first(tmp_path: Path) -> None:
    hang = failed_record(CASES[1], status="hang")
    outcome = outcome_of(write_run(tmp_path, OK_0, hang, WRONG_2), 4, "")
    assert outcome.state == "failed"
    assert outcome.has_wrong_results
    assert outcome.reason == f"wrong: {CASES[2].label}: it broke"


def test_outcome_with_missing_records_is_interrupted(tmp_path: Path) -> None:
    outcome = outcome_of(write_run(tmp_path, OK_0), 4, "message")
    assert outcome.state == "interrupted"
    assert outcome.measured == 1
    assert "2 of 3 measurements are missing" in outcome.reason
    assert "exit code 4: message" in outcome.reason


@pytest.mark.parametrize(
    ("code", "message", "state", "reason"),
    [
        (2, "parbench: --nodes 9: job 7 has 4", "failed", "--nodes 9"),
        (1, "Traceback", "interrupted", "Traceback"),
        (-9, "", "interrupted", "SIGKILL"),
    ],
)
def test_outcome_without_a_run(code: int, message: str, state: str, reason: str) -> None:
    outcome = outcome_of(None, code, message)
    assert outcome.state == state
    assert reason in outcome.reason


def test_outcome_of_bad_input_or_a_damaged_run_is_final(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    assert outcome_of(run, 2, "parbench: the disk is full").state == "failed"
    (run / "run.json").write_text("{}")
    outcome = outcome_of(run, 0, "")
    assert outcome.state == "failed"
    assert "run.json" in outcome.reason


def test_begun_run_is_the_newest_complete_run(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, make_sweep([POINT]))
    assert begun_run(folder, POINT, ()) is None
    runs = folder / "runs" / POINT.id
    for name in ("20260101T000000Z-a", "20260102T000000Z-a", "20260103T000000Z-a"):
        (runs / name).mkdir(parents=True)
        (runs / name / "records.jsonl").touch()
    (runs / "20260101T000000Z-a" / "run.json").touch()
    (runs / "20260102T000000Z-a" / "run.json").touch()
    assert begun_run(folder, POINT, ()) == runs / "20260102T000000Z-a"
    lost_run = f"runs/{POINT.id}/20260102T000000Z-a"
    assert begun_run(folder, POINT, {lost_run}) == runs / "20260101T000000Z-a"


ENVIRON = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1,n2,n3,n4"}


def make_slurm(
    nodes: dict[str, str] | None = None,
    *,
    allocated: str = "n1,n2,n3,n4",
    state: str = "RUNNING",
) -> FakeSlurm:
    job = {"JobId": "7", "JobState": state, "NodeList": allocated}
    return FakeSlurm(nodes=nodes, jobs={"7": job})


NO_ANSWER = "no answer (process is stopped)"


def make_hang(**states: str) -> Record:
    """Build a record of a hang with one rank on each host."""
    ranks = [
        RankState(rank=rank, host=host, pid=1, state=state, is_silent=state == NO_ANSWER)
        for rank, (host, state) in enumerate(states.items())
    ]
    return failed_record(CASES[0], status="hang", ranks=ranks)


@pytest.mark.parametrize("state", ["down", "idle*", "unknown"])
def test_node_that_slurm_lost_is_dead(state: str) -> None:
    slurm = make_slurm({"n1": "mixed", "n2": "drained", "n3": state})
    nodes = DeadNodes(slurm, ENVIRON)
    assert nodes.look() == {"n3"}
    assert nodes.alive() == ("n1", "n2", "n4")
    assert nodes.words() == "n3 is down"
    slurm.nodes = {}
    assert nodes.look() == {"n3"}, "a dead node stays dead for the job"


@pytest.mark.parametrize(
    ("allocated", "state", "dead"),
    [
        ("n1,n2,n4", "RUNNING", {"n3"}),
        ("n1", "COMPLETING", set()),
        ("(null)", "PENDING", set()),
    ],
)
def test_node_that_a_running_job_lost_is_dead(
    allocated: str, state: str, dead: set[str]
) -> None:
    slurm = make_slurm(allocated=allocated, state=state)
    assert DeadNodes(slurm, ENVIRON).look() == dead


def find_silent_hosts(record: Record) -> set[str]:
    return set(DeadNodes(make_slurm(), ENVIRON, host="n1.cluster").look([record]))


def test_silent_hosts_in_a_hang_are_dead() -> None:
    hang = make_hang(**{"n1.c": "timed", "n2.c": NO_ANSWER, "n3.c": NO_ANSWER})
    assert find_silent_hosts(hang) == {"n2", "n3"}


def test_own_host_is_not_dead() -> None:
    assert find_silent_hosts(make_hang(n1=NO_ANSWER, n2="timed")) == set()
    assert find_silent_hosts(make_hang(n1=NO_ANSWER, n2=NO_ANSWER)) == set()


def test_silent_host_in_a_failure_is_not_dead() -> None:
    ranks = make_hang(n1="timed", n2=NO_ANSWER).ranks
    assert find_silent_hosts(failed_record(CASES[0], ranks=ranks)) == set()


def test_dead_nodes_without_slurm() -> None:
    hang = make_hang(n1="timed", n2="timed", n3=NO_ANSWER)
    slurm = make_slurm({"n2": "down"})
    nodes = DeadNodes(slurm, ENVIRON, host="n1")
    slurm.is_down = True
    assert nodes.look([hang]) == {"n3"}
    assert nodes.words() == "n3 gives no answer"
    nodes = DeadNodes(FakeSlurm(), {})
    assert nodes.look([hang]) == set()
    assert nodes.alive() == ()
