"""What is counted of a step is held exactly, in any number of launches: every change is told with its cause."""

import html
import json
from collections.abc import Mapping
from typing import Any

import pytest
from compare_fixtures import compared, run_of
from reports_fixtures import bad, ok, step, step_metrics

from parbench.bench.results.metrics import values
from parbench.bench.results.records import Record
from parbench.reports.analysis.summary import summarize
from parbench.reports.regression.compare import Comparison, compare
from parbench.reports.regression.compare_show import as_json, as_markdown, as_table
from parbench.reports.regression.counted import Facts, facts_of, held
from parbench.reports.regression.junit import as_junit
from parbench.reports.regression.rule import Rule

MIB = float(1 << 20)
FSDP = {"calls.fsdp": 14.0, "calls.fsdp.all_gather": 9.0, "sent.fsdp.all_gather": 160 * MIB}
FSDP |= {"calls.fsdp.reduce_scatter": 5.0, "sent.fsdp.reduce_scatter": 90 * MIB, "memory_counted.parameters": 64 * MIB}
CASE = step("fsdp")


def record(counts: Mapping[str, float] = FSDP, launch: int = 0, **more: Any) -> Record:
    return ok(CASE, launch, metrics={**step_metrics(0.02), **values(counts)}, **more)


def pipeline(schedule: str, in_flight: float) -> list[Record]:
    told = {"schedule": schedule, "ranks": 2, "microbatches": 4, "chunks": 1, "stages_by_rank": [[0], [1]]}
    counts = {"calls.pp": 8.0, "calls.pp.send": 4.0, "in_flight": in_flight, "bubble_fraction_schedule": 0.2}
    return [record(counts, details={"pipeline": told})]


def changed(comparison: Comparison) -> list[str]:
    return [change.told for _, found in comparison.counted for change in found.changes if change.fails]


def told(base: Mapping[str, float], new: Mapping[str, float]) -> list[str]:
    return changed(compared([record(base)], [record(new)]))


def test_every_change_of_a_count_is_told_with_its_cause() -> None:
    for changes, expected in (
        (
            {"calls.fsdp.all_gather": 10.0, "sent.fsdp.all_gather": 178.9 * MIB},
            "all_gather on fsdp: 9 -> 10 calls a step, +18.9 MiB",
        ),
        (
            {"calls.fsdp.all_gather": 8.0, "sent.fsdp.all_gather": 150 * MIB},
            "all_gather on fsdp: 9 -> 8 calls a step, -10.0 MiB",
        ),
        ({"calls.fsdp.all_gather": 18.0}, "all_gather on fsdp: 9 -> 18 calls a step, as many bytes"),
        (
            {"sent.fsdp.reduce_scatter": 180 * MIB},
            "reduce_scatter on fsdp: 90.0 MiB -> 180 MiB a step in 5 calls, each 2.00 times as large",
        ),
        (
            {"calls.fsdp.all_reduce": 1.0, "sent.fsdp.all_reduce": 4.0},
            "all_reduce on fsdp: 0 -> 1 calls a step, +4.00 B",
        ),
        ({"calls.tp.all_reduce": 2.5, "sent.tp.all_reduce": 4.0}, "all_reduce on tp: 0 -> 2.5 calls a step, +4.00 B"),
        ({"memory_counted.parameters": 128 * MIB}, "parameters in memory: 64.0 MiB -> 128 MiB"),
    ):
        assert told(FSDP, {**FSDP, **changes}) == [expected]
    assert told(FSDP, {**FSDP, "step_time": 9.0, "memory.parameters": 9.0, "calls.fsdp": 9.0}) == [], (
        "not counted, or a sum"
    )
    lost = {name: value for name, value in FSDP.items() if "reduce_scatter" not in name}
    assert told(FSDP, lost) == ["reduce_scatter on fsdp: 5 -> 0 calls a step, -90.0 MiB"]
    schedules = changed(compared(pipeline("1f1b", 2.0), pipeline("gpipe", 4.0)))
    assert schedules == [
        "in flight: 2.00 microbatches -> 4.00 microbatches",
        "schedule: 1f1b of 4 microbatches -> gpipe of 4 microbatches",
    ]


def test_what_is_as_it_was_is_no_change_however_it_was_rounded() -> None:
    same = {name: value * (1 + 1e-12) for name, value in FSDP.items()}
    found = compared([record()], [record(same)])
    assert (changed(found), found.code()) == ([], 0), "one launch a side tells counts"
    assert "Counts: none of 5 in 1 series changed." in as_table(found)
    assert "The whole run: no time could be compared: 1 INSUFFICIENT" in as_table(found)
    assert found.code(fail_on_unknown=True) == 3, "times were asked for"


def test_launches_that_do_not_agree_are_a_change_in_new_and_hold_nothing_in_base() -> None:
    other = {**FSDP, "calls.fsdp.all_gather": 10.0}
    found = compared([record(), record(launch=1)], [record(), record(other, 1)])
    [sentence] = changed(found)
    assert sentence == "all_gather on fsdp: 9 -> 9 or 10 calls a step, as many bytes: launches do not agree"
    loose = compared([record(), record(other, 1)], [record(other), record(other, 1)])
    assert (changed(loose), loose.code()) == ([], 0)
    assert "Not held, as launches of BASE do not agree on it: calls.fsdp.all_gather" in as_table(loose)


def test_bytes_that_data_tell_and_activations_of_routed_tokens_are_not_held() -> None:
    known = {name: value for name, value in FSDP.items() if name != "sent.fsdp.all_gather"}
    assert told(known, known) == []
    assert told(known, {**known, "calls.fsdp.all_gather": 10.0}) == ["all_gather on fsdp: 9 -> 10 calls a step"]
    found = compared([record(FSDP)], [record(known)])
    assert (changed(found), found.code(), found.code(fail_on_unknown=True)) == ([], 0, 3)
    assert "all_gather on fsdp: its bytes are told by data in NEW alone" in as_table(found)
    loads: dict[str, Any] = {"details": {"expert_load": [[3, 1]], "rank_load": [[4, 0]]}}
    here, there = ({**FSDP, "memory_counted.activations": size} for size in (1.0, 2.0))
    assert changed(compared([record(here, **loads)], [record(there, **loads)])) == []
    assert changed(compared([record(here)], [record(there)])) == ["activations in memory: 1.00 B -> 2.00 B"]


def test_records_without_counts_say_nothing_of_counts() -> None:
    old = {"memory_counted.parameters": 64 * MIB}  # as written before calls were counted
    for base, new, held_count in ((old, FSDP, 1), (FSDP, old, 1), ({}, FSDP, 0), ({}, {}, 0)):
        found = compared([record(base)], [record(new)])
        assert (changed(found), sum(held.count for _, held in found.counted)) == ([], held_count)
        assert ("Counts:" in as_table(found)) == bool(held_count)
    alone = {**FSDP, "memory_counted.buffers": 1.0}
    found = compared([record()], [record(alone)])
    assert (changed(found), found.code()) == ([], 0)
    assert "buffers in memory: counted in NEW alone" in as_table(found)


def test_an_operation_that_one_torch_alone_has_may_be_another_ones_name() -> None:
    renamed = {name.replace("all_gather", "gather_all"): value for name, value in FSDP.items()}
    base, new = (run_of([record(of)], {"versions": {"torch": torch}}) for of, torch in ((FSDP, "1"), (renamed, "2")))
    found = compare(base, new, Rule())
    assert (changed(found), found.code(fail_on_unknown=True)) == ([], 3)
    assert "all_gather on fsdp: 9 -> 0 calls a step, -160 MiB, only in BASE: another torch may name" in as_table(found)
    more = run_of([record({**FSDP, "calls.fsdp.all_gather": 10.0})], {"versions": {"torch": "2"}})
    assert len(changed(compare(base, more, Rule()))) == 1, "what both have is held across versions too"


def test_a_change_that_is_meant_is_shown_and_passes() -> None:
    new = {**FSDP, "calls.fsdp.all_gather": 10.0, "memory_counted.parameters": 1.0}
    for globs, code, failing in (((), 1, 2), (("counts.fsdp.*",), 1, 1), (("counts.*",), 0, 0)):
        found = compared([record()], [record(new)], meant=globs)
        assert (found.code(), len(changed(found))) == (code, failing), globs
        assert "all_gather on fsdp: 9 -> 10 calls a step, as many bytes" in as_table(found)
    assert "2 of them meant" in as_table(found)
    assert "CHANGED (meant)" in as_table(found)
    assert "--across counts.parameters" in as_table(compared([record()], [record(new)], meant=["counts.fsdp.*"]))


def test_a_wrong_result_counts_nothing() -> None:
    wrong = [record(), bad(CASE, 1, "wrong", "3 gradients differ")]
    [row] = summarize(run_of(wrong)).rows
    assert facts_of(row) == {}


def test_every_form_tells_changed_counts_first() -> None:
    found = compared([record()], [record({**FSDP, "calls.fsdp.all_gather": 10.0})])
    sentence = "all_gather on fsdp: 9 -> 10 calls a step, as many bytes"
    assert found.counts == {"CHANGED": 1, "INSUFFICIENT": 1}
    for text in (as_table(found), html.unescape(as_markdown(found))):
        assert sentence in text.split("The whole run")[0], "in the first sentence"
        assert text.index("Counts\n") < text.index("Families\n")
    whole = json.loads(as_json(found, code=1))
    assert list(whole).index("counts") < list(whole).index("families")
    [change] = whole["counts"]["changes"]
    assert (change["told"], change["base"], change["new"], change["path"]) == (
        sentence,
        [9],
        [10],
        "counts.fsdp.all_gather",
    )
    assert (whole["counts"]["held"], whole["counts"]["series"], change["verdict"]) == (5, 1, "CHANGED")
    assert f'message="{sentence}"' in html.unescape(as_junit(found)).split("testsuite name")[1]


@pytest.mark.parametrize("name", [*FSDP])
def test_no_count_changes_unseen(name: str) -> None:
    base: Facts = {key: [value] for key, value in FSDP.items()}
    new = {**base, name: [FSDP[name] + 1]}
    assert len(held(base, new).changes) == (name != "calls.fsdp")
