"""The plug-in in a user's own pytest: one case measured, native JSON, compared without a warning; errors in words."""

import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from pytest_benchmark.utils import NameWrapper

from parbench.bench import pytest_plugin
from parbench.bench.commands import run
from parbench.bench.pytest_plugin import (
    OPTIONS,
    clock_of,
    one_case,
    words_of,
)
from tests.support.paths import ROOT
from tests.support.reports_fixtures import collective_case, failed_record, ok_record

MEASURES = """
import pytest

@pytest.mark.benchmark(group="mine")
def test_all_reduce(parbench):
    [record] = parbench("all_reduce", mode="blocking", size_bytes="4K", nproc=2, launches=1, budget="60s")
    assert record.check.passed
    assert record.world.size == 2
"""
ASKS_FOR_NOTHING_KNOWN = """
def test_misspelt(parbench):
    parbench("all_reduse", nproc=2)
"""


def user_pytest(folder: Path, text: str, *words: str) -> "subprocess.CompletedProcess[str]":
    (folder / "test_mine.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    installed = any(
        found.value == "parbench.bench.pytest_plugin" for found in entry_points(group="pytest11")
    )
    loaded = [] if installed else ["-p", "parbench.bench.pytest_plugin"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-W",
        "error",
        *loaded,
        *words,
    ]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=180
    )


@pytest.mark.full
def test_a_users_test_measures_and_bad_input_fails_with_its_sentence(tmp_path: Path) -> None:
    done = user_pytest(tmp_path, MEASURES + ASKS_FOR_NOTHING_KNOWN, "--benchmark-json=out.json")
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert "did you mean 'all_reduce'" in done.stdout
    assert "Traceback" not in done.stdout
    [found] = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    assert (found["name"], found["group"]) == ("test_all_reduce", "mine")
    assert found["extra_info"]["case"]["params"]["size_bytes"] == 4096
    assert found["extra_info"]["world"]["backend"] == "gloo"
    assert found["stats"]["rounds"] == len(found["stats"]["data"]) >= 6
    assert 0 < found["stats"]["median"] < 1
    assert found["stats"]["median"] == pytest.approx(
        found["extra_info"]["metrics"][0]["time"], rel=1e-6
    )


def test_without_pytest_benchmark_its_need_is_told(tmp_path: Path) -> None:
    done = user_pytest(
        tmp_path, MEASURES.replace("@pytest.mark.benchmark", "# "), "-p", "no:benchmark"
    )
    assert done.returncode == 1
    assert "needs pytest-benchmark: pip install pytest-benchmark" in done.stdout


def test_a_clock_shows_the_durations_in_turn_and_exactly_and_has_a_name() -> None:
    durations = [0.1, 1e-9, 3.0000000001]
    timer = clock_of(durations)
    seen = []
    for _ in durations:
        start = timer()
        seen.append(timer() - start)
    assert seen == durations
    with pytest.raises(StopIteration):
        timer()
    assert "parbench" in str(NameWrapper(timer))  # type: ignore[no-untyped-call]


def test_options_of_the_command_and_parameters_become_words() -> None:
    given = {"nproc": 2, "layers": 4, "budget": "5s"}
    assert " ".join(words_of("ddp", given)) == "--only ddp --nproc 2 --set layers=4 --budget 5s"
    assert words_of(None, {"target": "mine:prepare"}) == ["--target", "mine:prepare"]
    assert set(OPTIONS) <= {param.name for param in run.params}


def test_what_is_not_one_fine_case_fails() -> None:
    fine = [ok_record(collective_case(), launch) for launch in range(2)]
    assert one_case(fine) == tuple(fine)
    for records, told in (
        (
            [ok_record(collective_case()), ok_record(collective_case("broadcast"))],
            "this names 2: collective.all_reduce",
        ),
        (
            [
                ok_record(collective_case()),
                failed_record(collective_case(), 1, "wrong", "3 values differ"),
            ],
            "wrong: 3 values differ",
        ),
        ([], "this names 0"),
    ):
        with pytest.raises(pytest.fail.Exception, match=told):
            one_case(records)


def test_the_entry_point_names_this_module() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"parbench": pytest_plugin.__name__}
