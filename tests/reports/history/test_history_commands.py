"""``parbench history`` as a person meets it: what it prints, its exit codes, one sentence for bad input."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from parbench import cli
from parbench.reports.history.database import SCHEMA, open_history
from parbench.reports.regression.commands import FILE
from parbench.reports.regression.noise_floor import Floor, keep_floors
from tests.support.history_fixtures import write_history_run


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ours = ("PARBENCH_HISTORY", "PARBENCH_FLOOR")
    for name in (
        *ours,
        "GITHUB_HEAD_REF",
        "GITHUB_REF_NAME",
        "GITHUB_SHA",
        "CI_COMMIT_BRANCH",
        "CI_COMMIT_SHA",
    ):
        monkeypatch.delenv(name, raising=False)


def run(*words: str, **variables: str) -> Result:
    return CliRunner().invoke(cli.main, ["history", *words], env=variables)


def fine(*words: str, **variables: str) -> str:
    done = run(*words, **variables)
    assert done.exit_code == 0, done.output
    return done.stdout


def fill(count: int = 12, factor: float = 1.0, first: int = 0) -> None:
    for i in range(first, first + count):
        write_history_run(Path("runs"), i, factor)
    fine("add", "runs")


def test_add_and_list_use_the_named_file() -> None:
    write_history_run(Path("runs"), 0)
    first, again = (run("add", "runs", "--history", "a/b.sqlite").stderr for _ in range(2))
    assert (first, again) == (f"a new history: {Path('a/b.sqlite').absolute()}\n", "")
    assert "run-000" in fine("list", PARBENCH_HISTORY="a/b.sqlite")
    assert not FILE.exists()
    assert fine("add", "runs/run-000", "--commit", "abc") == "added run-000\n"
    assert fine("add", "runs/run-000") == "unchanged run-000\n"
    assert FILE.exists()
    assert "run-000" in fine("list")
    assert "0 runs" in fine("list", "--branch", "topic")


def test_list_shows_newest_runs_and_notes() -> None:
    fill(2)
    write_history_run(Path("runs"), 2)
    fine("add", "runs", "--commit", "0123456789abcdef")
    fine("annotate", "run-000", "--note", "meant so")
    first, head, *rest = fine("list").splitlines()
    assert first == "3 runs"
    assert head.split() == ["run", "started", "branch", "commit", "preset", "series", "bad"]
    assert rest[0].split() == [
        "run-002",
        "2026-01-03T00:00:00.000Z",
        "main",
        "0123456789ab",
        "node",
        "2",
        "0",
    ]
    assert rest[-1] == "meant at run-000, *: meant so"
    assert fine("list", "--branch", "topic") == "0 runs\nmeant at run-000, *: meant so\n"


def test_add_takes_branch_and_commit_from_ci() -> None:
    write_history_run(Path("runs"), 0)
    table = (
        ({"GITHUB_REF_NAME": "release", "GITHUB_SHA": "abc"}, "release"),
        ({"GITHUB_HEAD_REF": "topic", "GITHUB_REF_NAME": "12/merge", "GITHUB_SHA": "abc"}, "topic"),
        ({"GITHUB_HEAD_REF": "", "GITHUB_REF_NAME": "main", "GITHUB_SHA": "abc"}, "main"),
        ({"CI_COMMIT_BRANCH": "nightly", "CI_COMMIT_SHA": "abc"}, "nightly"),
        ({"GITHUB_SHA": "abc"}, "main"),
    )
    for i, (variables, branch) in enumerate(table):
        fine("add", "runs", "--history", f"{i}.sqlite", **variables)
        with open_history(Path(f"{i}.sqlite")) as kept:
            assert [(line.branch, line.commit) for line in kept.runs()] == [(branch, "abc")], (
                variables
            )


def test_add_moves_a_run_to_a_given_branch() -> None:
    write_history_run(Path("runs"), 0)
    assert fine("add", "runs", "--branch", "wrong") == "added run-000\n"
    assert fine("add", "runs") == "unchanged run-000\n", "a default means nothing"
    assert fine("add", "runs", GITHUB_REF_NAME="nightly") == "unchanged run-000\n", (
        "nor does a later job's branch"
    )
    assert (
        fine("add", "runs", "--branch", "main", "--commit", "abc")
        == "moved run-000: branch main, commit abc\n"
    )
    assert fine("add", "runs", "--commit", "abc") == "unchanged run-000\n"
    assert "run-000" in fine("list", "--branch", "main")
    assert "0 runs" in fine("list", "--branch", "wrong")


def test_check_exit_code_and_floors() -> None:
    fill(3)
    assert run("check").exit_code == 0
    assert run("check", "--fail-on-unknown").exit_code == 3
    fill(9, first=3)
    assert "2 SAME" in fine("check")
    fill(9, 1.1, first=12)
    failed = run("check")
    assert failed.exit_code == 1
    assert "2 SLOWER" in failed.stdout
    assert run("check", "run-011").exit_code == 0
    write_history_run(Path("alone"), 99, 1.3)
    held = [run("check", "alone/latest", "--branch", branch) for branch in ("main", "topic")]
    assert [one.exit_code for one in held] == [1, 0]
    assert held[1].stdout.startswith("Not enough history: 0 of 8 runs of topic")
    assert run("check", "--format", "markdown").stdout.startswith("## FAIL: 2 SLOWER of 2")
    assert json.loads(run("check", "--format", "json").stdout)["exit_code"] == 1
    assert run("check", "--floor", "15%").exit_code == 0
    found = Floor(
        series="", host="node-a", measured="2026-01-02T03:04:05Z", launches=20, noise=0.1, floor=0.3
    )
    with open_history(FILE) as kept:
        floors = dict.fromkeys((one.fingerprint for one in kept.series().values()), found)
    keep_floors(Path("floor.json"), floors)
    assert "floor 30.0 %" in fine("check", "--floor", "floor.json")
    keep_floors(Path("runs/floor.json"), floors)
    assert run("check", "--floor", "3%").exit_code == 1, "a percentage stands alone"
    assert run("check").exit_code == 0, "the usual file"
    Path("runs/floor.json").unlink()
    fine("annotate", "run-012", "--note", "meant")
    assert "2 SAME" in fine("check")


def test_show_prune_and_export() -> None:
    fill(9)
    assert "1.00 ms from run-000 on (9 runs)" in fine("show", "*all_reduce*")
    assert len(json.loads(fine("show", "--format", "json"))["series"]) == 2
    assert fine("prune", "--keep", "3").split() == [f"run-{i:03}" for i in range(5, -1, -1)]
    fine("export", "out.csv", "--branch", "main")
    assert Path("out.csv").read_text().startswith("time,commit,run,")


def bad_files() -> None:
    Path("text.sqlite").write_text("nothing of the kind " * 50)
    with closing(sqlite3.connect("foreign.sqlite")) as connection, connection:
        connection.execute("CREATE TABLE t (x)")
    connection.close()
    fill(1)
    Path("newer.sqlite").write_bytes(FILE.read_bytes())
    with closing(sqlite3.connect("newer.sqlite")) as connection, connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA + 1}")
    connection.close()
    damaged = bytearray(FILE.read_bytes())
    damaged[4096:] = b"\xff" * (len(damaged) - 4096)
    Path("damaged.sqlite").write_bytes(damaged)


def test_bad_input_is_refused_and_files_are_kept() -> None:
    bad_files()
    before = {file: file.read_bytes() for file in Path().glob("*.sqlite")}
    table = [
        (["list", "--history", "text.sqlite"], "not an SQLite file"),
        (["list", "--history", "foreign.sqlite"], "of another program"),
        (["add", "runs", "--history", "foreign.sqlite"], "of another program"),
        (["check", "--history", "newer.sqlite"], f"schema {SCHEMA + 1} is newer than {SCHEMA}"),
        (["list", "--history", "damaged.sqlite"], "cannot be used as a history"),
        (
            ["check", "--history", "absent.sqlite"],
            "history not found: absent.sqlite; parbench history add RUN begins one",
        ),
        (["list", "--history", "runs"], "runs is a folder"),
        (["add", "runs", "--history", "text.sqlite/h.sqlite"], "cannot be opened"),
        (["annotate", "nope", "--note", "x"], "no run 'nope'"),
        (["check", "nope"], "no run 'nope'"),
        (["check", "--branch", "topic"], "no run of branch 'topic': it has main"),
        (["check", "--floor", "3"], "--floor '3'"),
        (["show", "nope"], "no series of the history fits 'nope'"),
        (["add", "absent"], "no such folder: absent"),
        (["add", "runs/run-000", "--branch", "last"], "--branch 'last'"),
        (["export", "absent/out.csv"], "cannot be written"),
    ]
    for words, told in table:
        refused = run(*words)
        assert refused.exit_code == 2, (words, refused.output)
        [line] = refused.stderr.strip().splitlines()
        assert told in line, words
    assert {file: file.read_bytes() for file in Path().glob("*.sqlite")} == before
