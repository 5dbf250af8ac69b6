"""Slurm's programs as they are called: what is asked of them, what is made of their words, and how they can fail."""

import math
import os
from pathlib import Path

import pytest

from bench.errors import UserError
from slurm.system import (
    ENDED,
    Partition,
    QueuedJob,
    Slurm,
    SlurmError,
    format_limit,
    parse_job_id,
    parse_limit,
    parse_pairs,
    parse_partitions,
    parse_queue,
)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that stands first in the PATH, before any Slurm that is installed."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def write(folder: Path, name: str, text: str) -> None:
    """Write a program that notes its words in ``<name>.words`` and then does what ``text`` says."""
    program = folder / name
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {folder}/{name}.words\n{text}\n')
    program.chmod(0o755)


def words(folder: Path, name: str) -> list[str]:
    return (folder / f"{name}.words").read_text().splitlines()


def test_sbatch_is_asked_for_the_bare_id_and_a_clusters_name_is_taken_off(programs: Path) -> None:
    write(programs, "sbatch", "echo '17;cluster'")
    assert Slurm().sbatch(Path("a b.sh"), "--hold") == "17"
    assert words(programs, "sbatch") == ["--parsable", "--hold", "a b.sh"]


@pytest.mark.parametrize(("text", "job"), [("17\n", "17"), ("17;c\n", "17"), ("site says hello\n18\n", "18")])
def test_a_job_id_is_the_last_word(text: str, job: str) -> None:
    assert parse_job_id(text) == job


@pytest.mark.parametrize("text", ["", "Submitted\n", "-3"])
def test_what_is_no_job_id_is_refused_as_told(text: str) -> None:
    with pytest.raises(SlurmError, match="told no job id"):
        parse_job_id(text)


def test_a_refusal_is_one_sentence_without_the_programs_own_prefix(programs: Path) -> None:
    write(programs, "sbatch", "echo 'sbatch: error: too big' >&2; echo 'sbatch: fatal: no' >&2; echo >&2; exit 1")
    with pytest.raises(SlurmError) as caught:
        Slurm().sbatch(Path("x.sh"))
    assert str(caught.value) == "sbatch refused: too big; no"
    assert isinstance(caught.value, UserError)


def test_a_program_that_fails_without_a_word_is_told_by_its_code(programs: Path) -> None:
    write(programs, "sinfo", "exit 3")
    with pytest.raises(SlurmError, match=r"^sinfo refused: it ended with 3$"):
        Slurm().partitions()


def test_a_program_that_does_not_answer_is_given_up(programs: Path) -> None:
    write(programs, "squeue", "exec sleep 30")
    with pytest.raises(SlurmError, match=r"^squeue did not answer within 0\.2 s$"):
        Slurm(timeout_seconds=0.2).queue()


def test_a_missing_program_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmError, match=r"^sbatch is not in the PATH: "):
        Slurm().check_program("sbatch")
    with pytest.raises(SlurmError, match=r"^scancel is not in the PATH: "):
        Slurm().scancel(["1"])
    (tmp_path / "sinfo").write_text("no program")
    (tmp_path / "sinfo").chmod(0o755)
    with pytest.raises(SlurmError, match=r"^sinfo cannot be started: "):
        Slurm().partitions()


def test_a_program_that_is_there_is_not_refused(programs: Path) -> None:
    write(programs, "sbatch", "exit 1")
    Slurm().check_program("sbatch")


def test_cancelling_nothing_calls_nothing(programs: Path) -> None:
    write(programs, "scancel", "exit 0")
    Slurm().scancel([])
    assert not (programs / "scancel.words").exists()
    Slurm().scancel(["4", "5"])
    assert words(programs, "scancel") == ["4", "5"]


def test_the_queue_is_read_one_line_for_each_task(programs: Path) -> None:
    write(programs, "squeue", "echo '12|3|15|RUNNING|None|2026-01-31T12:00:00|N/A|n[1-2]'; echo $SLURM_TIME_FORMAT >&2")
    assert Slurm().queue() == (
        QueuedJob(
            id="12",
            task=3,
            own_id="15",
            state="RUNNING",
            reason="None",
            start="2026-01-31T12:00:00",
            end="N/A",
            nodes="n[1-2]",
        ),
    )
    assert {"-h", "-r", "--me"} <= set(words(programs, "squeue"))


def test_times_have_the_standard_form_whatever_the_user_set(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    write(programs, "squeue", 'echo "1|N/A|1|RUNNING|None|$SLURM_TIME_FORMAT|N/A|"')
    assert Slurm().queue()[0].start == "standard"


def test_a_job_that_is_no_array_has_no_task_and_an_empty_queue_no_jobs() -> None:
    assert parse_queue("7|N/A|7|PENDING|Resources|N/A|N/A|\n")[0].task is None
    assert parse_queue("") == ()


def test_a_line_of_another_form_is_refused_with_the_form() -> None:
    with pytest.raises(SlurmError, match=r"squeue told '7 PENDING', which is not of the form %F"):
        parse_queue("7 PENDING")
    with pytest.raises(SlurmError, match=r"sinfo told 'lab 4', which is not of the form %P"):
        parse_partitions("lab 4")


def test_partitions_are_summed_over_lines_and_the_default_is_marked() -> None:
    assert parse_partitions("lab*|4|1:00:00|up\nbig|100|infinite|down\nbig|28|infinite|down\n") == (
        Partition(name="lab", nodes=4, limit_seconds=3600, is_default=True),
        Partition(name="big", nodes=128, limit_seconds=math.inf, is_up=False),
    )


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("5:30", 330),
        ("1:00:00", 3600),
        ("2-00:00:00", 172800),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("infinite", math.inf),
        ("UNLIMITED", math.inf),
        ("n/a", math.inf),
    ],
)
def test_a_time_limit_is_read_in_every_form_that_slurm_writes(text: str, seconds: float) -> None:
    assert parse_limit(text) == seconds


@pytest.mark.parametrize(
    ("seconds", "text"), [(60, "0:01:00"), (61, "0:02:00"), (3600, "1:00:00"), (90 * 3600, "90:00:00")]
)
def test_a_time_limit_is_written_in_whole_minutes_and_never_less(seconds: float, text: str) -> None:
    assert format_limit(seconds) == text
    assert parse_limit(text) >= seconds


def test_pairs_may_hold_blanks_and_equals_signs() -> None:
    line = "JobId=7 JobName=a b Comment=x=1 y NodeList=n[1-4] Socks/Node=* NtasksPerN:B:S:C=2:0:*:* Power="
    assert parse_pairs(line) == {
        "JobId": "7",
        "JobName": "a b",
        "Comment": "x=1 y",
        "NodeList": "n[1-4]",
        "Socks/Node": "*",
        "NtasksPerN:B:S:C": "2:0:*:*",
        "Power": "",
    }


def test_a_job_is_shown_for_each_task_and_an_unknown_one_is_nothing(programs: Path) -> None:
    write(programs, "scontrol", "echo 'JobId=2 JobState=PENDING'; echo; echo 'JobId=3 JobState=RUNNING'")
    assert [job["JobState"] for job in Slurm().show_job("2")] == ["PENDING", "RUNNING"]
    assert words(programs, "scontrol") == ["show", "job", "-o", "2"]
    write(programs, "scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert Slurm().show_job("2") == ()


def test_a_controller_that_does_not_answer_is_not_taken_for_an_unknown_job(programs: Path) -> None:
    write(programs, "scontrol", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(SlurmError, match="Unable to contact"):
        Slurm().show_job("2")


def test_requeue_nodes_and_host_names(programs: Path) -> None:
    write(programs, "scontrol", "echo n1; echo n2")
    Slurm().requeue("9")
    assert words(programs, "scontrol") == ["requeue", "9"]
    assert Slurm().host_names("n[1-2]") == ("n1", "n2")
    assert Slurm().host_names("") == ()
    write(programs, "sinfo", "echo 'n1|idle'; echo 'n2|down*'; echo 'n2|down*'")
    assert Slurm().node_states(["n1", "n2"]) == {"n1": "idle", "n2": "down*"}
    assert words(programs, "sinfo")[2:4] == ["-n", "n1,n2"]
    Slurm().node_states()
    assert "-n" not in words(programs, "sinfo")


def test_a_job_that_ended_is_told_from_one_that_may_come_back() -> None:
    assert "TIMEOUT" in ENDED
    assert not ENDED & {"PENDING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED"}
