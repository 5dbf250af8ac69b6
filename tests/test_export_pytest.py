"""What we write as pytest-benchmark's JSON is what its own code would say, and what its own command reads."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from compare_fixtures import CASE, OTHER, launches, run_of
from pytest_benchmark.stats import Stats
from reports_fixtures import HOSTILE, bad, ok, sample_run, step

from reports.exchange.export_pytest import extra_info, render_pytest, samples, stats_of
from reports.summary import summarize


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8, 9, 50, 101])
def test_the_statistics_are_pytest_benchmarks_own(count: int) -> None:
    rng = random.Random(count)
    data = [rng.lognormvariate(-7, 0.5) for _ in range(count)]
    theirs = Stats()  # type: ignore[no-untyped-call]
    for value in data:
        theirs.update(value)  # type: ignore[no-untyped-call]
    ours = stats_of(data)
    for name, value in theirs.as_dict().items():  # type: ignore[no-untyped-call]
        assert ours[name] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-12)), name
    assert set(ours) == {*Stats.fields, "data", "iterations"}


def compare(*files: Path, folder: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pytest_benchmark", "compare", *map(str, files), "--columns=median,rounds"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_its_command_reads_and_compares_runs(tmp_path: Path) -> None:
    paths = [tmp_path / "base.json", tmp_path / "new.json"]
    for path, factor in zip(paths, (1.0, 1.5), strict=True):
        path.write_bytes(render_pytest(run_of([*launches(CASE, factor), *launches(OTHER, factor)])))
    done = compare(*paths, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("collective.all_reduce size_bytes=1024") == 2
    assert "(1.50)" in done.stdout
    assert " 600" in done.stdout, "five launches of 120 samples"


def test_its_command_reads_a_run_of_everything(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(render_pytest(sample_run()))
    done = compare(tmp_path / "run.json", folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_no_machine_fact_changes_from_run_to_run() -> None:
    assert "hz" not in json.dumps(json.loads(render_pytest(sample_run()))["machine_info"])


def test_a_wrong_result_has_no_benchmark() -> None:
    run = run_of([*launches(CASE, count=4), bad(CASE, 4, "wrong"), *launches(OTHER)])
    assert [one["group"] for one in json.loads(render_pytest(run))["benchmarks"]] == ["collective.broadcast"]
    assert samples(summarize(run).rows[0]) == ()


def test_what_a_duration_does_not_tell_stands_beside_it() -> None:
    [row] = summarize(run_of([ok(step("ddp"), notes=[HOSTILE])])).rows
    info = extra_info(row)
    assert info["world"]["size"] == 4
    assert info["metrics"]["tokens_per_second"] == pytest.approx(4096 / 1e-3)
    assert info["notes"] == [HOSTILE]
