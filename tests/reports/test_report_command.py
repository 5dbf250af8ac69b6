"""The commands report, show, import and export: what they print and write, and what they refuse with which code."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from parbench.bench.results.runs import load_run
from parbench.bench.text import UserError
from parbench.reports.commands import (
    EXPORTS,
    REPORTS,
    TOOLS,
    compare,
    export,
    import_files,
    report,
    show,
)
from parbench.reports.formats.chrome_trace import render_trace
from parbench.reports.formats.imports import PARSERS
from parbench.reports.formats.nccl_tests import render_text
from tests.support.nodes_fixtures import EMULATION, sample_sweep
from tests.support.reports_fixtures import (
    collective_case,
    failed_record,
    make_plan,
    make_run,
    ok_record,
    pipeline_record,
    write_run,
)
from tests.support.traced import make_timeline, traced_record, write_traced_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(
        tmp_path, make_run(make_plan([collective_case()]), [ok_record(collective_case())])
    )


def invoke(command: click.Command, *words: object) -> Result:
    return CliRunner().invoke(command, [str(word) for word in words])


def printed(command: click.Command, *words: object) -> str:
    result = invoke(command, *words)
    assert result.exit_code == 0, result.output
    return result.output


def refused(command: click.Command, *words: object) -> str:
    result = invoke(command, *words)
    assert isinstance(result.exception, UserError), result.output
    return str(result.exception)


def misused(command: click.Command, *words: object) -> str:
    result = invoke(command, *words)
    assert result.exit_code == 2, result.output
    return result.output


def test_report_writes_a_page_and_prints_its_path(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "other.html"
    assert printed(report, run, "-o", target) == f"{target}\n"
    assert not (run / "report.html").exists()
    (run / "report.html").write_text("stale")
    assert printed(report, run) == f"{run / 'report.html'}\n"
    assert "all_reduce" in (run / "report.html").read_text()
    assert (run / "report.html").read_bytes() == target.read_bytes()


def test_report_formats_go_to_stdout_or_a_file(run: Path, tmp_path: Path) -> None:
    for form, start in (
        ("markdown", "# parbench run-1"),
        ("csv", "run,case,"),
        ("json", '{"run":'),
    ):
        told = printed(report, run, "--format", form)
        assert told.startswith(start)
        assert (
            printed(report, run, "--format", form, "--output", tmp_path / "x")
            == f"{tmp_path / 'x'}\n"
        )
        assert (tmp_path / "x").read_text() == told
        assert form in REPORTS
    assert not (run / "report.html").exists()


def test_report_of_several_runs_or_a_sweep(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_run(
        tmp_path,
        make_run(make_plan([collective_case()]), [ok_record(collective_case(), seconds=2e-3)]),
    )
    monkeypatch.chdir(tmp_path)
    assert printed(report, run, other) == "report.html\n"
    assert "Side by side" in (tmp_path / "report.html").read_text()
    sweep = sample_sweep(tmp_path / "links")
    assert printed(report, sweep) == f"{sweep / 'report.html'}\n"
    assert "Over nodes" in (sweep / "report.html").read_text()


def test_commands_refuse_bad_arguments(run: Path, tmp_path: Path) -> None:
    misused(report)
    assert "is a directory" in misused(report, run, "-o", tmp_path)
    assert "--format" in misused(export, run)
    for words in ((), ("a.txt", "--from", "imb"), ("a.txt", "--nproc", 0)):
        misused(import_files, *words)
    refused(report, tmp_path / "traces")
    told = f"{tmp_path} is no run: it holds 1 run, the newest is {run}"
    assert [refused(show, tmp_path), refused(export, tmp_path, "--format", "nccl-tests")] == [
        told,
        told,
    ]


def test_show_exits_with_the_runs_code(run: Path, tmp_path: Path) -> None:
    told = printed(show, run)
    assert told.endswith(f"{run}\n")
    assert "1 of 1 results equal the reference" in told
    assert "1 of 1 results equal the reference" in printed(show, run, "--watch")
    failed = write_run(
        tmp_path, make_run(make_plan([collective_case()]), [failed_record(collective_case())])
    )
    assert invoke(show, failed).exit_code == 4


def test_latest_names_the_newest_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused(show, "latest") == "latest: runs holds no run; parbench run makes one"
    for i in (2, 1):
        run = write_run(
            tmp_path / "written",
            make_run(make_plan([collective_case()]), [ok_record(collective_case())]),
        )
        for out in ("runs", "other"):
            shutil.copytree(run, tmp_path / out / f"2026010{i}T000000Z-host-1a2b3c")
    for word, shown in (("latest", "runs"), ("other/latest", "other")):
        assert printed(show, word).endswith(f"\n{shown}/20260102T000000Z-host-1a2b3c\n")
    assert "same run" in refused(compare, "latest", "runs/20260102T000000Z-host-1a2b3c")


def test_show_of_a_sweep_has_tables_over_nodes(tmp_path: Path) -> None:
    sweep = sample_sweep(tmp_path / "links")
    result = invoke(show, sweep)
    assert result.exit_code == 4
    first, *lines = result.output.splitlines()
    assert first == f"What runs 1-10 cannot show: {EMULATION}"
    assert {"Runs", "Wrong, hung or failed", "Over nodes", "Environments side by side"} <= set(
        lines
    )
    assert lines[-2].startswith("NOT FINE  run 11 of 11; 1 more")
    assert lines[-1] == str(sweep)
    assert not (sweep / "report.html").exists()


OSU = "# OSU MPI Allreduce Latency Test v7.5\n# Size       Avg Latency(us)\n1024                   10.00\n"


def test_import_prints_the_folder_of_each_run(tmp_path: Path) -> None:
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for file in files:
        file.write_text(OSU)
    told = printed(import_files, *files, "--nproc", 3, "--out", tmp_path / "out")
    runs = [load_run(Path(line)) for line in told.splitlines()]
    assert [run.records[0].details["source"]["file"] for run in runs] == ["a.txt", "b.txt"]
    assert {run.path.parent for run in runs} == {tmp_path / "out"}
    assert {run.info.plan.nproc for run in runs} == {3}
    named = refused(import_files, files[0], "--nproc", 2, "--from", "nccl-tests")
    assert "holds no table of nccl-tests" in named
    files[0].write_text("hello")
    refused(import_files, files[0])
    assert tuple(PARSERS) == TOOLS


def test_export_goes_to_stdout_or_a_file(run: Path, tmp_path: Path) -> None:
    record = pipeline_record()
    piped = write_run(
        tmp_path,
        make_run(
            make_plan([record.case, collective_case()]), [record, ok_record(collective_case())]
        ),
    )
    target = tmp_path / "out.txt"
    told = {
        form: printed(export, piped, "--format", form) for form in ("nccl-tests", "chrome-trace")
    }
    assert told.keys() < set(EXPORTS)
    for form, text in told.items():
        assert printed(export, piped, "--format", form, "-o", target) == ""
        assert target.read_text() == text
        assert text.startswith("{") is (form != "nccl-tests")
        assert ("all_reduce_perf" in text) is (form != "chrome-trace")
    assert told["chrome-trace"].encode() == render_trace(load_run(piped))
    assert told["nccl-tests"] == render_text(load_run(piped))
    assert "cannot be written" in refused(
        export, run, "--format", "nccl-tests", "-o", tmp_path / "no" / "x.txt"
    )
    none = tmp_path / "trace.json"
    assert "holds no timeline to export" in refused(
        export, run, "--format", "chrome-trace", "-o", none
    )
    assert not none.exists()


def test_export_writes_traces_into_a_folder(tmp_path: Path) -> None:
    record = traced_record()
    run = write_traced_run(tmp_path, [(record, make_timeline())]).path
    for target in (tmp_path / "new", tmp_path):
        assert (
            printed(export, run, "--format", "chrome-trace", "-o", target)
            == f"{target / record.case.id}.json\n"
        )
    for words in ((), ("-o", tmp_path / "x.json")):
        refused(export, run, "--format", "hta", *words)
    folder = tmp_path / "hta"
    written = [folder / record.case.id / f"rank-{rank}.json" for rank in (0, 1)]
    assert printed(export, run, "--format", "hta", "-o", folder).splitlines() == [
        str(file) for file in written
    ]


def test_imports_are_light() -> None:
    steps = {
        "parbench.reports.commands": ["torch", "jinja2", "rich", "msgspec"],
        "parbench.reports.formats.chrome_trace": ["torch"],
        "parbench.reports.render.show": ["torch", "jinja2"],
        "parbench.reports.render.page": ["torch"],
    }
    code = "import sys, json; told = {}\n"
    for modules, heavy in steps.items():
        code += f"import {modules}\ntold[{modules!r}] = [name for name in {heavy!r} if name in sys.modules]\n"
    done = subprocess.run(
        [sys.executable, "-c", code + "print(json.dumps(told))"], capture_output=True, check=True
    )
    assert json.loads(done.stdout) == {modules: [] for modules in steps}
