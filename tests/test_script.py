"""Batch scripts: how many there are in each mode, every line of their text, and that a shell reads it as meant."""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slurm.points import Mode, Point, Sweep, make_point
from slurm.script import Batch, batches, indices, script_text


def point(nodes: int, tasks: int = 1, repeat: int = 1, seconds: float = 100.0) -> Point:
    return make_point(
        nodes=nodes,
        ntasks_per_node=tasks,
        placement="block",
        repeat=repeat,
        environment="",
        variables={},
        cases=(),
        seconds=seconds,
    )


POINTS = (point(4), point(4, 2), point(2), point(1, 2))


def sweep(mode: Mode = "one", **given: Any) -> Sweep:
    usual = {"name": "my sweep", "file": "/s.toml", "created": "now", "points": POINTS}
    return Sweep(**{**usual, "python": "/v/bin/python", "working_directory": "/home/me", "mode": mode, **given})


def text(mode: Mode = "one", **given: Any) -> str:
    whole = sweep(mode, **given)
    return script_text(whole, Path("/shared/s"), batches(whole)[0])


def directives(script: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH --")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def test_the_whole_script_of_one_allocation() -> None:
    script = text(
        time_seconds=1800,
        partition="gpu",
        options={"account": "me", "exclusive": True},
        prologue=("module load cuda", "source venv/bin/activate"),
        on_dead_node="go-on",
        warning_seconds=60,
    )
    assert (
        script
        == """#!/bin/bash
#SBATCH --job-name=my-sweep
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=2
#SBATCH --time=0:30:00
#SBATCH --signal=B:USR1@60
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/shared/s/logs/%j.out
#SBATCH --chdir=/home/me
#SBATCH --no-kill
#SBATCH --partition=gpu
#SBATCH --account=me
#SBATCH --exclusive
ulimit -c 0
trap '' USR1
module load cuda
source venv/bin/activate
exec /v/bin/python -P -m parbench slurm work /shared/s
"""
    )


def test_one_allocation_holds_all_points_and_the_most_nodes_and_tasks_of_any() -> None:
    [batch] = batches(sweep())
    assert batch == Batch(stem="sweep", points=POINTS, nodes=4, ntasks_per_node=2, time_seconds=600)


def test_an_array_for_each_number_of_nodes_whose_tasks_are_places_in_the_sweep() -> None:
    found = batches(sweep("array"))
    assert [(batch.stem, batch.nodes, batch.ntasks_per_node, batch.tasks) for batch in found] == [
        ("4-nodes", 4, 2, (0, 1)),
        ("2-nodes", 2, 1, (2,)),
        ("1-nodes", 1, 2, (3,)),
    ]
    assert all(batch.time_seconds == 240 for batch in found), "the time of one task, not of all"
    script = text("array")
    assert directives(script)["array"] == "0-1"
    assert directives(script)["output"] == "/shared/s/logs/%A_%a.out"
    assert script.endswith("slurm work /shared/s --array\n")


def test_a_job_for_each_point() -> None:
    found = batches(sweep("each"))
    assert [(batch.stem, batch.nodes, batch.tasks) for batch in found] == [
        (point.id, point.nodes, ()) for point in POINTS
    ]
    assert text("each").endswith(f"slurm work /shared/s --point {POINTS[0].id}\n")


def test_some_points_of_an_array_keep_their_places() -> None:
    whole = sweep("array")
    [batch] = batches(whole, [POINTS[1]])
    assert (batch.tasks, batch.points) == ((1,), (POINTS[1],))
    [one] = batches(sweep(), [POINTS[2], POINTS[3]])
    assert one.nodes == 2


def test_the_time_asked_for_goes_before_the_estimate() -> None:
    assert {batch.time_seconds for batch in batches(sweep("each", time_seconds=7200))} == {7200}


@pytest.mark.parametrize(("seconds", "warning"), [(3600, 120), (360, 120), (120, 40), (60, 20)])
def test_the_warning_leaves_a_short_job_two_thirds_of_its_time(seconds: int, warning: int) -> None:
    assert directives(text(time_seconds=seconds))["signal"] == f"B:USR1@{warning}"


def test_what_was_not_asked_for_is_not_told() -> None:
    found = directives(text(requeue=False))
    assert "no-requeue" in found
    assert not {"requeue", "no-kill", "partition", "array"} & found.keys()


def test_a_value_that_sbatch_would_split_or_cut_is_quoted_for_it() -> None:
    found = directives(text(options={"comment": 'a "b" # \\c'}, working_directory="/my data"))
    assert found["comment"] == '"a \\"b\\" # \\\\c"'
    assert found["chdir"] == '"/my data"'


def test_a_percent_sign_in_the_folder_is_not_taken_for_slurms_own() -> None:
    script = script_text(sweep(), Path("/a%jb"), batches(sweep())[0])
    assert directives(script)["output"] == "/a%%jb/logs/%j.out"


def test_a_shell_reads_the_command_as_it_was_meant(tmp_path: Path) -> None:
    program = tmp_path / "my python"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@" "$(ulimit -c)"\n')
    program.chmod(0o755)
    folder = tmp_path / "it's a $HOME; folder"
    whole = msgspec.structs.replace(sweep(), python=str(program))
    script = script_text(whole, folder, batches(whole)[0])
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        *("-P", "-m", "parbench", "slurm", "work", str(folder)),
        "0",
    ]
    assert shlex.split(script.splitlines()[-1])[0] == "exec"


@pytest.mark.parametrize(
    ("tasks", "expected"), [((0,), "0"), ((0, 1, 2, 3, 7), "0-3,7"), ((5, 3, 4), "3-5"), ((1, 3, 5), "1,3,5"), ((), "")]
)
def test_indices_are_written_as_ranges(tasks: tuple[int, ...], expected: str) -> None:
    assert indices(tasks) == expected


def test_a_warning_before_the_measuring_process_hears_it_does_not_end_the_job(tmp_path: Path) -> None:
    program = tmp_path / "python"
    hear = "import os, signal; signal.signal(10, lambda *_: print('heard')); os.kill(os.getpid(), 10)"
    program.write_text(f'#!/bin/sh\nkill -USR1 $$\nexec {sys.executable} -c "{hear}"\n')
    program.chmod(0o755)
    whole = msgspec.structs.replace(sweep(), python=str(program), prologue=("kill -USR1 $$",))
    (batch, *_) = batches(whole)
    done = subprocess.run(
        ["bash", "-c", script_text(whole, tmp_path, batch)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "heard\n")
