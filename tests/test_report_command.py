import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from reports_fixtures import collective, make_plan, make_run, ok, write_run

from bench.errors import UserError
from reports.commands import report


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path, make_run(make_plan([collective()]), [ok(collective())]))


def test_it_rebuilds_the_report_and_prints_where_it_is(run: Path) -> None:
    (run / "report.html").write_text("stale")
    result = CliRunner().invoke(report, [str(run)])
    assert (result.exit_code, result.output) == (0, f"{run / 'report.html'}\n")
    assert "all_reduce" in (run / "report.html").read_text()


@pytest.mark.parametrize("option", ["-o", "--output"])
def test_it_writes_another_file_if_asked(run: Path, tmp_path: Path, option: str) -> None:
    target = tmp_path / "other.html"
    result = CliRunner().invoke(report, [str(run), option, str(target)])
    assert (result.exit_code, result.output) == (0, f"{target}\n")
    assert target.exists()
    assert not (run / "report.html").exists()


def test_what_is_no_run_is_the_users_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(report, [str(tmp_path)])
    assert isinstance(result.exception, UserError)


def test_a_folder_is_no_file_to_write(run: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(report, [str(run), "-o", str(tmp_path)])
    assert result.exit_code == 2
    assert "is a directory" in result.output


def test_help_has_an_example() -> None:
    result = CliRunner().invoke(report, ["--help"])
    assert "Example: parbench report runs/" in result.output
    assert "Build the HTML report of RUN" in result.output


def test_help_needs_nothing_heavy() -> None:
    heavy = "{'matplotlib', 'torch', 'jinja2', 'rich', 'msgspec'}"
    code = f"import sys, reports.commands; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
