"""The launchers: the fork server and srun, the exits they report, and that no process is left."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from parbench.bench.launch.launchers import (
    ForkedRanks,
    ForkServer,
    SrunRanks,
    build_rank_command,
    parse_exit_codes,
)
from parbench.bench.launch.messages import Hello
from parbench.bench.machine.slurm_allocation import NodeLayout, check_srun
from tests.support.fakes import make_hello, wait_until
from tests.support.paths import IMPORT_PATH
from tests.support.refusals import usage_error
from tests.support.trees import write_tool

PATIENCE = 60.0  # seconds that a process may take on a busy machine
LAYOUT = NodeLayout(nodes=2, ntasks_per_node=3, distribution="cyclic")


@pytest.fixture(scope="module")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """A fork server whose ranks act as ``acts`` says."""
    modules = ["absent_module", "tests.support.acts"]
    variables = {"PYTHONPATH": IMPORT_PATH, "OMP_NUM_THREADS": "2"}
    logs = tmp_path_factory.mktemp("server")
    with ForkServer(modules, variables, logs) as server:
        yield server
        assert (logs / "fork-server.log").read_text() == ""


def start(server: ForkServer, folder: Path, *acts: str, **variables: str) -> ForkedRanks:
    """Start a rank for each act, and return when all have begun."""
    for rank, act in enumerate(acts):
        variables[f"PARBENCH_ACT_{rank}"] = act
    ranks = ForkedRanks(server, len(acts), folder, variables)
    wait_until(lambda: len(list(folder.glob("[0-9].pid"))) == len(acts), PATIENCE)
    return ranks


def read_pids(folder: Path) -> list[int]:
    return [int(file.read_text()) for file in sorted(folder.glob("*.pid"))]


def are_gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) for pid in pids)


def test_fork_server_isolates_ranks(fork_server: ForkServer, tmp_path: Path) -> None:
    ranks = start(fork_server, tmp_path / "a", "look", "look", PARBENCH_MESSAGE="hello")
    wait_until(lambda: len(ranks.get_exit_codes()) == 2, PATIENCE)
    assert ranks.get_exit_codes() == {0: 0, 1: 0}
    processes: list[dict[str, Any]] = []
    for rank in range(2):
        text = (tmp_path / "a" / f"rank-{rank}.log").read_text()
        processes.append(json.loads(text))
        assert processes[rank]["world"] == [str(rank), str(rank), "2"]
    for process in processes:
        assert process["message"] == "hello"
        assert process["threads"] == 1
        assert process["torch_threads"] == 2
        assert process["stdin"] == ""
        # An interrupt on the terminal does not reach the ranks.
        assert process["session"] != os.getsid(0)
    for name in ("random", "numpy_random"):
        assert processes[0][name] != processes[1][name]


def test_fork_server_reports_and_ends_ranks(fork_server: ForkServer, tmp_path: Path) -> None:
    ranks = start(fork_server, tmp_path / "a", "wait", "stop", "raise")
    wait_until(ranks.get_exit_codes, PATIENCE)
    assert ranks.get_exit_codes() == {2: 1}
    assert ranks.get_last_error() == "RuntimeError: the roof is on fire (a/rank-2.log)"
    assert not are_gone(read_pids(tmp_path / "a")[:2])
    ranks.kill()
    wait_until(lambda: len(ranks.get_exit_codes()) == 3, PATIENCE)
    assert ranks.get_exit_codes() == {0: -9, 1: -9, 2: 1}
    assert are_gone(read_pids(tmp_path / "a"))


def test_fork_server_ends_what_ranks_left_behind(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    ranks = start(fork_server, tmp_path / "a", "leave a child")
    wait_until(ranks.get_exit_codes, PATIENCE)
    child = psutil.Process(int((tmp_path / "a" / "child").read_text()))
    assert child.is_running()
    ranks.kill()
    wait_until(lambda: not child.is_running(), PATIENCE)
    assert not fork_server.has_ended()


@pytest.mark.full
def test_killed_fork_server_is_replaced(fork_server: ForkServer, tmp_path: Path) -> None:
    ranks = start(fork_server, tmp_path / "a", "wait", "stop")
    os.kill(fork_server.pid, signal.SIGKILL)
    wait_until(lambda: are_gone(read_pids(tmp_path / "a")), PATIENCE)
    assert fork_server.has_ended()
    ranks.kill()
    ranks = start(fork_server, tmp_path / "b", "look")
    wait_until(ranks.get_exit_codes, PATIENCE)
    assert ranks.get_exit_codes() == {0: 0}


@pytest.mark.full
@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({"PARBENCH_ACT_LOST": "1"}, 2),
        ({"OMP_NUM_THREADS": "1"}, 1),
    ],
)
def test_rank_starts_a_new_python_if_forks_cannot_be_used(
    fork_server: ForkServer, tmp_path: Path, variables: dict[str, str], threads: int
) -> None:
    environ = {"PARBENCH_DEVICE": "cpu", **variables}
    ranks = ForkedRanks(fork_server, 1, tmp_path / "a", environ)
    wait_until(lambda: list((tmp_path / "a" / "mail" / "messages").glob("*.json")), PATIENCE)
    [(_, hello)] = ranks.mailbox.receive()
    assert isinstance(hello, Hello)
    assert hello.environment["torch"]["threads"] == threads
    command = psutil.Process(hello.pid).cmdline()
    assert command[1:] == ["-m", "parbench.bench.rank.worker"]
    ranks.kill()
    wait_until(lambda: ranks.get_exit_codes() == {0: -9}, PATIENCE)


# --- srun ---


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the PATH with an srun that sleeps and an scancel; both note their arguments."""
    write_slurm_tool(tmp_path, "srun", "exec sleep 60")
    write_slurm_tool(tmp_path, "scancel", "true")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def write_slurm_tool(folder: Path, name: str, script: str) -> None:
    note = (
        f"echo $PARBENCH_FOLDER $@ > {folder}/.{name}; mv {folder}/.{name} {folder}/{name}.args"
    )
    write_tool(folder, name, f"{note}\n{script}")


def start_srun(folder: Path, nodelist: str | None = None) -> SrunRanks:
    ranks = SrunRanks(LAYOUT, folder / "logs", {}, nodelist)
    wait_until((folder / "srun.args").exists)
    return ranks


def test_srun_command() -> None:
    environ = {
        "SLURM_CPUS_PER_TASK": "4",
        "PARBENCH_SRUN_OPTIONS": "--container-image=a b\n\n--mem=0\n",
    }
    command = build_rank_command(LAYOUT, Path("/shared"), environ, "n[2-3]")
    assert command == [
        "srun",
        "--nodes=2",
        "--ntasks=6",
        "--ntasks-per-node=3",
        "--distribution=cyclic",
        "--kill-on-bad-exit=1",
        "--cpus-per-task=4",
        "--nodelist=n[2-3]",
        "--output=/shared/rank-%t.log",
        "--error=/shared/rank-%t.log",
        "--mpi=none",
        "--overlap",
        "--input=none",
        "--export=ALL",
        "--container-image=a b",
        "--mem=0",
        sys.executable,
        "-m",
        "parbench.bench.rank.worker",
    ]


def test_ranks_on_gpus_are_not_bound_to_one_core() -> None:
    command = build_rank_command(LAYOUT, Path("/shared"), {}, on_gpus=True)
    assert "--cpu-bind=none" in command


def test_missing_srun_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "srun is not in the PATH" in usage_error(check_srun)


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ("", {}),
        ("srun: error: n3: task 2: Exited with exit code 3\n", {2: 3}),
        ("srun: error: n1: tasks 4,6-7: Segmentation fault (core dumped)\n", {4: -11}),
        # The first is the cause; srun killed the others.
        ("srun: error: n3: task 2: Killed\nsrun: error: n1: tasks 0-1: Terminated\n", {2: -9}),
        (
            "srun: error: Task launch for StepId=1.0 failed on node n3: Communication failure\n",
            {},
        ),
    ],
)
def test_parse_exit_codes_of_srun(text: str, codes: dict[int, int]) -> None:
    assert parse_exit_codes(text) == codes


def test_srun_first_error_is_reported(slurm: Path) -> None:
    write_slurm_tool(slurm, "srun", "echo srun: queued; echo 'srun: error: n3: no answer' >&2")
    ranks = start_srun(slurm)
    wait_until(ranks.has_launcher_ended, PATIENCE)
    assert ranks.get_last_error() == "srun: error: n3: no answer"
    assert ranks.get_exit_codes() == {}
    ranks.evidence.hellos[0] = make_hello(0, step="17.3")
    ranks.kill()
    assert not (slurm / "scancel.args").exists(), "the step has ended by itself"


def test_srun_step_is_killed(slurm: Path) -> None:
    ranks = start_srun(slurm, "n2")
    args = (slurm / "srun.args").read_text().split()
    assert args[0] == f"{slurm}/logs"
    assert "--nodelist=n2" in args
    assert f"--output={slurm}/logs/rank-%t.log" in args
    assert not ranks.has_launcher_ended()
    ranks.evidence.hellos[0] = make_hello(0, step="17.3")
    ranks.kill()
    assert ranks.has_launcher_ended()
    assert (slurm / "scancel.args").read_text().split() == ["--signal=KILL", "17.3"]
