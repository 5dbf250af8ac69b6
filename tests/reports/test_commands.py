"""The commands report, show, import and export: output, files, and refused arguments."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

import parbench
from parbench.bench.results.runs import load_run
from parbench.bench.text import UserError
from parbench.reports.commands import compare, export, import_files, report, show
from tests.support.reports.nodes_fixtures import (
    failed_node_run,
    make_sweep_point,
    scaling_run,
    write_sweep,
)
from tests.support.reports.report_rows import run_from_records
from tests.support.reports.reports_fixtures import (
    collective_case,
    failed_record,
    ok_record,
    write_run,
)
from tests.support.reports.traced import make_timeline, traced_record, write_traced_run

RUN = run_from_records(ok_record(collective_case()))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path, RUN)


def invoke(command: click.Command, *args: object) -> Result:
    return CliRunner().invoke(command, [str(arg) for arg in args])


def read_output(command: click.Command, *args: object) -> str:
    result = invoke(command, *args)
    assert result.exit_code == 0, result.output
    return result.output


def read_error(command: click.Command, *args: object) -> str:
    result = invoke(command, *args)
    assert isinstance(result.exception, UserError), result.output
    return str(result.exception)


def test_report_writes_a_page_and_prints_its_path(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "target.html"
    assert read_output(report, run, "-o", target) == f"{target}\n"
    assert not (run / "report.html").exists()
    (run / "report.html").write_text("stale")
    assert read_output(report, run) == f"{run / 'report.html'}\n"
    assert (run / "report.html").read_bytes() == target.read_bytes()
    assert "all_reduce" in target.read_text()


def test_report_writes_figures_in_each_format(tmp_path: Path) -> None:
    curve = [ok_record(collective_case(size_bytes=size)) for size in (1024, 4096)]
    run = write_run(tmp_path, run_from_records(*curve))
    folder = tmp_path / "figures"
    output = read_output(report, run, "--figures", folder, "--figure-format", "svg,pdf")
    assert f"{folder}: 3 figures as svg, pdf" in output
    files = {f"{name}.{suffix}" for name in parbench.figures(run) for suffix in ("svg", "pdf")}
    assert {file.name for file in folder.iterdir()} == files


def test_report_of_several_runs_is_in_the_current_folder(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_output(report, run, write_run(tmp_path, RUN)) == "report.html\n"
    assert "Side by side" in Path("report.html").read_text()


def test_show_of_a_sweep_has_tables_over_nodes(tmp_path: Path) -> None:
    points = [
        (make_sweep_point(1, "1 node"), [scaling_run(1)]),
        (make_sweep_point(4, "4 nodes"), [failed_node_run()]),
        (make_sweep_point(8, "8 nodes"), []),
    ]
    sweep = write_sweep(tmp_path / "links", points)
    result = invoke(show, sweep)
    assert result.exit_code == 4
    lines = result.output.splitlines()
    assert {"Runs", "Wrong, hung or failed"} <= set(lines)
    assert lines[-2].startswith("FAILED  1 of 2 runs passed, 1 run missing. Failed: run 2")
    assert lines[-1] == str(sweep)


def test_show_exits_with_the_code_of_the_run(run: Path, tmp_path: Path) -> None:
    text = read_output(show, run)
    assert text.endswith(f"{run}\n")
    assert "1 of 1 results match the reference" in text
    failed = write_run(tmp_path, run_from_records(failed_record(collective_case())))
    assert invoke(show, failed).exit_code == 4


def test_latest_names_the_newest_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "runs contains no run" in read_error(show, "latest")
    oldest, newest = "20260101T000000Z-host-1a2b3c", "20260102T000000Z-host-1a2b3c"
    for name in (newest, oldest):
        path = write_run(Path("runs"), RUN)
        path.rename(path.with_name(name))
    assert read_output(show, "latest").endswith(f"\nruns/{newest}\n")
    assert "same run" in read_error(compare, "latest", f"runs/{newest}")


OSU = "# OSU MPI Allreduce Latency Test v7.5\n# Size       Avg Latency(us)\n1024        10.00\n"


def test_import_prints_the_folder_of_each_run(tmp_path: Path) -> None:
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for file in files:
        file.write_text(OSU)
    text = read_output(import_files, *files, "--nproc", 3, "--out", tmp_path / "out")
    first, second = (load_run(Path(line)) for line in text.splitlines())
    assert first.info.plan.nproc == 3
    assert second.records[0].details["source"]["file"] == "b.txt"
    assert "nccl-tests" in read_error(
        import_files, files[0], "--nproc", 2, "--from", "nccl-tests"
    )


def test_export_writes_a_file(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "trace.json"
    message = read_error(export, run, "--format", "chrome-trace", "-o", target)
    assert "contains no timeline" in message
    assert not target.exists()
    traced = write_traced_run(tmp_path, [(traced_record(), make_timeline())]).path
    assert read_output(export, traced, "--format", "chrome-trace", "-o", target) == ""
    assert b"traceEvents" in target.read_bytes()
