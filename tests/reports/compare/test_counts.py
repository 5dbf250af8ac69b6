"""Exact counts of a step are compared exactly: every change is reported with its operation."""

import html
import re
from collections.abc import Mapping
from typing import Any

import pytest

from parbench.bench.results.metrics import make_values
from parbench.bench.results.records import Record
from parbench.reports.compare.compare import RunComparison
from parbench.reports.compare.junit import render_junit
from parbench.reports.compare.rendering import render, render_markdown, render_text
from parbench.reports.compare.report import build_report
from tests.support.paths import Command
from tests.support.reports.compare_fixtures import (
    compare_records,
)
from tests.support.reports.reports_fixtures import ok_record, step_case, step_metrics
from tests.support.workloads.planted_steps import PLANTS, VARIABLE

MIB = float(1 << 20)
FSDP = {
    "calls.fsdp": 14.0,
    "calls.fsdp.all_gather": 9.0,
    "sent.fsdp.all_gather": 160 * MIB,
    "calls.fsdp.reduce_scatter": 5.0,
    "sent.fsdp.reduce_scatter": 90 * MIB,
    "memory_counted.parameters": 64 * MIB,
}
EXTRA_CALL = {**FSDP, "calls.fsdp.all_gather": 10.0}
EXTRA_CALL_TEXT = "all_gather on fsdp: 9 -> 10 calls a step"


def make_record(
    counts: Mapping[str, float] = FSDP, repetition: int = 0, **fields: Any
) -> Record:
    metrics = {**step_metrics(0.02), **make_values(counts)}
    return ok_record(step_case("fsdp"), repetition, metrics=metrics, **fields)


def list_failures(comparison: RunComparison) -> list[str]:
    failures = []
    for series in comparison.series:
        failures += [change.message for change in series.counts.changes if change.fails]
    return failures


def find_changes(
    base: Mapping[str, float], new: Mapping[str, float], **fields: Any
) -> list[str]:
    comparison = compare_records([make_record(base, **fields)], [make_record(new, **fields)])
    return list_failures(comparison)


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        (
            {"sent.fsdp.reduce_scatter": 180 * MIB},
            "reduce_scatter on fsdp: 90.0 MiB -> 180 MiB (+90.0 MiB) a step",
        ),
        (
            {"sent.fsdp.reduce_scatter": 90 * MIB + 4},
            "reduce_scatter on fsdp: 94,371,840 B -> 94,371,844 B (+4.00 B) a step",
        ),
        ({"calls.tp.all_reduce": 2.5}, "all_reduce on tp: 0 -> 2.5 calls a step"),
        (
            {"memory_counted.parameters": 32 * MIB},
            "parameters in memory: 64.0 MiB -> 32.0 MiB (-32.0 MiB)",
        ),
    ],
)
def test_changed_count_is_reported(counts: dict[str, float], text: str) -> None:
    assert find_changes(FSDP, {**FSDP, **counts}) == [text]


def make_pipeline_record(schedule: str, in_flight: float) -> Record:
    stages = {"ranks": 2, "microbatches": 4, "virtual_stages": 1, "stages_by_rank": [[0], [1]]}
    details = {"pipeline": {"schedule": schedule, **stages}}
    return make_record({"calls.pp.send": 4.0, "in_flight": in_flight}, details=details)


def test_changed_schedule_is_reported() -> None:
    base = make_pipeline_record("1f1b", 2.0)
    new = make_pipeline_record("gpipe", 4.0)
    in_flight, schedule = list_failures(compare_records([base], [new]))
    assert "2 microbatches -> 4 microbatches" in in_flight
    assert "1f1b of 4 microbatches -> gpipe of 4 microbatches" in schedule


def test_disagreeing_repetitions_fail_only_in_new() -> None:
    stable = [make_record(), make_record(repetition=1)]
    varying = [make_record(), make_record(EXTRA_CALL, 1)]
    [text] = list_failures(compare_records(stable, varying))
    assert "9 -> 9 or 10 calls a step" in text
    assert list_failures(compare_records(varying, stable)) == []


@pytest.mark.parametrize("first", [FSDP, {"calls.fsdp.reduce_scatter": 5.0}])
def test_count_that_varies_in_base_is_named(first: dict[str, float]) -> None:
    varying = [make_record(first, 0), make_record(EXTRA_CALL, 1)]
    comparison = compare_records(varying, varying)
    text = render_text(build_report(comparison))
    calls = f"{first.get('calls.fsdp.all_gather', 0):g} or 10"
    assert f"all_gather on fsdp: {calls} -> {calls} calls a step" in text
    assert "Counts: none of" not in text
    assert "--across counts.fsdp." in text
    assert comparison.get_exit_code(fail_on_undecided=True) == 3


def test_count_that_one_run_lacks_is_not_decided() -> None:
    unknown = {name: value for name, value in FSDP.items() if name != "sent.fsdp.all_gather"}
    comparison = compare_records([make_record()], [make_record(unknown)])
    assert list_failures(comparison) == []
    assert comparison.get_exit_code(fail_on_undecided=True) == 3


def test_activations_of_routed_tokens_are_not_compared() -> None:
    small = {**FSDP, "memory_counted.activations": 1.0}
    large = {**FSDP, "memory_counted.activations": 2.0}
    assert find_changes(small, large) == ["activations in memory: 1.00 B -> 2.00 B (+1.00 B)"]
    routed = {"rank_load": [[4, 0]]}
    assert find_changes(small, large, details=routed) == []


@pytest.mark.parametrize(
    ("globs", "num_failures"), [([], 2), (["counts.fsdp.*"], 1), (["counts.*"], 0)]
)
def test_intended_changes_are_shown_and_pass(globs: list[str], num_failures: int) -> None:
    new = {**EXTRA_CALL, "memory_counted.parameters": 1.0}
    comparison = compare_records([make_record()], [make_record(new)], intended=globs)
    assert comparison.get_exit_code() == min(num_failures, 1)
    assert len(list_failures(comparison)) == num_failures
    assert EXTRA_CALL_TEXT in render_text(build_report(comparison))


def test_every_format_shows_changed_counts() -> None:
    comparison = compare_records([make_record()], [make_record(EXTRA_CALL)])
    assert comparison.verdicts == {"COUNT CHANGED": 1, "NOT ENOUGH DATA": 1}
    report = build_report(comparison)
    texts = [render_text(report), render_markdown(report), render_junit(comparison)]
    texts.append(render(report, "json"))
    assert all(EXTRA_CALL_TEXT in html.unescape(text) for text in texts)


@pytest.mark.full
@pytest.mark.measures
def test_planted_faults_are_named_after_one_repetition(parbench: Command) -> None:
    options = ["--nproc", "2", "--repetitions", "1", "--budget", "60s", "--format=json"]
    plants = f"plant={','.join(PLANTS)}"
    options += ["tests.support.workloads.planted_steps:step", "--set", plants]
    folders = []
    for planted in ("", "", "1"):
        result = parbench("run", *options, **{VARIABLE: planted})
        assert result.returncode == 0, result.stderr
        folders.append(result.stderr.splitlines()[-1])
    base, repeated, planted = folders
    unchanged = parbench("compare", base, repeated)
    assert unchanged.returncode == 0, unchanged.stdout
    assert unchanged.stdout.splitlines()[1].startswith("Counts: none of ")
    changed = parbench("compare", base, planted)
    assert changed.returncode == 1
    for name, plant in PLANTS.items():
        assert re.search(plant.cause, changed.stdout), name
    assert parbench("compare", base, planted, "--across", "counts.*").returncode == 0
