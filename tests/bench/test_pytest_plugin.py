"""The pytest plug-in: a case as a benchmark of pytest-benchmark, and its errors."""

import json
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from parbench.bench import pytest_plugin
from parbench.bench.commands import run
from parbench.bench.pytest_plugin import OPTIONS, build_options, make_timer, measure_case
from parbench.bench.results.records import Record
from tests.support.paths import ROOT, run_command
from tests.support.reports.reports_fixtures import (
    collective_case,
    failed_record,
    ok_record,
    out_of_budget_record,
)

ALL_REDUCE = collective_case()
MEASURE_ALL_REDUCE = """
import pytest

@pytest.mark.benchmark(group="mine")
def test_all_reduce(parbench):
    options = dict(mode="blocking", size_bytes="4K", nproc=2, repetitions=1, budget="60s")
    [record] = parbench("all_reduce", **options)
    assert record.check.passed
    assert record.world.size == 2
"""
MISSPELL_A_CASE = """
def test_misspelt(parbench):
    parbench("all_reduse", nproc=2)
"""


def run_pytest(folder: Path, text: str, *args: str) -> "subprocess.CompletedProcess[str]":
    """Run pytest on a file with this text, with the plug-in loaded."""
    (folder / "test_mine.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error"]
    plugins = [entry_point.value for entry_point in entry_points(group="pytest11")]
    if pytest_plugin.__name__ not in plugins:
        command += ["-p", pytest_plugin.__name__]
    return run_command([*command, *args], folder)


@pytest.mark.full
def test_case_is_measured_and_a_bad_name_fails(tmp_path: Path) -> None:
    text = MEASURE_ALL_REDUCE + MISSPELL_A_CASE
    result = run_pytest(tmp_path, text, "--benchmark-json=out.json")
    assert result.returncode == 1
    assert "1 failed, 1 passed" in result.stdout, result.stdout
    assert "did you mean 'all_reduce'" in result.stdout
    assert "Traceback" not in result.stdout
    [benchmark] = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    assert benchmark["name"] == "test_all_reduce"
    assert benchmark["group"] == "mine"
    info = benchmark["extra_info"]
    assert info["case"]["params"]["size_bytes"] == 4096
    assert info["world"]["backend"] == "gloo"
    stats = benchmark["stats"]
    assert stats["rounds"] == len(stats["data"]) >= 6
    assert stats["median"] > 0


def test_timer_shows_each_duration_exactly() -> None:
    durations = [0.1, 1e-9, 3.0000000001]
    timer = make_timer(durations)
    measured = []
    for _ in durations:
        start = timer()
        measured.append(timer() - start)
    assert measured == durations


def test_arguments_become_options_and_settings() -> None:
    arguments: dict[str, object] = {"nproc": 2, "layers": 4, "budget": "5s"}
    command = " ".join(build_options("ddp", arguments))
    assert command == "ddp --nproc 2 --set layers=4 --budget 5s"
    assert set(OPTIONS) <= {param.name for param in run.params}


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([ok_record(ALL_REDUCE), ok_record(collective_case("broadcast"))], "select several"),
        ([failed_record(ALL_REDUCE, 1, "wrong", "3 values differ")], "wrong: 3 values differ"),
        ([out_of_budget_record(ALL_REDUCE, 1)], "skipped"),
    ],
)
def test_test_fails_unless_one_case_is_right(
    monkeypatch: pytest.MonkeyPatch, records: list[Record], message: str
) -> None:
    replace_run(monkeypatch, records)
    with pytest.raises(pytest.fail.Exception, match=message):
        measure_case("all_reduce", {})


def test_repetition_without_time_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = ok_record(ALL_REDUCE)
    replace_run(monkeypatch, [measured, out_of_budget_record(ALL_REDUCE, 1)])
    assert measure_case("all_reduce", {}) == (measured,)


def replace_run(monkeypatch: pytest.MonkeyPatch, records: list[Record]) -> None:
    """Let ``parbench run`` of the plug-in write these records."""

    def make_run(command: list[str], **_: Any) -> "subprocess.CompletedProcess[str]":
        folder = Path(command[command.index("--out") + 1]) / "run"
        folder.mkdir()
        (folder / "run.json").touch()
        return subprocess.CompletedProcess(command, 0)

    run = SimpleNamespace(records=tuple(records))
    monkeypatch.setattr(subprocess, "run", make_run)
    monkeypatch.setattr(pytest_plugin, "load_run", lambda path: run)


def test_entry_point_names_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"parbench": pytest_plugin.__name__}
