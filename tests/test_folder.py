"""A run's folder: a last line cut short is told, and whoever holds the lock is seen."""

import fcntl
from pathlib import Path

import pytest
from reports_fixtures import collective, make_plan, make_run, ok, write_run

from bench.errors import UserError
from bench.runs import load_run, open_writer
from reports.folder import is_written, warnings_of, write_whole


def folder(out: Path) -> Path:
    return write_run(out, make_run(make_plan([collective()], launches=2), [ok(collective()), ok(collective(), 1)]))


def test_a_whole_run_has_no_warnings(tmp_path: Path) -> None:
    assert warnings_of(load_run(folder(tmp_path))) == ()


def test_a_line_cut_short_is_told_with_what_to_do(tmp_path: Path) -> None:
    path = folder(tmp_path)
    file = path / "records.jsonl"
    file.write_bytes(file.read_bytes()[:-5])
    run = load_run(path)
    assert len(run.records) == 1
    (told,) = warnings_of(run)
    assert told.startswith("The last line of records.jsonl is being written, or was cut short by a kill")
    assert f"parbench run --resume {path}" in told


def test_an_empty_run_and_none_at_all_are_not_cut_short(tmp_path: Path) -> None:
    path = write_run(tmp_path, make_run(make_plan([collective()]), []))
    assert warnings_of(load_run(path)) == ()
    assert warnings_of(make_run(make_plan([]), [])) == ()


def test_whoever_writes_is_seen_and_not_disturbed(tmp_path: Path) -> None:
    path = folder(tmp_path)
    with open_writer(path) as writer:
        assert is_written(path)
        writer.write(ok(collective(), 2))
    assert not is_written(path)
    with (path / "records.jsonl").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nothing holds it after the look


def test_a_folder_without_records_is_written_by_nobody(tmp_path: Path) -> None:
    assert not is_written(tmp_path)


def test_a_file_is_written_whole_in_the_place_of_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    target.write_text("old")
    write_whole(target, b"new")
    assert target.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [target]


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    for target in (taken, tmp_path / "no" / "page.html"):
        with pytest.raises(UserError, match=f"{target} cannot be written: "):
            write_whole(target, b"new")
    assert list(tmp_path.iterdir()) == [taken]
