"""The pytest plug-in: a case as a benchmark of pytest-benchmark, and its errors."""

import json
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from parbench.bench import pytest_plugin
from parbench.bench.commands import run
from parbench.bench.pytest_plugin import OPTIONS, build_options, make_timer, select_measured
from tests.support.paths import ROOT, environment
from tests.support.reports.reports_fixtures import (
    collective_case,
    failed_record,
    ok_record,
    out_of_budget_record,
)

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
    return subprocess.run(
        [*command, *args],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


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
    assert stats["median"] == pytest.approx(info["metrics"][0]["time"], rel=1e-6)


@pytest.mark.full
def test_missing_pytest_benchmark_is_reported(tmp_path: Path) -> None:
    text = MEASURE_ALL_REDUCE.replace("@pytest.mark.benchmark", "# ")
    result = run_pytest(tmp_path, text, "-p", "no:benchmark")
    assert result.returncode == 1
    assert "pip install pytest-benchmark" in result.stdout


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


def test_repetitions_out_of_budget_are_left_out() -> None:
    case = collective_case()
    measured = ok_record(case)
    skipped = [out_of_budget_record(case, repetition) for repetition in (1, 2)]
    assert select_measured([measured, *skipped]) == (measured,)
    with pytest.raises(pytest.fail.Exception, match="the budget ended"):
        select_measured(skipped)


def test_two_cases_and_bad_cases_fail() -> None:
    record = ok_record(collective_case())
    with pytest.raises(pytest.fail.Exception, match="names 2"):
        select_measured([record, ok_record(collective_case("broadcast"))])
    wrong = failed_record(collective_case(), 1, "wrong", "3 values differ")
    with pytest.raises(pytest.fail.Exception, match="wrong: 3 values differ"):
        select_measured([record, wrong])


def test_entry_point_names_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"parbench": pytest_plugin.__name__}
