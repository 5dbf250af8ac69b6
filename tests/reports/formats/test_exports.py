"""A run for other tools: of the format that each takes, as their own code reads it, and by ``parbench export``."""

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from pytest_benchmark.stats import Stats

from parbench import cli
from parbench.bench.results.runs import load_run
from parbench.reports.analysis.summary import summarize
from parbench.reports.commands import EXPORTS
from parbench.reports.formats.exports import (
    FILES,
    FOLDERS,
    FORMATS,
    render_action,
    render_bencher,
    render_pytest,
    samples,
    stats_of,
)
from tests.support.compare_fixtures import CASE, OTHER_CASE, make_repetitions, run_from_records
from tests.support.history_fixtures import write_history_run
from tests.support.reports_fixtures import (
    HOSTILE_TEXT,
    failed_record,
    ok_record,
    sample_run,
    step_case,
)


def benchmark_compare(folder: Path, *files: Path) -> str:
    command = [
        sys.executable,
        "-m",
        "pytest_benchmark",
        "compare",
        *map(str, files),
        "--columns=median,rounds",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_export_writes_every_format(tmp_path: Path) -> None:
    assert {*FORMATS, *FOLDERS} == {*EXPORTS}
    run, target = write_history_run(tmp_path, 0), tmp_path / "out.txt"

    def export(form: str, *words: str) -> tuple[int, bytes, str]:
        done = CliRunner().invoke(cli.main, ["export", str(run), "--format", form, *words])
        return done.exit_code, done.stdout_bytes, done.stderr

    with_timelines = {"chrome-trace", "hta"}  # of which this run has none
    for form, render in FORMATS.items():
        if form in with_timelines:
            continue
        content = render(load_run(run))
        assert export(form) == (0, content, "")
        assert export(form, "-o", str(target))[0] == 0
        assert target.read_bytes() == content, form
    for form, render_files in FOLDERS.items():
        code, _, told = export(form)
        assert (code, form in FORMATS or "name their folder with -o FOLDER" in told) == (2, True), (
            form
        )
        if form in with_timelines:
            continue
        assert export(form, "-o", str(tmp_path / form))[0] == 0
        written = {path.name: path.read_bytes() for path in (tmp_path / form).iterdir()}
        assert written == render_files(load_run(run)), form


def test_wrong_results_are_not_exported() -> None:
    run = run_from_records(
        [
            *make_repetitions(CASE, count=4),
            failed_record(CASE, 4, "wrong"),
            *make_repetitions(OTHER_CASE),
        ]
    )
    assert [one["group"] for one in json.loads(render_pytest(run))["benchmarks"]] == [
        "collective.broadcast"
    ]
    assert samples(summarize(run).rows[0]) == ()
    told = [
        [one["name"].split()[0] for one in json.loads(content)]
        for content in render_action(run).values()
    ]
    assert told == [["collective.broadcast"], ["collective.broadcast"] * 2]
    assert [name.split()[0] for name in json.loads(render_bencher(run))] == ["collective.broadcast"]


def test_stats_equal_those_of_pytest_benchmark() -> None:
    for count in (1, 2, 3, 4, 5, 8, 101):
        rng = random.Random(count)
        data = [rng.lognormvariate(-7, 0.5) for _ in range(count)]
        theirs = Stats()  # type: ignore[no-untyped-call]
        for value in data:
            theirs.update(value)  # type: ignore[no-untyped-call]
        ours = stats_of(data)
        for name, value in theirs.as_dict().items():  # type: ignore[no-untyped-call]
            assert ours[name] == (
                value if isinstance(value, str) else pytest.approx(value, rel=1e-12)
            ), (name, count)
        assert set(ours) == {*Stats.fields, "data", "iterations"}


def test_pytest_benchmark_compares_exports(tmp_path: Path) -> None:
    paths = [tmp_path / "base.json", tmp_path / "new.json"]
    for path, factor in zip(paths, (1.0, 1.5), strict=True):
        path.write_bytes(
            render_pytest(
                run_from_records(
                    [*make_repetitions(CASE, factor), *make_repetitions(OTHER_CASE, factor)]
                )
            )
        )
    told = benchmark_compare(tmp_path, *paths)
    assert told.count("collective.all_reduce size_bytes=1024") == 2
    assert "(1.50)" in told
    assert " 600" in told, "five launches of 120 samples"
    paths[0].write_bytes(render_pytest(sample_run()))
    assert "p2p.sendrecv" in benchmark_compare(tmp_path, paths[0])


def test_pytest_export_has_metrics_and_stable_facts() -> None:
    [benchmark] = json.loads(
        render_pytest(run_from_records([ok_record(step_case("ddp"), notes=[HOSTILE_TEXT])]))
    )["benchmarks"]
    info = benchmark["extra_info"]
    assert info["world"]["size"] == 4
    assert info["metrics"]["tokens_per_second"] == pytest.approx(4096 / 1e-3)
    assert info["notes"] == [HOSTILE_TEXT]
    assert "hz" not in json.dumps(json.loads(render_pytest(sample_run()))["machine_info"])


def test_action_and_bencher_exports_are_valid() -> None:
    files = render_action(sample_run())
    assert set(files) == set(FILES.values())
    for content in files.values():
        entries = json.loads(content)
        for one in entries:  # what src/extract.ts of github-action-benchmark 1.x takes
            assert one.keys() - {"range", "extra"} == {"name", "unit", "value"}
            assert math.isfinite(one["value"])
            assert all(
                isinstance(text, str) and text for name, text in one.items() if name != "value"
            )
        assert len({one["name"] for one in entries}) == len(entries) > 10
    whole = json.loads(render_bencher(sample_run()))
    for measure in (measure for measures in whole.values() for measure in measures.values()):
        assert {"value"} <= measure.keys() <= {"value", "lower_value", "upper_value"}
        assert all(map(math.isfinite, measure.values()))
    assert len(whole) > 10
    assert all(whole.values())


def test_action_export_divides_times_and_rates() -> None:
    smaller, bigger = (
        json.loads(render_action(run_from_records(make_repetitions()))[name])
        for name in FILES.values()
    )
    assert [one["name"].split()[-1] for one in smaller] == ["time"]
    assert [one["name"].split()[-1] for one in bigger] == ["algbw", "busbw"]
    assert (smaller[0]["value"], smaller[0]["unit"]) == (pytest.approx(1e-3, rel=1e-3), "s")
    low, high = map(float, smaller[0]["range"].split(" to "))
    assert low < smaller[0]["value"] < high
    assert smaller[0]["extra"].splitlines()[:2] == ["4 ranks, gloo, cpu", "5 launches"]


def test_bencher_export_has_latency_in_nanoseconds() -> None:
    [measures] = json.loads(render_bencher(run_from_records(make_repetitions()))).values()
    assert measures["latency"]["value"] == pytest.approx(1e6, rel=1e-3)
    assert (
        measures["latency"]["lower_value"]
        < measures["latency"]["value"]
        < measures["latency"]["upper_value"]
    )
    assert measures["busbw"]["value"] == pytest.approx(1024 / 1e-3 * 1.5, rel=1e-2)
    assert set(measures) == {"latency", "algbw", "busbw"}
    [measures] = json.loads(
        render_bencher(run_from_records([ok_record(step_case("ddp"), seconds=0.01)]))
    ).values()
    assert measures["latency"]["value"] == pytest.approx(1e7)
