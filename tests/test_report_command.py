import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from reports_fixtures import collective, make_plan, make_run, ok, write_run

from bench.errors import UserError
from bench.runs import load_run
from reports.commands import EXPORTS, TOOLS, export, import_files, report


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


# --- import ---

OSU = "# OSU MPI Allreduce Latency Test v7.5\n# Size       Avg Latency(us)\n1024                   10.00\n"


def test_each_file_becomes_a_run_whose_folder_is_printed(tmp_path: Path) -> None:
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for file in files:
        file.write_text(OSU)
    words = [*map(str, files), "--nproc", "3", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(import_files, words)
    assert result.exit_code == 0
    runs = [load_run(Path(line)) for line in result.output.splitlines()]
    assert [run.records[0].details["source"]["file"] for run in runs] == ["a.txt", "b.txt"]
    assert {run.path.parent for run in runs} == {tmp_path / "out"}
    assert {run.info.plan.nproc for run in runs} == {3}


def test_the_tool_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(OSU)
    result = CliRunner().invoke(import_files, [str(tmp_path / "a.txt"), "--nproc", "2", "--from", "nccl-tests"])
    assert "holds no table of nccl-tests" in str(result.exception)


def test_a_file_of_no_known_format_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    result = CliRunner().invoke(import_files, [str(tmp_path / "a.txt")])
    assert isinstance(result.exception, UserError)


@pytest.mark.parametrize("words", [[], ["a.txt", "--from", "imb"], ["a.txt", "--nproc", "0"]])
def test_bad_import_options_are_refused(words: list[str]) -> None:
    assert CliRunner().invoke(import_files, words).exit_code == 2


def test_the_tools_are_those_that_can_be_read() -> None:
    from reports.imports import PARSERS

    assert tuple(PARSERS) == TOOLS


# --- export ---


@pytest.mark.parametrize("form", EXPORTS)
def test_an_export_goes_to_standard_output_or_a_file(run: Path, tmp_path: Path, form: str) -> None:
    result = CliRunner().invoke(export, [str(run), "--format", form])
    assert result.exit_code == 0
    assert "all_reduce_perf" in result.output
    assert result.output.startswith("{") is (form == "nccl-tests-json")
    target = tmp_path / "out.txt"
    written = CliRunner().invoke(export, [str(run), "--format", form, "-o", str(target)])
    assert (written.exit_code, written.output) == (0, "")
    assert target.read_text() == result.output


def test_an_export_needs_a_format(run: Path) -> None:
    result = CliRunner().invoke(export, [str(run)])
    assert result.exit_code == 2
    assert "--format" in result.output


def test_what_cannot_be_exported_is_the_users_error(run: Path, tmp_path: Path) -> None:
    lost = CliRunner().invoke(export, [str(tmp_path), "--format", "nccl-tests"])
    assert isinstance(lost.exception, UserError)
    nowhere = CliRunner().invoke(export, [str(run), "--format", "nccl-tests", "-o", str(tmp_path / "no" / "x.txt")])
    assert isinstance(nowhere.exception, UserError)
    assert "cannot be written" in str(nowhere.exception)
