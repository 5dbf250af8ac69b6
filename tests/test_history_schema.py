"""The history's file: refused with one sentence if it is not ours; one transaction is kept whole or not at all."""

import sqlite3
import threading
from pathlib import Path

import pytest

from bench.errors import UserError
from reports.comparing import history_schema
from reports.comparing.history_schema import APPLICATION, SCHEMA, open_database, writing


def refused(path: Path, *, create: bool = True) -> str:
    with pytest.raises(UserError) as error, open_database(path, create=create) as connection:
        connection.execute("SELECT count(*) FROM run").fetchone()
    assert "\n" not in str(error.value)
    return str(error.value)


def made(path: Path) -> Path:
    with open_database(path, create=True):
        pass
    return path


def test_a_new_file_is_made_with_its_folder_and_read_again(tmp_path: Path) -> None:
    path = made(tmp_path / "deep" / "history.sqlite")
    with open_database(path) as connection:
        assert connection.execute("SELECT count(*) FROM run").fetchone() == (0,)
        assert connection.execute("PRAGMA user_version").fetchone() == (SCHEMA,)
        assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION,)


def test_an_absent_file_is_refused_where_none_is_to_be_made(tmp_path: Path) -> None:
    told = refused(tmp_path / "absent.sqlite", create=False)
    assert "absent.sqlite" in told
    assert "parbench history add" in told
    assert not (tmp_path / "absent.sqlite").exists()


def test_an_empty_file_is_begun_only_by_adding(tmp_path: Path) -> None:
    path = tmp_path / "empty.sqlite"
    path.touch()
    assert "is empty" in refused(path, create=False)
    assert path.stat().st_size == 0
    made(path)
    assert path.stat().st_size > 0


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database " * 100)
    assert "not an SQLite file" in refused(path)
    assert path.read_text().startswith("not a database"), "and left alone"


def test_another_programs_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE run (name TEXT)")
    connection.close()
    before = path.read_bytes()
    assert "another program" in refused(path)
    assert path.read_bytes() == before


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    path = made(tmp_path / "history.sqlite")
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA + 1}")
    connection.close()
    assert f"schema {SCHEMA + 1} is newer than {SCHEMA}" in refused(path)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = made(tmp_path / "history.sqlite")
    content = bytearray(path.read_bytes())
    content[4096 : len(content)] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)
    assert "cannot be used as a history" in refused(path)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    assert "is a folder" in refused(tmp_path)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot be opened" in refused(tmp_path / "file" / "history.sqlite")


def insert_and_stop(connection: sqlite3.Connection) -> None:
    with writing(connection):
        connection.execute("INSERT INTO beside VALUES (NULL, 'x')")
        raise RuntimeError("stop")


def test_a_block_that_fails_leaves_nothing(tmp_path: Path) -> None:
    path = made(tmp_path / "history.sqlite")
    with open_database(path) as connection:
        with pytest.raises(RuntimeError, match="stop"):
            insert_and_stop(connection)
        assert connection.execute("SELECT count(*) FROM beside").fetchone() == (0,)
        with writing(connection):
            connection.execute("INSERT INTO beside VALUES (NULL, 'x')")
    with open_database(path) as connection:
        assert connection.execute("SELECT count(*) FROM beside").fetchone() == (1,)


def test_who_waits_too_long_for_another_writer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_schema, "_WAIT_SECONDS", 0.05)
    path = made(tmp_path / "history.sqlite")
    with open_database(path) as first, writing(first):
        assert "being written by other processes" in refused_to_write(path)


def refused_to_write(path: Path) -> str:
    with pytest.raises(UserError) as error, open_database(path) as second, writing(second):
        pass
    return str(error.value)


def test_writers_that_make_the_same_file_at_once_make_it_once(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite"
    start = threading.Barrier(4)
    failed: list[BaseException] = []

    def make() -> None:
        start.wait()
        try:
            made(path)
        except BaseException as error:  # noqa: BLE001 - shown by the assertion below
            failed.append(error)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    with open_database(path) as connection:
        assert connection.execute("SELECT count(*) FROM point").fetchone() == (0,)
