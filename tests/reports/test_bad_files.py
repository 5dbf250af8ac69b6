"""A damaged file is one error message that names it, and no traceback."""

import gzip
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from parbench import cli
from parbench.bench.files import MAX_BYTES
from tests.support.paths import TESTS

STEPS = TESTS / "golden" / "runs" / "steps"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(STEPS, tmp_path / "run"))


def invoke(*words: str) -> Result:
    done = CliRunner().invoke(cli.main, words)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def assert_refused(message: str, *words: str) -> None:
    done = invoke(*words)
    assert done.exit_code == 2, done.output
    [line] = done.stderr.strip().splitlines()
    assert line.startswith("parbench: ")
    assert message in line


BAD_RUNS = {
    "truncated JSON": (b'{"id": ', "run.json is not what parbench wrote"),
    "wrong type": (b'{"schema": 2, "id": 7}', "run.json is not what parbench wrote"),
    "not UTF-8": (b'{"id": "\xff"}', "run.json is not what parbench wrote"),
    "nested too deeply": (b"[" * 100_000, "run.json is not what parbench wrote"),
    "newer schema": (b'{"schema": 99}', "schema 99 is newer"),
    "missing": (None, "no readable run.json"),
}


@pytest.mark.parametrize("name", BAD_RUNS)
def test_show_refuses_a_bad_run_json(run: Path, name: str) -> None:
    content, message = BAD_RUNS[name]
    (run / "run.json").unlink()
    if content is not None:
        (run / "run.json").write_bytes(content)
    assert_refused(message, "show", str(run))


def test_show_refuses_a_file_that_is_too_large(run: Path) -> None:
    with (run / "run.json").open("r+b") as file:
        file.truncate(MAX_BYTES + 1)
    assert_refused("run.json has ", "show", str(run))


def test_show_leaves_a_bad_record_out_and_compare_refuses_it(run: Path) -> None:
    records = run / "records.jsonl"
    lines = records.read_bytes().splitlines(keepends=True)
    for bad in (b"{}\n", b'{"schema": 2, "case": 7}\n', b"[" * 100_000 + b"\n"):
        records.write_bytes(bad + b"".join(lines[1:]))
        done = invoke("show", "--all", str(run))
        assert done.exit_code == 4
        assert "1 line of records.jsonl cannot be read" in " ".join(done.stdout.split())
        assert_refused("records.jsonl, line 1 is no record", "compare", str(run), str(STEPS))


def test_report_leaves_a_damaged_timeline_out(run: Path) -> None:
    [trace] = (run / "traces").glob("*.gz")
    for content in (b"text", gzip.compress(b"{}"), trace.read_bytes()[:-20]):
        trace.write_bytes(content)
        assert invoke("report", str(run), "-o", str(run / "report.html")).exit_code in (0, 4)


def test_history_refuses_what_is_not_a_database(run: Path) -> None:
    file = run / "history.sqlite"
    file.write_text("not a database " * 100)
    assert_refused("not an SQLite file", "history", "list", "--history", str(file))
