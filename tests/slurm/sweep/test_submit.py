"""Submitting: what is checked before, that all jobs are submitted or none, and what is said of it."""

import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import click.testing
import msgspec
import pytest

from parbench import cli
from parbench.bench.plan.catalogue import DEFINITIONS
from parbench.bench.text import UserError
from parbench.slurm.sweep.expand import expand
from parbench.slurm.sweep.folder import Sweep, load_jobs, load_sweep
from parbench.slurm.sweep.submit import batches, fit_partition, freeze, send, submit, too_long
from parbench.slurm.sweep.sweepfile import read_sweep_file
from parbench.slurm.system import Partition, Slurm, SlurmError
from tests.support.refusals import usage_error
from tests.support.sweeps import FakeSlurm

SMALL = """
nodes = [2, 4]
budget = "6s"
[[case]]
name = "all_reduce"
set = { size_bytes = "64K" }
"""
LAB = Partition(name="lab", nodes=4, limit_seconds=3600, is_default=True)
BIG = Partition(name="big", nodes=128, limit_seconds=86400)
REFUSAL = SlurmError("sbatch refused: too many jobs")


def cluster(
    refused: float = math.inf, error: BaseException = REFUSAL, *, cancels: bool = True
) -> FakeSlurm:
    """Return a Slurm of two partitions that refuses jobs from the ``refused``-th on."""
    slurm = FakeSlurm().set(parts=(LAB, BIG))

    def answer(words: tuple[str, ...]) -> None:
        if words[0] == "sbatch" and len(told(slurm, "sbatch")) >= refused:
            raise error
        if words[0] == "scancel" and not cancels:
            raise SlurmError("scancel did not answer within 30 s")

    return slurm.set(on_call=answer)


def told(slurm: FakeSlurm, program: str) -> list[list[str]]:
    return [words for name, *words in slurm.told if name == program]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def run(file: Path, slurm: Slurm, *, dry_run: bool = False) -> int:
    return submit(
        file,
        ("parbench.bench.plan.catalogue",),
        dry_run=dry_run,
        wait=False,
        out=file.parent / "sweeps",
        slurm=slurm,
    )


def frozen(file: Path, **changes: object) -> Sweep:
    read = read_sweep_file(file)
    return msgspec.structs.replace(freeze(read, file, expand(read, DEFINITIONS)[0]), **changes)


def test_a_sweep_is_written_submitted_noted_and_told(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm = cluster()
    assert run(file, slurm) == 0
    [folder] = (file.parent / "sweeps").iterdir()
    sweep, [job] = load_sweep(folder), load_jobs(folder)
    assert (sweep.name, sweep.file) == ("small", str(file))
    assert (sweep.python, sweep.working_directory) == (sys.executable, str(Path.cwd()))
    assert (job.id, job.nodes, job.points) == ("101", 4, tuple(point.id for point in sweep.points))
    assert told(slurm, "sbatch") == [[str(folder / "scripts" / "sweep.sh")]]
    assert (folder / "scripts" / "sweep.sh").read_text().endswith(f"slurm work {folder}\n")
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "point         label        time  node-hours",
        f"{job.points[0]}  4 nodes x 1  16 s       0.018",
        f"{job.points[1]}  2 nodes x 1  16 s      0.0089",
        "2 points in 1 job, about 32 s, 0.036 node-hours",
        "job 101: 2 points on 4 nodes",
        f"next: parbench slurm status {folder}",
    ]
    assert run(file, cluster()) == 0
    assert len(list(folder.parent.iterdir())) == 2, (
        "a second sweep of the file has a folder of its own"
    )
    file.write_text(f'mode = "array"\n{SMALL}')
    assert run(file, cluster()) == 0
    [folder] = [one for one in folder.parent.iterdir() if load_sweep(one).mode == "array"]
    sweep, jobs = load_sweep(folder), load_jobs(folder)
    assert [(job.id, job.name, job.nodes, job.points) for job in jobs] == [
        ("101", "4-nodes", 4, (sweep.points[0].id,)),
        ("102", "2-nodes", 2, (sweep.points[1].id,)),
    ]


def test_a_dry_run_shows_all_and_leaves_nothing_and_needs_no_slurm(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(f'mode = "array"\n{SMALL}')
    slurm = cluster()
    assert run(file, slurm, dry_run=True) == 0
    assert told(slurm, "sbatch") == []
    out = capsys.readouterr().out
    assert "2 points in 2 jobs, about 32 s, 0.027 node-hours" in out
    assert "#SBATCH --nodes=4" in out
    assert out.endswith("dry run: nothing was submitted; 1 script more, of the same form\n")
    monkeypatch.setenv("PATH", str(file.parent))
    done = click.testing.CliRunner().invoke(cli.main, ["slurm", "submit", str(file), "--dry-run"])
    assert done.exit_code == 0, done.output
    unchecked = "note: the partition, its nodes and its time limit were not checked: sinfo is not in the PATH"
    assert done.output.startswith(unchecked)
    with pytest.raises(
        UserError, match=r"^sbatch is not in the PATH: submit where Slurm's programs are installed$"
    ):
        run(file, Slurm())
    assert not (file.parent / "sweeps").exists()


def test_all_jobs_are_submitted_or_none(file: Path) -> None:
    file.write_text(f'mode = "array"\n{SMALL}'.replace("[2, 4]", "[2, 3, 4]"))
    why = "sbatch refused: too many jobs"
    kept = "jobs 101 are submitted and could not be cancelled (scancel did not answer within 30 s)"
    for slurm, cancelled, words in (
        (cluster(1), [], "nothing was submitted"),
        (cluster(3), [["101", "102"]], "nothing is left submitted: jobs 101 102 were cancelled"),
        (cluster(2, cancels=False), [["101"]], kept),
    ):
        assert usage_error(run, file, slurm) == f"{words}: {why}"
        assert told(slurm, "scancel") == cancelled
        assert any((file.parent / "sweeps").iterdir()) == bool(cancelled), (
            "a folder without jobs is removed"
        )


def test_a_job_that_cannot_be_noted_and_an_interrupt_take_back_what_was_submitted(
    file: Path, tmp_path: Path
) -> None:
    sweep, slurm = frozen(file, mode="array"), cluster(2, KeyboardInterrupt())
    (tmp_path / "scripts").mkdir()
    with pytest.raises(KeyboardInterrupt):
        send(sweep, tmp_path, batches(sweep), slurm)
    assert told(slurm, "scancel") == [["101"]]
    slurm = cluster()
    (tmp_path / "jobs.jsonl").unlink()
    (tmp_path / "jobs.jsonl").mkdir()
    with pytest.raises(
        UserError, match=r"nothing is left submitted: jobs 101 were cancelled: .*cannot be written"
    ):
        send(sweep, tmp_path, batches(sweep), slurm)
    assert told(slurm, "scancel") == [["101"]]


def test_bad_input_is_one_sentence_that_names_the_file_and_nothing_is_submitted(file: Path) -> None:
    for text, words in (
        ("nods = 2", "unknown field `nods`"),
        ("nodes = 8", "nodes(8) > 4, the nodes of partition lab"),
        ("nodes = 2\nexclude = [{ nodes = 2 }]", "$.exclude removes all 1 points"),
        (
            "nodes = 2\nslurm.partition = 'bog'",
            "no partition is named 'bog': there are lab or big; did you mean 'big'?",
        ),
        (
            "nodes = 2\nslurm.time = '2h'",
            "$.slurm.time(120 min) > 60 min, the limit of partition lab",
        ),
    ):
        file.write_text(f"{text}\n[[case]]\nname = 'all_reduce'\n")
        slurm = cluster()
        with pytest.raises(
            UserError, match=f"^sweep file {re.escape(str(file))}: .*{re.escape(words)}"
        ):
            run(file, slurm)
        assert told(slurm, "sbatch") == []
        assert not (file.parent / "sweeps").exists()
    done = click.testing.CliRunner().invoke(
        cli.main, ["slurm", "submit", str(file.parent / "absent.toml")]
    )
    assert (done.exit_code, "absent.toml cannot be read" in done.output) == (2, True)
    file.write_text(SMALL)
    (file.parent / "sweeps").write_text("a file")
    slurm = cluster()
    with pytest.raises(UserError, match="cannot hold a sweep: Not a directory"):
        run(file, slurm)
    assert told(slurm, "sbatch") == []


def test_the_default_partition_is_the_one_that_slurm_marks_and_one_that_is_down_is_noted(
    file: Path,
) -> None:
    for default, there in (((BIG,), "big"), ((), "none")):
        told = usage_error(fit_partition, frozen(file), default)
        assert told == f"$.slurm.partition is missing, and Slurm has no default: there are {there}"
    sweep = frozen(file)
    assert fit_partition(sweep, (LAB,)) == (sweep, [])
    down = replace(LAB, is_up=False)
    for name, notes in ((None, ["partition lab is not up: jobs wait"]), ("big", [])):
        assert (
            fit_partition(msgspec.structs.replace(sweep, partition=name), (BIG, down))[1] == notes
        )
    wide = msgspec.structs.replace(frozen(file, time_seconds=7200), partition="lab,big")
    assert fit_partition(wide, (LAB, BIG)) == (wide, []), (
        "the longest limit of the partitions named counts"
    )


def test_a_sweep_longer_than_allowed_is_cut_where_it_can_queue_itself_again(file: Path) -> None:
    file.write_text(f"repeat = 10\n{SMALL}")
    short, tiny = replace(LAB, limit_seconds=180), replace(LAB, limit_seconds=15)
    cut, notes = fit_partition(frozen(file), (short,))
    assert cut.time_seconds == 180
    assert notes == ["the job takes about 8 min, in parts of 3 min, all that partition lab allows"]
    with pytest.raises(
        UserError, match="a job needs 8 min, and partition lab allows 3 min: try mode = 'array'"
    ):
        fit_partition(frozen(file, requeue=False), (short,))
    with pytest.raises(UserError, match="a job needs 8 min, and partition lab allows 15 s"):
        fit_partition(frozen(file), (tiny,))
    assert too_long(frozen(file)) == too_long(frozen(file, time_seconds=16)) == []
    assert too_long(frozen(file, time_seconds=15)) == [
        "20 points of up to 16 s may not fit into jobs of 15 s, and would be postponed"
    ]
