import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from nodes_fixtures import EMULATION, sample_sweep
from reports_fixtures import bad, collective, make_plan, make_run, ok, pipeline_record, write_run
from traced import run_with, timeline, traced_record

from bench.errors import UserError
from bench.runs import load_run
from reports.commands import EXPORTS, REPORTS, TOOLS, export, import_files, report, show


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


@pytest.mark.parametrize(("form", "start"), [("markdown", "# parbench run-1"), ("csv", "case,"), ("json", '{"run":')])
def test_other_formats_go_to_standard_output_or_a_file(run: Path, tmp_path: Path, form: str, start: str) -> None:
    result = CliRunner().invoke(report, [str(run), "--format", form])
    assert result.exit_code == 0
    assert result.output.startswith(start)
    written = CliRunner().invoke(report, [str(run), "--format", form, "-o", str(tmp_path / "x")])
    assert written.output == f"{tmp_path / 'x'}\n"
    assert (tmp_path / "x").read_text() == result.output
    assert form in REPORTS


def test_several_runs_have_one_page_here(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = write_run(tmp_path, make_run(make_plan([collective()]), [ok(collective(), seconds=2e-3)]))
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(report, [str(run), str(other)])
    assert (result.exit_code, result.output) == (0, "report.html\n")
    assert "Side by side" in (tmp_path / "report.html").read_text()


def test_a_run_that_cannot_be_read_has_a_report_and_the_exit_code_4(run: Path) -> None:
    (run / "run.json").write_text('{"schema": 99}')
    result = CliRunner().invoke(report, [str(run)])
    assert result.exit_code == 4
    assert "schema 99 is newer than 1" in (run / "report.html").read_text()


def test_a_sweeps_report_is_in_its_folder(tmp_path: Path) -> None:
    sweep = sample_sweep(tmp_path / "links")
    result = CliRunner().invoke(report, [str(sweep)])
    assert (result.exit_code, result.output) == (0, f"{sweep / 'report.html'}\n")
    assert "Over nodes" in (sweep / "report.html").read_text()


def test_a_report_needs_a_run() -> None:
    assert CliRunner().invoke(report, []).exit_code == 2


def test_what_is_no_run_is_the_users_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(report, [str(tmp_path)])
    assert isinstance(result.exception, UserError)


def test_a_folder_is_no_file_to_write(run: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(report, [str(run), "-o", str(tmp_path)])
    assert result.exit_code == 2
    assert "is a directory" in result.output


def test_help_has_an_example() -> None:
    result = CliRunner().invoke(report, ["--help"])
    assert "parbench report runs/" in result.output
    assert "Build the report of RUN" in result.output


def test_help_needs_nothing_heavy() -> None:
    heavy = "{'matplotlib', 'torch', 'jinja2', 'rich', 'msgspec'}"
    code = f"import sys, reports.commands; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- show ---


def test_a_run_is_shown_with_its_own_exit_code(run: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(show, [str(run)])
    assert result.exit_code == 0
    assert result.output.endswith(f"{run}\n")
    assert "Verdict: fine: 1 ok" in result.output
    failed = write_run(tmp_path, make_run(make_plan([collective()]), [bad(collective())]))
    assert CliRunner().invoke(show, [str(failed)]).exit_code == 4


def test_a_sweep_is_shown_as_tables_over_nodes(tmp_path: Path) -> None:
    sweep = sample_sweep(tmp_path / "links")
    result = CliRunner().invoke(show, [str(sweep)])
    assert result.exit_code == 4
    first, *lines = result.output.splitlines()
    assert first == f"What runs 1-10 cannot show: {EMULATION}"
    assert {"Runs", "Wrong, hung or failed", "Over nodes", "Environments side by side"} <= set(lines)
    assert lines[-2].startswith("Verdict: not fine: run 11 of 11; 1 more")
    assert lines[-1] == str(sweep)
    assert not (sweep / "report.html").exists()


def test_a_finished_run_can_be_watched(run: Path) -> None:
    result = CliRunner().invoke(show, [str(run), "--watch"])
    assert result.exit_code == 0
    assert "Verdict: fine: 1 ok" in result.output


def test_a_folder_that_is_no_run_is_not_shown(tmp_path: Path) -> None:
    assert isinstance(CliRunner().invoke(show, [str(tmp_path)]).exception, UserError)


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
    from reports.exchange.imports import PARSERS

    assert tuple(PARSERS) == TOOLS


# --- export ---


@pytest.mark.parametrize("form", ["nccl-tests", "nccl-tests-json"])
def test_an_export_goes_to_standard_output_or_a_file(run: Path, tmp_path: Path, form: str) -> None:
    result = CliRunner().invoke(export, [str(run), "--format", form])
    assert result.exit_code == 0
    assert "all_reduce_perf" in result.output
    assert result.output.startswith("{") is (form == "nccl-tests-json")
    target = tmp_path / "out.txt"
    written = CliRunner().invoke(export, [str(run), "--format", form, "-o", str(target)])
    assert (written.exit_code, written.output) == (0, "")
    assert target.read_text() == result.output


def test_a_trace_is_exported_to_standard_output_or_a_file(tmp_path: Path) -> None:
    record = pipeline_record()
    run = write_run(tmp_path, make_run(make_plan([record.case, collective()]), [record, ok(collective())]))
    result = CliRunner().invoke(export, [str(run), "--format", "chrome-trace"])
    assert result.exit_code == 0
    assert {event["ph"] for event in json.loads(result.output)["traceEvents"]} == {"M", "X"}
    target = tmp_path / "trace.json"
    written = CliRunner().invoke(export, [str(run), "--format", "chrome-trace", "-o", str(target)])
    assert (written.exit_code, written.output) == (0, "")
    assert target.read_text() == result.output


def test_every_format_has_an_example_or_a_word_in_the_help() -> None:
    text = " ".join(CliRunner().invoke(export, ["--help"]).output.split())
    assert "parbench export runs/20260102T030405Z-node1-1a2b3c --format chrome-trace -o trace.json" in text
    assert "--format nccl-tests -o run.txt" in text
    assert all(form in text for form in EXPORTS)


def test_a_run_without_timelines_has_no_trace(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "trace.json"
    result = CliRunner().invoke(export, [str(run), "--format", "chrome-trace", "-o", str(target)])
    assert isinstance(result.exception, UserError)
    assert "holds no timeline to export" in str(result.exception)
    assert not target.exists()


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


def test_a_trace_for_each_step_goes_to_a_folder(tmp_path: Path) -> None:
    record = traced_record()
    run = run_with(tmp_path, [(record, timeline())]).path
    for target in (tmp_path / "new", tmp_path):
        result = CliRunner().invoke(export, [str(run), "--format", "chrome-trace", "-o", str(target)])
        assert (result.exit_code, result.output) == (0, f"{target / record.case.id}.json\n")


def test_files_for_analysis_need_a_folder(tmp_path: Path) -> None:
    record = traced_record()
    run = run_with(tmp_path, [(record, timeline())]).path
    for words in ([], ["-o", str(tmp_path / "x.json")]):
        result = CliRunner().invoke(export, [str(run), "--format", "hta", *words])
        assert isinstance(result.exception, UserError)
    result = CliRunner().invoke(export, [str(run), "--format", "hta", "-o", str(tmp_path / "hta")])
    assert result.output.splitlines() == [
        str(tmp_path / "hta" / record.case.id / f"rank-{rank}.json") for rank in (0, 1)
    ]
