"""Counts of a step are compared exactly: every change is reported with its operation."""

import html
import json
from collections.abc import Mapping
from typing import Any

import pytest

from parbench.bench.results.metrics import values
from parbench.bench.results.records import Record
from parbench.reports.analysis.summary import summarize
from parbench.reports.regression.compare import Comparison, compare
from parbench.reports.regression.compare_show import as_json, as_markdown, as_table
from parbench.reports.regression.counted import Facts, facts_of, held
from parbench.reports.regression.junit import as_junit
from parbench.reports.regression.rule import Rule
from tests.support.compare_fixtures import compare_records, run_from_records
from tests.support.reports_fixtures import failed_record, ok_record, step_case, step_metrics

MIB = float(1 << 20)
FSDP = {
    "calls.fsdp": 14.0,
    "calls.fsdp.all_gather": 9.0,
    "sent.fsdp.all_gather": 160 * MIB,
    "calls.fsdp.reduce_scatter": 5.0,
    "sent.fsdp.reduce_scatter": 90 * MIB,
    "memory_counted.parameters": 64 * MIB,
}
ONE_MORE = {**FSDP, "calls.fsdp.all_gather": 10.0}
ONE_MORE_TEXT = "all_gather on fsdp: 9 -> 10 calls a step, as many bytes"
CASE = step_case("fsdp")


def record(counts: Mapping[str, float] = FSDP, launch: int = 0, **fields: Any) -> Record:
    return ok_record(CASE, launch, metrics={**step_metrics(0.02), **values(counts)}, **fields)


def failures(comparison: Comparison) -> list[str]:
    counted = [change for _, held in comparison.counted for change in held.changes]
    return [change.told for change in counted if change.fails]


def changes(base: Mapping[str, float], new: Mapping[str, float]) -> list[str]:
    return failures(compare_records([record(base)], [record(new)]))


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        (
            {"calls.fsdp.all_gather": 8.0, "sent.fsdp.all_gather": 150 * MIB},
            "all_gather on fsdp: 9 -> 8 calls a step, -10.0 MiB",
        ),
        ({"calls.fsdp.all_gather": 10.0}, ONE_MORE_TEXT),
        (
            {"sent.fsdp.reduce_scatter": 180 * MIB},
            "reduce_scatter on fsdp: 90.0 MiB -> 180 MiB a step in 5 calls, each 2.00 times as large",
        ),
        (
            {"calls.tp.all_reduce": 2.5, "sent.tp.all_reduce": 4.0},
            "all_reduce on tp: 0 -> 2.5 calls a step, +4.00 B",
        ),
        ({"memory_counted.parameters": 128 * MIB}, "parameters in memory: 64.0 MiB -> 128 MiB"),
    ],
)
def test_changed_count_is_reported(counts: dict[str, float], text: str) -> None:
    assert changes(FSDP, {**FSDP, **counts}) == [text]


def test_lost_operation_is_reported() -> None:
    lost = {name: value for name, value in FSDP.items() if "reduce_scatter" not in name}
    assert changes(FSDP, lost) == ["reduce_scatter on fsdp: 5 -> 0 calls a step, -90.0 MiB"]


def test_measured_values_and_sums_are_not_counted() -> None:
    other = {"step_time": 9.0, "memory.parameters": 9.0, "calls.fsdp": 9.0}
    assert changes(FSDP, {**FSDP, **other}) == []


def pipeline(schedule: str, in_flight: float) -> Record:
    stages = {"ranks": 2, "microbatches": 4, "chunks": 1, "stages_by_rank": [[0], [1]]}
    counts = {"calls.pp": 8.0, "calls.pp.send": 4.0, "in_flight": in_flight}
    return record(counts, details={"pipeline": {"schedule": schedule, **stages}})


def test_changed_schedule_is_reported() -> None:
    in_flight, schedule = failures(
        compare_records([pipeline("1f1b", 2.0)], [pipeline("gpipe", 4.0)])
    )
    assert "2.00 microbatches -> 4.00 microbatches" in in_flight
    assert "1f1b of 4 microbatches -> gpipe of 4 microbatches" in schedule


def test_equal_counts_pass_despite_rounding() -> None:
    rounded = {name: value * (1 + 1e-12) for name, value in FSDP.items()}
    comparison = compare_records([record()], [record(rounded)])
    assert (failures(comparison), comparison.code()) == ([], 0)
    assert "none of 5 in 1 series changed" in as_table(comparison)
    assert comparison.code(fail_on_unknown=True) == 3, "times could not be compared"


def test_disagreeing_repetitions_fail_only_in_new() -> None:
    varying = [record(), record(ONE_MORE, 1)]
    [text] = failures(compare_records([record(), record(launch=1)], varying))
    assert "9 -> 9 or 10 calls a step" in text
    loose = compare_records(varying, [record(ONE_MORE), record(ONE_MORE, 1)])
    assert (failures(loose), loose.code()) == ([], 0)
    assert "calls.fsdp.all_gather" in as_table(loose)


def test_bytes_unknown_on_one_side_are_not_compared() -> None:
    without = {name: value for name, value in FSDP.items() if name != "sent.fsdp.all_gather"}
    one_more = {**without, "calls.fsdp.all_gather": 10.0}
    assert changes(without, one_more) == ["all_gather on fsdp: 9 -> 10 calls a step"]
    comparison = compare_records([record()], [record(without)])
    assert (failures(comparison), comparison.code(fail_on_unknown=True)) == ([], 3)
    assert "all_gather on fsdp" in as_table(comparison)


def test_activations_of_routed_tokens_are_not_compared() -> None:
    routed: dict[str, Any] = {"details": {"expert_load": [[3, 1]], "rank_load": [[4, 0]]}}
    small, large = ({**FSDP, "memory_counted.activations": size} for size in (1.0, 2.0))
    assert failures(compare_records([record(small, **routed)], [record(large, **routed)])) == []
    assert changes(small, large) == ["activations in memory: 1.00 B -> 2.00 B"]


def test_records_without_counts_have_no_changes() -> None:
    old = {"memory_counted.parameters": 64 * MIB}
    for base, new, count in ((old, FSDP, 1), (FSDP, old, 1), ({}, FSDP, 0), ({}, {}, 0)):
        comparison = compare_records([record(base)], [record(new)])
        assert failures(comparison) == []
        assert sum(held.count for _, held in comparison.counted) == count
        assert ("Counts:" in as_table(comparison)) == bool(count)


def test_operation_of_another_torch_may_be_renamed() -> None:
    renamed = {name.replace("all_gather", "gather_all"): value for name, value in FSDP.items()}
    base = run_from_records([record()], {"versions": {"torch": "1"}})
    newer = {"versions": {"torch": "2"}}
    comparison = compare(base, run_from_records([record(renamed)], newer), Rule())
    assert (failures(comparison), comparison.code(fail_on_unknown=True)) == ([], 3)
    assert "another torch" in as_table(comparison)
    assert len(failures(compare(base, run_from_records([record(ONE_MORE)], newer), Rule()))) == 1


@pytest.mark.parametrize(
    ("globs", "code", "num_failures"),
    [((), 1, 2), (("counts.fsdp.*",), 1, 1), (("counts.*",), 0, 0)],
)
def test_meant_changes_are_shown_and_pass(
    globs: tuple[str, ...], code: int, num_failures: int
) -> None:
    new = {**ONE_MORE, "memory_counted.parameters": 1.0}
    comparison = compare_records([record()], [record(new)], meant=globs)
    assert (comparison.code(), len(failures(comparison))) == (code, num_failures)
    assert ONE_MORE_TEXT in as_table(comparison)


def test_wrong_result_has_no_counts() -> None:
    [row] = summarize(
        run_from_records([record(), failed_record(CASE, 1, "wrong", "3 gradients differ")])
    ).rows
    assert facts_of(row) == {}


def test_every_format_shows_changed_counts_first() -> None:
    comparison = compare_records([record()], [record(ONE_MORE)])
    assert comparison.counts == {"CHANGED": 1, "INSUFFICIENT": 1}
    for text in (as_table(comparison), html.unescape(as_markdown(comparison))):
        assert ONE_MORE_TEXT in text.split("The whole run")[0]
    counts = json.loads(as_json(comparison, code=1))["counts"]
    [change] = counts["changes"]
    assert (change["path"], change["base"], change["new"]) == ("counts.fsdp.all_gather", [9], [10])
    assert (counts["held"], counts["series"]) == (5, 1)
    assert ONE_MORE_TEXT in html.unescape(as_junit(comparison))


@pytest.mark.parametrize("name", FSDP)
def test_held_reports_any_changed_count(name: str) -> None:
    base: Facts = {key: [value] for key, value in FSDP.items()}
    new = {**base, name: [FSDP[name] + 1]}
    assert len(held(base, new).changes) == (name != "calls.fsdp")
