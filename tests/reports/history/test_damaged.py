"""Histories as nobody wrote them: each is one sentence with the file's name, and nothing is written elsewhere."""

import os
import sqlite3
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from history_fixtures import put
from hostile import BOMBS, bomb

from parbench import cli
from parbench.reports.history.database import open_history
from parbench.reports.history.entries import About, read_entry

COMMANDS = (
    ("list",),
    ("show",),
    ("show", "--format", "json"),
    ("check",),
    ("export", "kept"),
    ("export", "otava.csv", "--format", "otava"),
)


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("GITHUB_HEAD_REF", "GITHUB_REF_NAME", "CI_COMMIT_BRANCH", "PARBENCH_HISTORY", "PARBENCH_FLOOR"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "history.sqlite"
    with open_history(file, create=True) as found:
        for i in range(9):
            found.add(read_entry(put(tmp_path / "nights", i), About(branch="main")))
    return file


def run(*words: str) -> Result:
    return CliRunner().invoke(cli.main, words)


def sentences(file: Path, *commands: tuple[str, ...]) -> list[str]:
    """Return what the commands say that refuse the history; each one's error is a sentence that names the file."""
    told = []
    for words in commands:
        done = run(*(() if words[0] == "compare" else ("history",)), *words, "--history", str(file))
        assert "Traceback" not in done.stderr, (words, done.stderr)
        assert done.exit_code in (0, 1, 2, 3), (words, done.output)
        if done.exit_code == 2:
            assert done.stderr.startswith("parbench: "), words
            assert done.stderr.count("\n") == 1, words
            told.append(done.stderr)
    return told


def test_a_cell_that_holds_something_else_is_refused(history: Path) -> None:
    whole = history.read_bytes()
    compared = ("compare", "last:5", "nights/run-000")
    cells: list[tuple[str, str, Any]] = [
        ("point", "seconds", -1.0),
        ("point", "seconds", float("inf")),
        ("point", "seconds", "yesterday"),
        ("point", "seconds", 5e-324),
        ("point", "status", "fine"),
        ("point", "reason", b"\xff"),
        ("series", "content", "{}"),
        ("series", "content", ""),
        ("series", "content", "[" * 5000),
        ("series", "content", b"\xff\x00"),
        ("run", "id", "../../evil"),
        ("run", "id", "/evil"),
        ("run", "id", ""),
        ("run", "id", "a\x00b"),
        ("run", "started", b"\x00"),
        ("run", "num_bad", "many"),
        ("folder", "records", b""),
        ("folder", "records", b"text"),
        ("folder", "records", zlib.compress(bytes(100))[:-9]),
        ("folder", "info", zlib.compress(b"{}")),
        ("folder", "info", bomb(*BOMBS[0], wbits=15)),
        ("folder", "records", bomb(*BOMBS[0], wbits=15)),
    ]
    for table, column, cell in cells:
        number = "run = 9" if table in ("point", "folder") else "number = (SELECT max(number) FROM series)"
        number = "number = 9" if table == "run" else number
        with closing(sqlite3.connect(history)) as base, base:
            base.execute(f"UPDATE {table} SET {column} = ? WHERE {number}", (cell,))
        told = sentences(history, *COMMANDS, compared)
        assert told, (table, column, cell)
        assert all(str(history) in one for one in told), told
        history.write_bytes(whole)
    assert not sentences(history, *COMMANDS, compared)


def test_a_history_of_other_tables_views_or_triggers_is_refused_before_it_is_asked(history: Path) -> None:
    whole = history.read_bytes()
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x AS series, x AS run FROM n"
    for statements, name in (
        (("DROP TABLE counted", f"CREATE VIEW counted AS {endless}"), "counted"),
        (("CREATE TRIGGER evil AFTER INSERT ON run BEGIN DELETE FROM run; END",), "evil"),
        (("DROP TABLE beside",), "beside"),
        (("ALTER TABLE run ADD COLUMN more TEXT",), "run"),
        (("CREATE TABLE more (a)",), "more"),
    ):
        with closing(sqlite3.connect(history)) as base, base:
            for statement in statements:
                base.execute(statement)
        told = sentences(history, *COMMANDS, ("add", "nights/run-000"))
        assert len(told) == len(COMMANDS) + 1
        assert all(f"is no history as parbench makes it: look at {name}" in one for one in told), told
        history.write_bytes(whole)


def test_a_history_without_counts_is_one_of_before_they_were_kept(history: Path) -> None:
    with closing(sqlite3.connect(history)) as base, base:
        base.execute("DROP TABLE counted")
        base.execute("DROP TABLE facts")
    assert not sentences(history, *COMMANDS, ("add", "nights/run-000"))


def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("zero").symlink_to("/dev/zero")
    put(tmp_path / "nights", 0)
    for name in ("pipe", "zero"):
        told = sentences(Path(name), *COMMANDS, ("add", "nights/run-000"))
        assert len(told) == len(COMMANDS) + 1
        assert all(f"{name} is no regular file" in one for one in told)


def test_an_id_of_a_folder_that_leads_elsewhere_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = put(tmp_path / "nights", 0)
    before = (path / "run.json").read_text()
    for name in ("../../evil", "/evil", "", "a\\u0000b"):
        (path / "run.json").write_text(before.replace('"run-000"', f'"{name}"'))
        done = run("history", "add", "nights/run-000", "--history", "history.sqlite")
        assert done.exit_code == 2
        assert "run.json is not what parbench wrote" in done.stderr
    (path / "run.json").write_text(before.replace('"run-000"', '".."'))
    assert run("history", "add", "nights/run-000", "--history", "history.sqlite").exit_code == 0
    assert run("history", "export", "a/b/kept", "--history", "history.sqlite").exit_code == 0
    assert not list((tmp_path / "a").glob("run.json")) + list((tmp_path / "a" / "b").glob("run.json"))
    assert len(list((tmp_path / "a" / "b" / "kept").glob("*/run.json"))) == 1
    (path / "run.json").write_text(before)
    records = path / "records.jsonl"
    records.write_bytes(records.read_bytes() + b"{}\n")
    done = run("history", "add", "nights/run-000", "--history", "other.sqlite")
    assert done.exit_code == 2, "what a gate is held against has no gaps"
    assert "is no record" in done.stderr
