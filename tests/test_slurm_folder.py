"""A submitted sweep's folder: one for each, written whole, read back as it was; its plan files are the runs' plans."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bench.errors import UserError
from bench.planfile import read_plan_file
from slurm.folder import (
    FOLDERS,
    Job,
    append_job,
    create_folder,
    load_jobs,
    load_sweep,
    plan_path,
    plan_text,
    runs_path,
    slug,
    write_sweep,
)
from slurm.points import Point, PointCase, Sweep, make_point


def point(**given: Any) -> Point:
    usual: dict[str, Any] = {"nodes": 2, "ntasks_per_node": 1, "placement": "block"}
    more = {"repeat": 1, "environment": "", "variables": {}, "cases": (PointCase(name="all_reduce"),), "seconds": 16.0}
    return make_point(**{**usual, **more, **given})


def sweep(*points: Point, **given: Any) -> Sweep:
    usual: dict[str, Any] = {"name": "s", "file": "/s.toml", "created": "now", "mode": "one", "python": "python"}
    return Sweep(**{**usual, "points": points, "working_directory": "/", **given})


def job(number: int) -> Job:
    return Job(id=str(number), name="sweep", nodes=2, time_seconds=60, submitted="now", points=("a", "b"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ring", "ring"),
        ("ring vs tree!", "ring-vs-tree"),
        ("../x", "x"),
        ("größe", "gr-e"),
        ("", "sweep"),
        ("..", "sweep"),
        ("x" * 300, "x" * 40),
    ],
)
def test_a_name_is_made_fit_for_files_and_for_slurm(name: str, expected: str) -> None:
    assert slug(name) == expected


def test_sweeps_begun_at_once_get_folders_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: create_folder(tmp_path / "new" / "sweeps", "s"), range(24)))
    assert len(set(paths)) == 24
    assert all({entry.name for entry in path.iterdir()} == set(FOLDERS) for path in paths)


def test_a_relative_folder_becomes_absolute_for_jobs_run_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert create_folder(Path("sweeps"), "s").parent == tmp_path / "sweeps"


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as caught:
        create_folder(tmp_path / "file", "s")
    assert str(caught.value).startswith(f"out = '{tmp_path}/file' cannot hold a sweep: Not a directory (")
    with pytest.raises(UserError, match=r"cannot hold a sweep: .*; choose another folder with --out$"):
        create_folder(Path("/proc/sweeps"), "s")


def test_a_full_disk_is_told_as_such_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="cannot hold a sweep: the disk is full"):
        create_folder(tmp_path, "s")
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    folder = create_folder(tmp_path, "s")
    whole = sweep(point(), point(nodes=4), options={"mem": "0", "exclusive": True}, link="200mbit")
    write_sweep(folder, whole)
    assert load_sweep(folder) == whole
    assert {path.name for path in (folder / "points").iterdir()} == {f"{one.id}.toml" for one in whole.points}
    assert plan_path(folder, "abc") == folder / "points" / "abc.toml"
    assert runs_path(folder, "abc") == folder / "runs" / "abc"


def test_what_is_no_sweep_or_of_a_newer_parbench_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is no sweep: it holds no readable sweep\.json$"):
        load_sweep(tmp_path)
    (tmp_path / "sweep.json").write_text('{"schema": 1, "name"')
    with pytest.raises(UserError, match=r"sweep\.json is not what parbench wrote: "):
        load_sweep(tmp_path)
    (tmp_path / "sweep.json").write_text('{"schema": 99, "points": 3}')
    with pytest.raises(UserError, match="has schema 99; this parbench reads up to 1: use a newer one"):
        load_sweep(tmp_path)


def test_a_folder_that_takes_no_more_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written: No such file"):
        write_sweep(tmp_path, sweep(point()))
    with pytest.raises(UserError, match=r"jobs\.jsonl cannot be written: No such file"):
        append_job(tmp_path / "absent", job(1))


def test_jobs_are_read_in_their_order_and_a_line_cut_short_is_passed_over(tmp_path: Path) -> None:
    assert load_jobs(tmp_path) == ()
    append_job(tmp_path, job(1))
    append_job(tmp_path, job(2))
    with (tmp_path / "jobs.jsonl").open("ab") as file:
        file.write(b'{"id": "3", "na')
    assert load_jobs(tmp_path) == (job(1), job(2))


def test_a_job_noted_after_a_line_cut_short_is_not_lost(tmp_path: Path) -> None:
    append_job(tmp_path, job(1))
    with (tmp_path / "jobs.jsonl").open("ab") as file:
        file.write(b'{"id": "2", "na')
    append_job(tmp_path, job(3))
    assert load_jobs(tmp_path) == (job(1), job(3))


def test_jobs_that_are_damaged_are_refused(tmp_path: Path) -> None:
    (tmp_path / "jobs.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"jobs\.jsonl is not what parbench wrote: "):
        load_jobs(tmp_path)


def test_a_plan_file_says_what_the_point_measures(tmp_path: Path) -> None:
    cases = (PointCase(name="all_reduce", set={"dtype": "float32,int8"}), PointCase(name="collective.*"))
    whole = sweep(preset="smoke", budget="6s", timeout="10", launches=2, backend="gloo", device="cpu", link="1gbit")
    file = tmp_path / "plan.toml"
    file.write_text(plan_text(whole, point(cases=cases)))
    found = read_plan_file(file)
    assert (found.preset, found.budget, found.timeout, found.launches) == ("smoke", "6s", "10", 2)
    assert (found.backend, found.device, found.nproc) == ("gloo", "cpu", None)
    assert [(case.name, case.set) for case in found.case] == [
        ("all_reduce", {"dtype": "float32,int8"}),
        ("collective.*", {}),
    ]


def test_a_plan_file_leaves_to_the_preset_what_the_sweep_leaves(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(plan_text(sweep(), point(cases=())))
    found = read_plan_file(file)
    assert (found.preset, found.budget, found.case) == (None, None, ())


@pytest.mark.parametrize("text", ['a"b\\c', "größe 😀", "a\x7fb\x01\t", "[x] = #1"])
def test_any_text_survives_a_plan_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(plan_text(sweep(), point(cases=(PointCase(name=text, set={text: text}),))), encoding="utf-8")
    [case] = read_plan_file(file).case
    assert (case.name, case.set) == (text, {text: text})


def test_a_label_of_several_lines_cannot_enter_a_plan_file(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(plan_text(sweep(), point(words=('x\nnproc = 3\n[[case]]\nname = "y"',), cases=())))
    assert read_plan_file(file).nproc is None
