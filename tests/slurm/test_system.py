"""Slurm's programs as they are called: what is asked of them, what is made of their words, and how they can fail."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parbench.slurm.system import Partition, Slurm, SlurmError, format_limit, parse_limit


class Programs:
    """Programs that stand first in the PATH, before any Slurm that is installed; each notes its words."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def write(self, name: str, text: str) -> None:
        program = self._folder / name
        program.write_text(
            f'#!/bin/sh\nprintf "%s\\n" "$@" > {self._folder}/{name}.words\n{text}\n'
        )
        program.chmod(0o755)

    def words(self, name: str) -> list[str]:
        return (self._folder / f"{name}.words").read_text().splitlines()


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    return Programs(tmp_path, monkeypatch)


def refusal(call: Callable[..., object], *words: Any) -> str:
    with pytest.raises(SlurmError) as caught:
        call(*words)
    return str(caught.value)


def test_sbatch_is_asked_for_the_bare_id_and_what_is_none_is_refused_as_told(
    programs: Programs,
) -> None:
    programs.write("sbatch", "echo '17;cluster'")
    assert Slurm().sbatch(Path("a b.sh")) == "17"
    assert programs.words("sbatch") == ["--parsable", "a b.sh"]
    programs.write("sbatch", "echo site says hello; echo 18")
    assert Slurm().sbatch(Path("x.sh")) == "18"
    for text in ("", "Submitted", "-3"):
        programs.write("sbatch", f"echo '{text}'")
        assert refusal(Slurm().sbatch, Path("x.sh")) == f"sbatch told no job id but {text!r}"


def test_a_program_that_fails_is_one_sentence_without_its_own_prefix(
    programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs.write(
        "sbatch",
        "echo 'sbatch: error: too big' >&2; echo 'sbatch: fatal: no' >&2; echo >&2; exit 1",
    )
    Slurm().check_program("sbatch")
    assert refusal(Slurm().sbatch, Path("x.sh")) == "sbatch refused: too big; no"
    programs.write("sinfo", "exit 3")
    assert refusal(Slurm().partitions) == "sinfo refused: it ended with 3"
    programs.write("squeue", "exec sleep 30")
    assert refusal(Slurm(timeout_seconds=0.2).queue) == "squeue did not answer within 0.2 s"
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "sinfo").write_text("no program")
    assert refusal(Slurm().partitions).startswith("sinfo cannot be started: ")
    (tmp_path / "sbatch").unlink()
    assert refusal(Slurm().check_program, "sbatch").startswith("sbatch is not in the PATH: ")
    assert refusal(Slurm().scancel, ["1"]).startswith("scancel is not in the PATH: ")


def test_the_queue_has_a_line_for_each_task_and_partitions_are_summed_over_lines(
    programs: Programs,
) -> None:
    programs.write("squeue", "echo '12|15|RUNNING|None'; echo '7|7|PENDING|Resources'")
    found = [(one.id, one.own_id, one.state, one.reason) for one in Slurm().queue()]
    assert found == [("12", "15", "RUNNING", "None"), ("7", "7", "PENDING", "Resources")]
    assert {"-h", "-r", "--me"} <= set(programs.words("squeue"))
    programs.write("squeue", "")
    assert Slurm().queue() == ()
    programs.write(
        "sinfo",
        "echo 'lab*|4|1:00:00|up'; echo 'big|100|infinite|down'; echo 'big|28|infinite|down'",
    )
    assert Slurm().partitions() == (
        Partition(name="lab", nodes=4, limit_seconds=3600, is_default=True),
        Partition(name="big", nodes=128, limit_seconds=math.inf, is_up=False),
    )
    programs.write("squeue", "echo 7 PENDING")
    assert refusal(Slurm().queue).startswith("squeue told '7 PENDING', which is not of the form %F")
    for line in ("lab 4", "lab|many|infinite|up"):
        programs.write("sinfo", f"echo '{line}'")
        assert refusal(Slurm().partitions).startswith(
            f"sinfo told '{line}', which is not of the form %P"
        )


def test_times_are_read_in_every_form_of_slurm_s_and_written_in_whole_minutes() -> None:
    known = {
        "30": 1800,
        "5:30": 330,
        "1:00:00": 3600,
        "2-00:00:00": 172800,
        "1-12": 129600,
        "1-12:30": 131400,
    }
    for text, seconds in {
        **known,
        **dict.fromkeys(("infinite", "UNLIMITED", "n/a"), math.inf),
    }.items():
        assert parse_limit(text) == seconds, text
    for number, text in {
        60: "0:01:00",
        61: "0:02:00",
        3600: "1:00:00",
        90 * 3600: "90:00:00",
    }.items():
        assert format_limit(number) == text
        assert parse_limit(text) >= number, "never less"


def test_a_job_is_shown_for_each_task_and_an_unknown_one_is_nothing_but_silence_is_not(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    line = "JobId=7 JobName=a b Comment=x=1 y NodeList=n[1-4] Socks/Node=* NtasksPerN:B:S:C=2:0:*:* Power="
    first = {
        "JobId": "7",
        "JobName": "a b",
        "Comment": "x=1 y",
        "NodeList": "n[1-4]",
        "Socks/Node": "*",
    }
    programs.write("scontrol", f"echo '{line}'; echo; echo \"JobId=3 End=$SLURM_TIME_FORMAT\"")
    values = {**first, "NtasksPerN:B:S:C": "2:0:*:*", "Power": ""}
    assert Slurm().show_job("2") == (values, {"JobId": "3", "End": "standard"})
    assert programs.words("scontrol") == ["show", "job", "-o", "2"]
    programs.write("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert Slurm().show_job("2") == ()
    programs.write(
        "scontrol", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"
    )
    assert "Unable to contact" in refusal(Slurm().show_job, "2")


def test_requeue_cancel_nodes_and_host_names(programs: Programs, tmp_path: Path) -> None:
    programs.write("scancel", "exit 0")
    Slurm().scancel([])
    assert not (tmp_path / "scancel.words").exists(), "cancelling nothing calls nothing"
    Slurm().scancel(["4", "5"])
    assert programs.words("scancel") == ["4", "5"]
    programs.write("scontrol", "echo n1; echo n2")
    Slurm().requeue("9")
    assert programs.words("scontrol") == ["requeue", "9"]
    assert Slurm().host_names("n[1-2]") == ("n1", "n2")
    assert Slurm().host_names("") == ()
    programs.write("sinfo", "echo 'n1|idle'; echo 'n2|down*'; echo 'n2|down*'")
    assert Slurm().node_states(["n1", "n2"]) == {"n1": "idle", "n2": "down*"}
    assert programs.words("sinfo")[2:4] == ["-n", "n1,n2"]
    Slurm().node_states()
    assert "-n" not in programs.words("sinfo")
