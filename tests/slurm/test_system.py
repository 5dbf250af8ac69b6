"""Calls of Slurm's programs: their arguments, the values in their output, their failures."""

import math
import os
from datetime import datetime
from pathlib import Path

import pytest

from parbench.slurm.system import Slurm, get_end_time
from tests.support.refusals import usage_error
from tests.support.trees import write_tool


class Programs:
    """Shell scripts in place of Slurm's programs. Each writes its arguments to a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, name: str, script: str) -> None:
        write_tool(
            self.folder, name, f'printf "%s\\n" "$@" > {self.folder}/{name}.args\n{script}'
        )

    def args(self, name: str) -> list[str]:
        return (self.folder / f"{name}.args").read_text().splitlines()


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return Programs(tmp_path)


@pytest.mark.parametrize(
    ("output", "job_id"), [("17;cluster", "17"), ("site says hello\n18", "18")]
)
def test_sbatch_returns_the_job_id(output: str, job_id: str, programs: Programs) -> None:
    programs.write("sbatch", f"echo '{output}'")
    assert Slurm().sbatch(Path("a b.sh")) == job_id
    assert programs.args("sbatch") == ["--parsable", "a b.sh"]
    programs.write("sbatch", "echo Submitted")
    assert "'Submitted'" in usage_error(Slurm().sbatch, Path("a b.sh"))


def test_failed_program_is_reported_in_one_line(programs: Programs) -> None:
    script = "echo 'sbatch: error: too big' >&2; echo 'sbatch: fatal: no' >&2; exit 1"
    programs.write("sbatch", script)
    assert usage_error(Slurm().sbatch, Path("x.sh")) == "sbatch refused: too big; no"


def test_program_without_an_answer_times_out(programs: Programs) -> None:
    programs.write("squeue", "exec sleep 30")
    error = usage_error(Slurm(timeout_seconds=0.1).queue)
    assert error == "squeue did not answer within 0.1 s"


def test_missing_program_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "scancel cannot be started" in usage_error(Slurm().scancel, ["1"])


def test_queue_has_a_line_for_each_task(programs: Programs) -> None:
    lines = "echo '12|15|RUNNING|None|3'; echo '7|7|PENDING|Resources|N/A'"
    programs.write("squeue", lines)
    task, job = Slurm().queue()
    assert task.id == "12"
    assert task.own_id == "15"
    assert task.state == "RUNNING"
    assert task.task == 3
    assert job.task is None
    assert job.id == "7"
    assert job.reason == "Resources"
    assert {"-h", "-r", "--me"} <= set(programs.args("squeue"))


def test_show_job_reads_one_mapping_per_task(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    line = "JobId=7 JobName=a b Comment=x=1 y Socks/Node=* Power="
    programs.write("scontrol", f'echo "{line}"; echo; echo "JobId=3 End=$SLURM_TIME_FORMAT"')
    first, second = Slurm().show_job("2")
    values = {"JobName": "a b", "Comment": "x=1 y", "Socks/Node": "*", "Power": ""}
    assert first == {"JobId": "7", **values}
    assert second == {"JobId": "3", "End": "standard"}
    assert programs.args("scontrol") == ["show", "job", "-o", "2"]


def test_show_job_distinguishes_unknown_jobs_from_errors(programs: Programs) -> None:
    programs.write(
        "scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    )
    assert Slurm().show_job("2") == ()
    programs.write("scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    assert "Unable to contact" in usage_error(Slurm().show_job, "2")


def test_node_states_by_name(programs: Programs) -> None:
    programs.write("sinfo", "echo 'n1|idle'; echo 'n2|down*'; echo 'n2|down*'")
    assert Slurm().get_node_states(["n1", "n2"]) == {"n1": "idle", "n2": "down*"}
    assert programs.args("sinfo")[2:4] == ["-n", "n1,n2"]


@pytest.mark.parametrize(
    ("end", "seconds"),
    [
        ("2026-11-21T21:38:33", datetime(2026, 11, 21, 21, 38, 33).timestamp()),
        ("Unknown", math.inf),
    ],
)
def test_end_time_of_a_job(end: str, seconds: float) -> None:
    assert get_end_time({"EndTime": end}) == seconds
