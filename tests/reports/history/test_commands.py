"""`parbench history`: its output, exit codes and refusals."""

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from parbench import cli
from parbench.reports.compare.thresholds import save_thresholds
from parbench.reports.history.database import SCHEMA_VERSION, open_history
from parbench.reports.options import HISTORY_FILE
from tests.support.reports.compare_fixtures import CASE, make_threshold
from tests.support.reports.history_fixtures import write_history_run

VARIABLES = [
    "PARBENCH_HISTORY",
    "PARBENCH_MIN_EFFECT",
    "GITHUB_HEAD_REF",
    "GITHUB_REF_NAME",
    "GITHUB_SHA",
    "CI_COMMIT_BRANCH",
    "CI_COMMIT_SHA",
]


@pytest.fixture(autouse=True)
def clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def invoke(*args: str, **variables: str) -> Result:
    return CliRunner().invoke(cli.main, ["history", *args], env=variables)


def run(*args: str, **variables: str) -> str:
    result = invoke(*args, **variables)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def usual_history(twelve_runs: Path) -> None:
    """Copy the history of twelve runs to its usual place."""
    HISTORY_FILE.parent.mkdir()
    shutil.copy(twelve_runs, HISTORY_FILE)


@pytest.fixture
def slower_history(usual_history: None) -> None:
    """Add four runs that are 10 % slower."""
    for i in range(12, 16):
        write_history_run(Path("slower"), i, 1.1)
    run("add", "slower")


def test_add_creates_the_usual_file() -> None:
    write_history_run(Path("runs"), 0)
    result = invoke("add", "runs/run-000", "--commit", "abc")
    assert result.stdout == "added run-000\n"
    assert str(HISTORY_FILE.absolute()) in result.stderr
    assert run("add", "runs/run-000") == "updated run-000\n"
    assert "run-000" in run("list")


def test_history_file_is_an_option_and_a_variable() -> None:
    write_history_run(Path("runs"), 0)
    run("add", "runs", "--history", "a/b.sqlite")
    assert "run-000" in run("list", PARBENCH_HISTORY="a/b.sqlite")
    assert not HISTORY_FILE.exists()


def test_add_is_refused_without_adding_or_creating() -> None:
    damaged = write_history_run(Path("runs"), 1)
    write_history_run(Path("runs"), 0)
    (damaged / "run.json").write_text("{")
    result = invoke("add", "runs")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "run-001" in result.stderr
    assert not HISTORY_FILE.exists()
    with open_history(HISTORY_FILE, create=True):
        pass
    assert "parbench history add RUN" in invoke("check").stderr


@pytest.mark.usefixtures("usual_history")
def test_annotate_and_remove_name_what_they_changed() -> None:
    assert run("annotate", "run-003", "--note", "new") == "annotated run-003: 2 series\n"
    result = invoke("annotate", "run-003", "--note", "new", "--series", "nope")
    assert (result.exit_code, "'nope'" in result.stderr) == (2, True)
    assert run("remove", "run-003") == "removed run-003\n"
    text = run("list")
    assert text.startswith("11 runs")
    assert "run-003" not in text


@pytest.mark.usefixtures("usual_history")
def test_check_names_the_runs_of_a_folder() -> None:
    folder = write_history_run(Path("new"), 12)
    assert f"such as {folder}" in invoke("check", "new").stderr


@pytest.mark.usefixtures("usual_history")
def test_list_shows_newest_runs_and_notes() -> None:
    write_history_run(Path("added"), 12)
    run("add", "added", "--commit", "0123456789abcdef")
    run("annotate", "run-000", "--note", "meant so")
    count, _, row, *_, note = run("list").splitlines()
    assert count == "13 runs"
    fields = ["run-012", "2026-01-13T00:00:00.000Z", "main", "0123456789ab", "node"]
    assert row.split() == fields
    assert "run-000, *: meant so" in note
    document = json.loads(run("list", "--format", "json"))
    assert document["runs"][0]["commit"] == "0123456789abcdef"
    assert document["annotations"][0]["note"] == "meant so"
    assert run("list", "--branch", "topic").startswith("0 runs")


@pytest.mark.parametrize(
    ("variables", "branch"),
    [
        (
            {"GITHUB_HEAD_REF": "topic", "GITHUB_REF_NAME": "1/merge", "GITHUB_SHA": "abc"},
            "topic",
        ),
        ({"GITHUB_HEAD_REF": "", "GITHUB_REF_NAME": "main", "GITHUB_SHA": "abc"}, "main"),
        ({"CI_COMMIT_BRANCH": "nightly", "CI_COMMIT_SHA": "abc"}, "nightly"),
    ],
)
def test_add_takes_branch_and_commit_from_ci(variables: dict[str, str], branch: str) -> None:
    write_history_run(Path("runs"), 0)
    run("add", "runs", **variables)
    with open_history(HISTORY_FILE) as history:
        [line] = history.list_runs()
    assert line.branch == branch
    assert line.commit == "abc"


@pytest.mark.usefixtures("slower_history")
def test_check_exit_code() -> None:
    assert "2 NO CHANGE" in run("check", "run-011")
    assert invoke("check", "run-002", "--fail-on-undecided").exit_code == 3
    slower = invoke("check")
    assert slower.exit_code == 1
    assert "2 SLOWER" in slower.stdout
    assert invoke("check", "--format", "markdown").stdout.startswith("## FAIL")
    assert json.loads(invoke("check", "--format", "json").stdout)["exit_code"] == 1
    run("annotate", "run-012", "--note", "intended")
    assert invoke("check").exit_code == 0


@pytest.mark.usefixtures("slower_history")
def test_check_uses_percentages_and_measured_floors() -> None:
    assert invoke("check", "--min-effect", "15%").exit_code == 0
    with open_history(HISTORY_FILE) as history:
        [series] = [series for series in history.list_series() if series.case == CASE]
    floors = {series.fingerprint: make_threshold(0.3)}
    save_thresholds(Path("runs/thresholds.json"), floors)  # the usual file
    text = invoke("check").stdout
    assert "1 SLOWER" in text
    assert "1 NO CHANGE" in text
    assert "2 SLOWER" in invoke("check", "--min-effect", "3%").stdout


@pytest.mark.usefixtures("usual_history")
def test_show_prune_and_export() -> None:
    assert "1.00 ms since run-000 (12 runs)" in run("show", "*all_reduce*")
    assert run("prune", "--keep", "10").split() == ["run-001", "run-000"]
    run("export", "out.csv", "--branch", "main")
    assert run("export", "-", "--branch", "main") == Path("out.csv").read_text()
    assert Path("out.csv").read_text().startswith("time,commit,id,")


def write_damaged_files() -> None:
    """Write a text, a foreign database, a history of a newer schema and a damaged one."""
    Path("text.sqlite").write_text("no database " * 50)
    with closing(sqlite3.connect("foreign.sqlite")) as connection:
        connection.execute("CREATE TABLE t (x)")
    shutil.copy(HISTORY_FILE, "newer.sqlite")
    with closing(sqlite3.connect("newer.sqlite")) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    content = HISTORY_FILE.read_bytes()
    Path("damaged.sqlite").write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))


def read_files() -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in Path().glob("*.sqlite")}


@pytest.mark.usefixtures("usual_history")
@pytest.mark.parametrize(
    ("command", "value"),
    [
        ("list --history text.sqlite", "text.sqlite"),
        ("list --history foreign.sqlite", "schema version 0"),
        ("check --history newer.sqlite", f"schema version {SCHEMA_VERSION + 1}"),
        ("list --history damaged.sqlite", "damaged.sqlite"),
        ("check --history absent.sqlite", "absent.sqlite"),
        ("check --branch topic", "'topic'"),
        ("check --min-effect 3", "--min-effect '3'"),
        ("show nope", "'nope'"),
        ("export absent/out.csv", "absent/out.csv"),
    ],
)
def test_bad_input_is_refused_and_files_are_kept(command: str, value: str) -> None:
    write_damaged_files()
    contents = read_files()
    result = invoke(*command.split())
    assert result.exit_code == 2
    [message, *_] = result.stderr.strip().splitlines()
    assert value in message
    assert read_files() == contents
