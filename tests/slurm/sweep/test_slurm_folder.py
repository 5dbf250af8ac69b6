"""A submitted sweep's folder and its batch scripts: written whole, read back as they were, run as meant."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from parbench.bench.files import encode_json
from parbench.bench.plan.plan import Entry, PlanFile, read_plan_file
from parbench.bench.text import UserError
from parbench.slurm.sweep.folder import (
    FOLDERS,
    Mode,
    Point,
    Sweep,
    append_job,
    create_folder,
    load_jobs,
    load_sweep,
    plan_of,
    slug,
    write_sweep,
)
from parbench.slurm.sweep.submit import Batch, batches, script_text
from tests.support.refusals import usage_error
from tests.support.sweeps import make_job, make_point, make_sweep

POINTS = (
    make_point(0, nodes=4),
    make_point(1, nodes=4, ntasks_per_node=2),
    make_point(2),
    make_point(3, nodes=1, ntasks_per_node=2),
)


def test_sweeps_begun_at_once_get_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {
        "ring": "ring",
        "ring vs tree!": "ring-vs-tree",
        "../x": "x",
        "größe": "gr-e",
        "": "sweep",
        "..": "sweep",
    }
    for name, expected in {**known, "x" * 300: "x" * 40}.items():
        assert slug(name) == expected
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: create_folder(tmp_path / "new" / "sweeps", "s"), range(12)))
    assert len(set(paths)) == 12
    assert all({entry.name for entry in path.iterdir()} == set(FOLDERS) for path in paths)
    monkeypatch.chdir(tmp_path)
    assert create_folder(Path("sweeps"), "s").parent == tmp_path / "sweeps"


def test_what_takes_no_files_is_refused_and_left_empty(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told = usage_error(create_folder, tmp_path / "file", "s")
    assert told.startswith(f"out = '{tmp_path}/file' cannot hold a sweep: Not a directory (")
    assert told.endswith("; choose another folder with --out")
    with pytest.raises(UserError, match="cannot be written: No such file"):
        write_sweep(tmp_path, make_sweep([make_point()]))
    with pytest.raises(UserError, match=r"jobs\.jsonl cannot be written: No such file"):
        append_job(tmp_path / "absent", make_job("1", []))


def test_a_sweep_is_read_back_as_it_was_written_and_nothing_else_is_one(tmp_path: Path) -> None:
    folder = create_folder(tmp_path, "s")
    whole = make_sweep(
        [make_point(0), make_point(1)], options={"mem": "0", "exclusive": True}, link="200mbit"
    )
    write_sweep(folder, whole)
    assert load_sweep(folder) == whole
    assert {path.name for path in (folder / "points").iterdir()} == {
        f"{one.id}.json" for one in whole.points
    }
    for text, words in (
        ('{"schema": 1, "name"', r"sweep\.json is not what parbench wrote: "),
        ('{"schema": 99, "points": 3}', r"sweep\.json: schema 99 is newer than 1"),
    ):
        (folder / "sweep.json").write_text(text)
        with pytest.raises(UserError, match=words):
            load_sweep(folder)


def test_jobs_are_read_in_their_order_and_a_line_cut_short_is_passed_over(tmp_path: Path) -> None:
    assert load_jobs(tmp_path) == ()
    jobs = [make_job(number, [make_point()]) for number in ("1", "2", "3")]
    for one in jobs:
        append_job(tmp_path, one)
        assert load_jobs(tmp_path)[-1] == one
        with (tmp_path / "jobs.jsonl").open("ab") as file:
            file.write(b'{"id": "9", "na')
    assert load_jobs(tmp_path) == tuple(jobs)
    (tmp_path / "jobs.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"jobs\.jsonl is not what parbench wrote: "):
        load_jobs(tmp_path)


def test_load_refuses_bad_files_of_a_sweep_by_name(tmp_path: Path) -> None:
    for name, read in (("sweep.json", load_sweep), ("jobs.jsonl", load_jobs)):
        (tmp_path / name).write_bytes(b'{"id": "\xff"}\n')
        with pytest.raises(UserError, match=rf"{name} is not what parbench wrote: "):
            read(tmp_path)


def planned(file: Path, sweep: Sweep, one: Point) -> PlanFile:
    file.write_bytes(encode_json(plan_of(sweep, one)))
    return read_plan_file(file)


def test_a_plan_file_says_whatever_the_point_measures_and_no_more(tmp_path: Path) -> None:
    cases = (Entry(name="all_reduce", set={"dtype": "float32,int8"}), Entry(name="collective.*"))
    given: dict[str, Any] = {
        "preset": "smoke",
        "budget": "6s",
        "timeout": "10",
        "launches": 2,
        "backend": "gloo",
        "device": "cpu",
    }
    sweep = make_sweep([], plan=PlanFile(**given), link="1gbit")
    found = planned(tmp_path / "plan.json", sweep, make_point(cases=cases))
    assert {name: getattr(found, name) for name in given} == given
    assert found.nproc is None
    assert [(case.name, case.set) for case in found.case] == [
        (case.name, case.set) for case in cases
    ]
    found = planned(tmp_path / "plan.json", make_sweep([]), make_point(cases=()))
    assert (found.preset, found.budget, found.case) == (None, None, ())
    for text in ('a"b\\c', "größe 😀", "a\x7fb\x01\t", "[x] = #1"):
        one = make_point(cases=(Entry(name=text, set={text: text}),))
        [case] = planned(tmp_path / "plan.json", make_sweep([]), one).case
        assert (case.name, case.set) == (text, {text: text})


def sweep(mode: Mode = "one", **given: Any) -> Sweep:
    usual = {
        "name": "my sweep",
        "python": "/v/bin/python",
        "working_directory": "/home/me",
        "time_seconds": None,
    }
    return make_sweep(POINTS, **{**usual, "mode": mode, **given})


def script(mode: Mode = "one", folder: Path = Path("/shared/s"), **given: Any) -> str:
    whole = sweep(mode, **given)
    return script_text(whole, folder, batches(whole)[0])


def directives(text: str) -> dict[str, str]:
    lines = [
        line.removeprefix("#SBATCH --")
        for line in text.splitlines()
        if line.startswith("#SBATCH --")
    ]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


WHOLE = """#!/bin/bash
#SBATCH --job-name=my-sweep
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=2
#SBATCH --time=0:30:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/shared/s/logs/%j.out
#SBATCH --chdir=/home/me
#SBATCH --no-kill
#SBATCH --partition=gpu
#SBATCH --account=me
#SBATCH --exclusive
ulimit -c 0
module load cuda
source venv/bin/activate
exec /v/bin/python -m parbench slurm work /shared/s
"""


def test_the_whole_script_of_one_allocation_and_what_was_not_asked_for_is_not_told() -> None:
    slurm: dict[str, Any] = {"partition": "gpu", "options": {"account": "me", "exclusive": True}}
    prologue = ("module load cuda", "source venv/bin/activate")
    assert script(time_seconds=1800, prologue=prologue, on_dead_node="go-on", **slurm) == WHOLE
    found = directives(script(requeue=False))
    assert "no-requeue" in found
    assert not {"requeue", "no-kill", "partition", "array"} & found.keys()
    found = directives(
        script(
            folder=Path("/a%jb"), options={"comment": 'a "b" # \\c'}, working_directory="/my data"
        )
    )
    assert found["comment"] == '"a \\"b\\" # \\\\c"'
    assert found["chdir"] == '"/my data"'
    assert found["output"] == "/a%%jb/logs/%j.out"


def test_how_many_jobs_there_are_in_each_mode() -> None:
    [one] = batches(sweep())
    assert one == Batch(stem="sweep", points=POINTS, nodes=4, ntasks_per_node=2, time_seconds=180)
    arrays = batches(sweep("array"))
    assert [(batch.stem, batch.nodes, batch.ntasks_per_node, batch.tasks) for batch in arrays] == [
        ("4-nodes", 4, 2, (0, 1)),
        ("2-nodes", 2, 1, (2,)),
        ("1-nodes", 1, 2, (3,)),
    ]
    assert all(batch.time_seconds == 120 for batch in arrays), "the time of one task, not of all"
    told = directives(script("array"))
    assert (told["array"], told["output"]) == ("0-1", "/shared/s/logs/%A_%a.out")
    assert script("array").endswith("slurm work /shared/s --array\n")
    assert batches(sweep(time_seconds=7200))[0].time_seconds == 7200, (
        "the limit of the user takes precedence"
    )
    [some] = batches(sweep("array"), [POINTS[1]])
    assert (some.tasks, some.points) == ((1,), (POINTS[1],)), "a point keeps its place"
    assert [batch.nodes for batch in batches(sweep(), POINTS[2:])] == [2]


def test_script_quotes_the_command_for_the_shell(tmp_path: Path) -> None:
    program, folder = tmp_path / "my python", tmp_path / "it's a $HOME; folder"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@" "$(ulimit -c)"\n')
    program.chmod(0o755)
    text = script(folder=folder, python=str(program))
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["-m", "parbench", "slurm", "work", str(folder), "0"]
    assert text.splitlines()[-1].startswith("exec ")
