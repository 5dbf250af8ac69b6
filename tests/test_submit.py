"""Submitting: what is checked before, that all jobs are submitted or none, and what is said of it."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import click.testing
import msgspec
import pytest
from clusters import in_cluster

import parbench
from bench.errors import UserError
from slurm.folder import load_jobs, load_sweep
from slurm.points import Sweep
from slurm.script import batches
from slurm.submit import choose_partitions, fit_partition, freeze, send, submit, too_long
from slurm.sweepfile import read_sweep_file
from slurm.system import Partition, Slurm, SlurmError

SMALL = """
nodes = [2, 4]
budget = "6s"
[[case]]
name = "all_reduce"
set = { size_bytes = "64K" }
"""
LAB = Partition(name="lab", nodes=4, limit_seconds=3600, is_default=True)
BIG = Partition(name="big", nodes=128, limit_seconds=86400)


@dataclass(frozen=True, kw_only=True)
class Scripted(Slurm):
    """A Slurm that says what the test lets it, and notes what it was asked; ``refuse_after`` jobs it takes no more."""

    sinfo: str = "lab*|4|1:00:00|up\nbig|128|1-00:00:00|up\n"
    refuse_after: int = 99
    cancels: bool = True
    asked: list[tuple[str, ...]] = field(default_factory=list)

    def check_program(self, name: str) -> None:
        """Find every program."""

    def call(self, program: str, *words: str) -> str:
        self.asked.append((program, *words))
        if program == "sinfo":
            return self.sinfo
        if program == "scancel" and not self.cancels:
            raise SlurmError("scancel did not answer within 30 s")
        number = len(self.told("sbatch"))
        if program == "sbatch" and number > self.refuse_after:
            raise SlurmError("sbatch refused: too many jobs")
        return f"{number}\n"

    def told(self, program: str) -> list[list[str]]:
        """Return the words of every call of a program."""
        return [words for name, *words in self.asked if name == program]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def run(file: Path, slurm: Slurm, *, dry_run: bool = False) -> int:
    modules = ("bench.definitions",)
    return submit(file, modules, dry_run=dry_run, wait=False, out=file.parent / "sweeps", slurm=slurm)


def refusal(file: Path, slurm: Scripted) -> str:
    """Return the sentence; nothing may be submitted, and nothing left."""
    with pytest.raises(UserError) as caught:
        run(file, slurm)
    assert list((file.parent / "sweeps").glob("*")) == []
    return str(caught.value)


def frozen(file: Path, **changes: object) -> Sweep:
    from bench.definitions import DEFINITIONS
    from slurm.expand import expand

    read = read_sweep_file(file)
    return msgspec.structs.replace(freeze(read, file, expand(read, DEFINITIONS).points), **changes)


def test_a_sweep_is_written_submitted_and_told(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slurm = Scripted()
    assert run(file, slurm) == 0
    [folder] = (file.parent / "sweeps").iterdir()
    sweep = load_sweep(folder)
    assert (sweep.name, sweep.file, sweep.python, sweep.working_directory) == (
        "small",
        str(file),
        sys.executable,
        str(Path.cwd()),
    )
    [job] = load_jobs(folder)
    assert (job.id, job.nodes, job.points, job.array) == ("1", 4, tuple(point.id for point in sweep.points), False)
    assert slurm.told("sbatch") == [["--parsable", str(folder / "scripts" / "sweep.sh")]]
    assert (folder / "scripts" / "sweep.sh").read_text().endswith(f"slurm work {folder}\n")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["point", *job.points]
    assert lines[3:] == [
        "2 points in 1 job, about 32 s, 0.036 node-hours",
        "job 1: 2 points on 4 nodes",
        f"next: parbench slurm status {folder}",
    ]


def test_each_array_is_noted_with_its_own_points(file: Path) -> None:
    file.write_text(f'mode = "array"\n{SMALL}')
    assert run(file, Scripted()) == 0
    [folder] = (file.parent / "sweeps").iterdir()
    sweep = load_sweep(folder)
    assert [(job.id, job.name, job.nodes, job.points, job.array) for job in load_jobs(folder)] == [
        ("1", "4-nodes", 4, (sweep.points[0].id,), True),
        ("2", "2-nodes", 2, (sweep.points[1].id,), True),
    ]


def test_two_sweeps_of_one_file_get_folders_of_their_own(file: Path) -> None:
    run(file, Scripted())
    run(file, Scripted())
    folders = list((file.parent / "sweeps").iterdir())
    assert len(folders) == 2
    assert all(len(load_jobs(folder)) == 1 for folder in folders)


def test_a_dry_run_shows_all_and_leaves_nothing(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(f'mode = "each"\n{SMALL}')
    slurm = Scripted()
    assert run(file, slurm, dry_run=True) == 0
    assert not (file.parent / "sweeps").exists()
    assert slurm.told("sbatch") == []
    out = capsys.readouterr().out
    assert "2 points in 2 jobs, about 32 s, 0.027 node-hours" in out
    assert "#SBATCH --nodes=4" in out
    assert out.endswith("dry run: nothing was submitted; 1 script more, of the same form\n")


def test_a_dry_run_works_without_slurm_and_says_what_was_not_checked(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(file, Slurm(), dry_run=True) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(
        "note: the partition, its nodes and its time limit were not checked: sinfo is not in the PATH"
    )


def test_without_slurm_nothing_else_is_begun(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"^sbatch is not in the PATH: submit where Slurm's programs are installed$"):
        run(file, Slurm())
    assert not (tmp_path / "sweeps").exists()


def test_when_the_first_job_is_refused_nothing_was_submitted_and_nothing_is_left(file: Path) -> None:
    slurm = Scripted(refuse_after=0)
    assert refusal(file, slurm) == "nothing was submitted: sbatch refused: too many jobs"
    assert slurm.told("scancel") == []


def test_when_a_later_job_is_refused_the_earlier_are_cancelled(file: Path) -> None:
    file.write_text(f'mode = "each"\nrepeat = 2\n{SMALL}')
    slurm = Scripted(refuse_after=2)
    with pytest.raises(UserError) as caught:
        run(file, slurm)
    assert str(caught.value) == (
        "nothing is left submitted, for jobs 1 2 were cancelled: sbatch refused: too many jobs"
    )
    assert slurm.told("scancel") == [["1", "2"]]


def test_jobs_that_cannot_be_cancelled_are_named(file: Path) -> None:
    file.write_text(f'mode = "each"\n{SMALL}')
    with pytest.raises(UserError) as caught:
        run(file, Scripted(refuse_after=1, cancels=False))
    assert str(caught.value) == (
        "jobs 1 are submitted and could not be cancelled (scancel did not answer within 30 s): sbatch refused: too "
        "many jobs"
    )


def test_a_job_that_cannot_be_noted_is_cancelled_too(file: Path, tmp_path: Path) -> None:
    sweep, slurm = frozen(file), Scripted()
    folder = tmp_path / "sweep"
    (folder / "scripts").mkdir(parents=True)
    (folder / "jobs.jsonl").mkdir()
    with pytest.raises(UserError, match=r"nothing is left submitted, for jobs 1 were cancelled: .*cannot be written"):
        send(sweep, folder, batches(sweep), slurm)
    assert slurm.told("scancel") == [["1"]]


def test_an_interrupt_takes_back_what_was_submitted(file: Path, tmp_path: Path) -> None:
    class Interrupted(Scripted):
        def sbatch(self, script: Path, *options: str) -> str:
            if len(self.told("sbatch")) == 1:
                raise KeyboardInterrupt
            return super().sbatch(script, *options)

    sweep, slurm = frozen(file, mode="each"), Interrupted()
    (tmp_path / "scripts").mkdir()
    with pytest.raises(KeyboardInterrupt):
        send(sweep, tmp_path, batches(sweep), slurm)
    assert slurm.told("scancel") == [["1"]]


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_submitted(file: Path) -> None:
    (file.parent / "sweeps").write_text("a file")
    slurm = Scripted()
    with pytest.raises(UserError, match="cannot hold a sweep: Not a directory"):
        run(file, slurm)
    assert slurm.told("sbatch") == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nods = 2", "unknown field `nods`"),
        ("nodes = 0", "Expected `int` >= 1 - at `$.nodes`"),
        ("nodes = 8", "nodes(8) > 4, the nodes of partition lab"),
        ("nodes = 2\nexclude = ['nodes == 2']", "$.exclude takes out all of the 1 points"),
        (
            "nodes = 2\nslurm.partition = 'bog'",
            "no partition is named 'bog': there are lab or big; did you mean 'big'?",
        ),
        ("nodes = 2\nslurm.time = '2h'", "$.slurm.time(120 min) > 60 min, the limit of partition lab"),
        ("[[zip]]\nnodes = [1, 2]\nntasks_per_node = [2]", "$.zip[0]: nodes has 2 values and ntasks_per_node has 1"),
    ],
)
def test_bad_input_is_one_sentence_that_names_the_file_and_nothing_is_submitted(
    file: Path, text: str, words: str
) -> None:
    file.write_text(f"{text}\n[[case]]\nname = 'all_reduce'\n")
    slurm = Scripted()
    found = refusal(file, slurm)
    assert found.startswith(f"sweep file {file}: ")
    assert words in found
    assert slurm.told("sbatch") == []


def test_the_default_partition_is_the_one_that_slurm_marks() -> None:
    assert choose_partitions(None, (BIG, LAB)) == (LAB,)
    assert choose_partitions("big,lab", (BIG, LAB)) == (BIG, LAB)
    with pytest.raises(UserError, match=r"^\$\.slurm\.partition is missing, and Slurm has no default: there are big$"):
        choose_partitions(None, (BIG,))
    with pytest.raises(UserError, match=r"there are none$"):
        choose_partitions("x", ())


def test_what_fits_is_left_as_it_is(file: Path) -> None:
    sweep = frozen(file)
    assert fit_partition(sweep, (LAB,)) == (sweep, [])
    assert fit_partition(msgspec.structs.replace(sweep, partition="big,lab"), (LAB, BIG))[1] == []


def test_a_partition_that_is_down_is_noted(file: Path) -> None:
    down = Partition(name="lab", nodes=4, limit_seconds=3600, is_default=True, is_up=False)
    assert fit_partition(frozen(file), (down,))[1] == ["partition lab is not up: jobs wait"]


def test_a_sweep_longer_than_allowed_is_cut_where_it_queues_itself_again_and_refused_where_it_cannot(
    file: Path,
) -> None:
    file.write_text(f"repeat = 10\n{SMALL}")
    short = Partition(name="lab", nodes=4, limit_seconds=180, is_default=True)
    cut, notes = fit_partition(frozen(file), (short,))
    assert cut.time_seconds == 180
    assert notes == ["the job takes about 8 min, in parts of 3 min, all that partition lab allows"]
    with pytest.raises(UserError, match=r"a job needs 8 min, and partition lab allows 3 min: set mode to array or"):
        fit_partition(frozen(file, requeue=False), (short,))
    tiny = Partition(name="lab", nodes=4, limit_seconds=15, is_default=True)
    with pytest.raises(UserError, match="a job needs 8 min, and partition lab allows 15 s"):
        fit_partition(frozen(file), (tiny,))


def test_points_longer_than_a_job_are_noted(file: Path) -> None:
    assert too_long(frozen(file)) == too_long(frozen(file, time_seconds=16)) == []
    assert too_long(frozen(file, time_seconds=15)) == [
        "2 points of up to 16 s may not fit into jobs of 15 s, and would be postponed"
    ]


def test_the_command_line_submits_and_ends_bad_input_with_two(file: Path) -> None:
    runner = click.testing.CliRunner()
    done = runner.invoke(parbench.main, ["slurm", "submit", str(file), "--dry-run"], env={"PATH": str(file.parent)})
    assert done.exit_code == 0, done.output
    assert "2 points in 1 job" in done.output
    file.write_text("nods = 2")
    done = runner.invoke(parbench.main, ["slurm", "submit", str(file), "--dry-run"], env={"PATH": str(file.parent)})
    assert done.exit_code == 2
    assert "unknown field `nods`" in done.output


REAL = """
P="$1 -m parbench slurm submit"
sed 's/PARTITION/lap/' sweep.toml > wrong.toml; $P wrong.toml; echo "code $?"
sed 's/PARTITION/lab/; s/2, 4/8/' sweep.toml > large.toml; $P large.toml; echo "code $?"
sed 's/PARTITION/lab/; s/^comment/licenses/' sweep.toml > refused.toml; $P refused.toml; echo "code $?"
ls sweeps
sed 's/PARTITION/lab/' sweep.toml > right.toml; $P right.toml; echo "code $?"
for second in $(seq 40); do [ -z "$(squeue -h)" ] && break; sleep 0.5; done
cat sweeps/*/logs/*.out | sort
scontrol show job -o | grep -o 'Comment=.*"b" # c' | uniq -c
"""


@pytest.mark.slow
@pytest.mark.measures
def test_a_real_slurm_takes_the_scripts_and_runs_them_as_they_were_meant(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "$SLURM_ARRAY_TASK_ID $SLURM_JOB_NUM_NODES $READY $*"\n')
    program.chmod(0o755)
    (tmp_path / "sweep.toml").write_text(
        f"""mode = "array"
nodes = [2, 4]
repeat = 2
python = {json.dumps(str(program))}
prologue = ["export READY='it is'"]
[[case]]
name = "all_reduce"
set = {{ size_bytes = "64K" }}
[slurm]
partition = "PARTITION"
[slurm.options]
comment = 'a "b" # c'
"""
    )
    done = in_cluster(["bash", "-c", REAL, "-", sys.executable], nodes=4, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "no partition is named 'lap': there are lab; did you mean 'lab'?" in done.stderr
    assert "nodes(8) > 4, the nodes of partition lab" in done.stderr
    assert "nothing was submitted: sbatch refused: " in done.stderr
    [folder] = (tmp_path / "sweeps").iterdir()
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("code")] == ["code 2", "code 2", "code 2", "code 0"]
    command = f"it is -P -m parbench slurm work {folder} --array"
    assert [line for line in lines if line.endswith("--array")] == [
        f"{task} {nodes} {command}" for task, nodes in ((0, 4), (1, 4), (2, 2), (3, 2))
    ]
    assert lines[-1].split() == ["4", "Comment=a", '"b"', "#", "c"]
