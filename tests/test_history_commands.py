"""``parbench history`` as a person meets it: what it prints, its exit codes, one sentence for bad input."""

import json
import sqlite3
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from history_fixtures import put

import parbench
from reports.comparing.history import open_history
from reports.comparing.history_commands import CHECKS, COURSES, FILE, history
from reports.comparing.history_schema import SCHEMA
from reports.comparing.noise_floor import Floor, keep_floors


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("PARBENCH_HISTORY", "PARBENCH_FLOOR", "GITHUB_HEAD_REF", "GITHUB_REF_NAME", "GITHUB_SHA"):
        monkeypatch.delenv(name, raising=False)
    for name in ("CI_COMMIT_BRANCH", "CI_COMMIT_SHA"):
        monkeypatch.delenv(name, raising=False)


def run(*words: str, **variables: str) -> Result:
    return CliRunner().invoke(parbench.main, ["history", *words], env=variables)


def fine(*words: str, **variables: str) -> str:
    done = run(*words, **variables)
    assert done.exit_code == 0, done.output
    return done.stdout


def fill(count: int = 12, factor: float = 1.0, first: int = 0) -> None:
    for i in range(first, first + count):
        put(Path("runs"), i, factor)
    fine("add", "runs")


def test_a_history_grows_and_is_listed() -> None:
    put(Path("runs"), 0)
    assert fine("add", "runs/run-000", "--commit", "abc") == "added run-000\n"
    assert fine("add", "runs/run-000") == "unchanged run-000\n"
    assert FILE.exists()
    assert "run-000" in fine("list")
    assert "0 runs" in fine("list", "--branch", "topic")


@pytest.mark.parametrize(
    ("variables", "branch"),
    [
        ({"GITHUB_REF_NAME": "release"}, "release"),
        ({"GITHUB_HEAD_REF": "topic", "GITHUB_REF_NAME": "12/merge"}, "topic"),
        ({"GITHUB_HEAD_REF": "", "GITHUB_REF_NAME": "main"}, "main"),
        ({"CI_COMMIT_BRANCH": "nightly"}, "nightly"),
        ({}, "main"),
    ],
)
def test_ci_says_the_branch(variables: dict[str, str], branch: str) -> None:
    put(Path("runs"), 0)
    fine("add", "runs", GITHUB_SHA="abc", **variables)
    with open_history(FILE) as kept:
        assert [(line.branch, line.commit) for line in kept.runs()] == [(branch, "abc")]


def test_a_branch_given_here_moves_a_run_and_says_so() -> None:
    put(Path("runs"), 0)
    assert fine("add", "runs", "--branch", "wrong") == "added run-000\n"
    assert fine("add", "runs") == "unchanged run-000\n", "a default means nothing"
    assert fine("add", "runs", GITHUB_REF_NAME="nightly") == "unchanged run-000\n", "nor does a later job's branch"
    assert fine("add", "runs", "--branch", "main", "--commit", "abc") == "moved run-000: branch main, commit abc\n"
    assert fine("add", "runs", "--commit", "abc") == "unchanged run-000\n"
    assert "run-000" in fine("list", "--branch", "main")
    assert "0 runs" in fine("list", "--branch", "wrong")


def test_an_export_says_its_branches_itself() -> None:
    put(Path("runs"), 0)
    fine("add", "runs", "--branch", "topic")
    fine("export", "out")
    fine("add", "runs", "--branch", "main")
    assert fine("add", "out", "--branch", "main") == "unchanged run-000\n"
    assert "run-000" in fine("list", "--branch", "main")


def test_a_measured_floor_counts_and_is_told() -> None:
    fill()
    fill(9, 1.1, first=12)
    assert run("check").exit_code == 1
    found = Floor(series="", host="node-a", measured="2026-01-02T03:04:05Z", launches=20, noise=0.1, floor=0.3)
    with open_history(FILE) as kept:
        names = [one.fingerprint for one in kept.series().values()]
    keep_floors(Path("floor.json"), dict.fromkeys(names, found))
    text = fine("check", "--floor", "floor.json")
    assert "2 SAME" in text
    assert "Measured on node-a for 2 series, the highest of them: floor 30.0 %, measured here on 2026-01-02" in text
    assert "measured here" not in run("check").stdout
    keep_floors(Path("runs/floor.json"), dict.fromkeys(names, found))
    assert "2 SAME" in fine("check")
    assert run("check", "--floor", "3%").exit_code == 1
    told = json.loads(fine("check", "--format", "json"))["series"][0]["measured_floor"]
    assert (told["floor"], told["launches"]) == (0.3, 20)


def test_the_file_may_stand_elsewhere() -> None:
    put(Path("runs"), 0)
    fine("add", "runs", "--history", "a/b.sqlite")
    assert "run-000" in fine("list", PARBENCH_HISTORY="a/b.sqlite")
    assert not FILE.exists()


def test_the_gate_passes_then_fails_then_passes_when_meant() -> None:
    fill()
    assert "2 SAME" in fine("check")
    fill(9, 1.1, first=12)
    failed = run("check")
    assert failed.exit_code == 1
    assert "2 SLOWER" in failed.stdout
    assert run("check", "run-011").exit_code == 0
    assert run("check", "--floor", "15%").exit_code == 0
    assert json.loads(run("check", "--format", "json").stdout)["exit_code"] == 1
    assert run("check", "--format", "markdown").stdout.startswith("## parbench history check")
    fine("annotate", "run-012", "--note", "meant")
    assert "meant" in fine("list")
    assert "2 SAME" in fine("check")


def test_what_cannot_be_told_fails_only_where_asked() -> None:
    fill(3)
    assert run("check").exit_code == 0
    assert run("check", "--fail-on-unknown").exit_code == 3


def test_courses_are_shown() -> None:
    fill(9)
    assert "1.00 ms from run-000 on (9 runs)" in fine("show", "*all_reduce*")
    assert len(json.loads(fine("show", "--format", "json"))["series"]) == 2


def test_old_runs_are_forgotten() -> None:
    fill(4)
    assert fine("prune", "--keep", "1").split() == ["run-002", "run-001", "run-000"]


def test_an_export_is_read_back() -> None:
    fill(3)
    assert fine("export", "out") == "3 runs in out\n"
    assert fine("add", "out", "--history", "copy.sqlite").count("added") == 3


def bad_files() -> None:
    Path("text.sqlite").write_text("nothing of the kind " * 50)
    with sqlite3.connect("foreign.sqlite") as connection:
        connection.execute("CREATE TABLE t (x)")
    connection.close()
    fill(1)
    Path("newer.sqlite").write_bytes(FILE.read_bytes())
    with sqlite3.connect("newer.sqlite") as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA + 1}")
    connection.close()
    damaged = bytearray(FILE.read_bytes())
    damaged[4096:] = b"\xff" * (len(damaged) - 4096)
    Path("damaged.sqlite").write_bytes(damaged)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["list", "--history", "text.sqlite"], "not an SQLite file"),
        (["list", "--history", "foreign.sqlite"], "of another program"),
        (["add", "runs", "--history", "foreign.sqlite"], "of another program"),
        (["check", "--history", "newer.sqlite"], f"schema {SCHEMA + 1} is newer than {SCHEMA}"),
        (["list", "--history", "damaged.sqlite"], "cannot be used as a history"),
        (["check", "--history", "absent.sqlite"], "does not exist"),
        (["annotate", "nope", "--note", "x"], "no run 'nope'"),
        (["check", "nope"], "no run 'nope'"),
        (["check", "--branch", "topic"], "no run of branch 'topic': it has main"),
        (["check", "--floor", "3"], "--floor '3'"),
        (["show", "nope"], "no series of the history fits 'nope'"),
        (["add", "absent"], "absent is no run"),
        (["add", "runs/run-000", "--history", "new.sqlite", "--branch", "last"], "--branch 'last'"),
    ],
)
def test_bad_input_is_one_sentence(words: list[str], told: str) -> None:
    bad_files()
    refused = run(*words)
    assert refused.exit_code == 2, refused.output
    [line] = refused.stderr.strip().splitlines()
    assert told in line


@pytest.mark.parametrize("name", sorted(history.commands))
def test_every_command_has_help_and_an_example(name: str) -> None:
    command = history.commands[name]
    assert command.help
    assert command.epilog
    assert f"parbench history {name}" in command.epilog
    for param in command.params:
        if isinstance(param, click.Option):
            assert param.help, param.name


def test_the_forms_are_those_that_there_are() -> None:
    fill(1)
    assert len({run("check", "--format", form).stdout[:20] for form in CHECKS}) == len(CHECKS)
    assert len({run("show", "--format", form).stdout[:20] for form in COURSES}) == len(COURSES)
