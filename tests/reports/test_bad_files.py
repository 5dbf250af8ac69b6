"""A damaged file is one error message that names it, without a traceback."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from parbench import cli
from tests.support.reports.report_rows import run_from_records
from tests.support.reports.reports_fixtures import collective_case, ok_record, write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    records = [ok_record(collective_case()), ok_record(collective_case("broadcast"))]
    return write_run(tmp_path, run_from_records(*records))


def invoke(*args: object) -> Result:
    result = CliRunner().invoke(cli.main, [str(arg) for arg in args])
    assert "Traceback" not in result.stderr
    return result


def assert_refused(message: str, *args: object) -> None:
    result = invoke(*args)
    assert result.exit_code == 2
    line = result.stderr.splitlines()[0]
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b'{"id": ', "run.json is damaged", id="truncated"),
        pytest.param(b'{"id": "\xff"}', "run.json is damaged", id="not-utf-8"),
        pytest.param(b"[" * 100_000, "run.json is damaged", id="nested-too-deeply"),
        pytest.param(b'{"schema": 99}', "has schema version 99", id="other-schema"),
    ],
)
def test_show_refuses_a_bad_run_json(run: Path, content: bytes, message: str) -> None:
    (run / "run.json").write_bytes(content)
    assert_refused(message, "show", run)


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(b'{"schema": 2, "case": 7}', id="wrong-type"),
        pytest.param(b"[" * 100_000, id="nested-too-deeply"),
    ],
)
def test_bad_record_is_refused(run: Path, line: bytes) -> None:
    records = run / "records.jsonl"
    first, _ = records.read_bytes().splitlines()
    records.write_bytes(records.read_bytes().replace(first, line))
    assert_refused("records.jsonl, line 1", "show", run)
    assert_refused("records.jsonl, line 1", "compare", run, run)
