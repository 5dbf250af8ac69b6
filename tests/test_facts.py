from typing import Any

import pytest
from reports_fixtures import collective, make_plan, make_run, ok

from bench.records import Record
from reports.facts import environment_facts, flatten, row_facts
from reports.summary import summarize


def facts_of(*records: Record) -> dict[str, str]:
    run = make_run(make_plan([records[0].case], launches=len(records)), records)
    return dict(row_facts(summarize(run).rows[0]))


def test_nested_values_become_dotted_names() -> None:
    assert flatten({"a": {"b": {"c": 1}}, "d": "x"}) == [("a.b.c", "1"), ("d", "x")]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        ("", "-"),
        ({}, "-"),
        ([], "-"),
        ([0, None, "x"], "0, -, x"),
        (True, "yes"),
        (False, "no"),
        (0, "0"),
        (0.1234567891, "0.123457"),
    ],
)
def test_every_value_is_text_and_unknown_is_a_dash(value: Any, text: str) -> None:
    assert flatten({"name": value}) == [("name", text)]


def test_a_row_tells_its_case_metrics_and_details() -> None:
    facts = facts_of(ok(collective(), details={"send_bytes": 7, "convention": "nccl-tests"}, notes=["careful"]))
    assert facts["case"] == f"{collective().id} bench.collectives:all_reduce"
    assert facts["size_bytes"] == "1024"
    assert facts["time"].startswith("1.00 ms [0.900, 1.10] (median of 120 iterations of one launch")
    assert (facts["send_bytes"], facts["convention"], facts["note"]) == ("7", "nccl-tests", "careful")
    assert (facts["why measuring stopped"], facts["steady"]) == ("precision", "flat")
    assert not [name for name in facts if "launch" in name]


def test_several_launches_are_told_one_by_one_from_1() -> None:
    facts = facts_of(ok(collective(), 0, 1e-3), ok(collective(), 1, 2e-3))
    assert facts["time, launch 1"] == "1.00 ms [0.900, 1.10]"
    assert facts["time, launch 2"] == "2.00 ms [1.80, 2.20]"
    assert facts["time"].startswith("1.41 ms [")


def test_a_launch_of_another_environment_says_so() -> None:
    facts = facts_of(ok(collective(), environment={"changed": {"host.cpu_model": ["A", "B"]}}))
    assert facts["environment, launch 1: changed.host.cpu_model"] == "A, B"


def test_a_list_of_mappings_is_told_name_by_name() -> None:
    calls = [{"axis": "dp", "ranks": 4}, {"axis": "tp", "ranks": None}]
    assert flatten({"calls": calls}) == [("calls", "axis=dp ranks=4, axis=tp ranks=-")]


def test_pairs_of_ranks_are_told_by_kind_however_many() -> None:
    pairs = {f"{i}-{j}": "same node" if i // 8 == j // 8 else "other node" for i in range(64) for j in range(i + 1, 64)}
    told = dict(environment_facts({"host": {"name": "a"}, "locality": pairs}))
    assert list(told) == ["host.name", "pairs of ranks: same node", "pairs of ranks: other node"]
    assert told["pairs of ranks: same node"].startswith("0-1, 0-2, ")
    assert told["pairs of ranks: same node"].endswith("... (224 pairs)")
    assert environment_facts({"locality": {"0-1": "same core"}}) == [("pairs of ranks: same core", "0-1")]


def test_an_environment_without_pairs_is_flat() -> None:
    assert environment_facts({"a": {"b": 1}, "locality": None}) == [("a.b", "1"), ("locality", "-")]


def test_of_very_many_launches_the_first_are_told_and_the_rest_counted() -> None:
    told = facts_of(*(ok(collective(), launch) for launch in range(15)))
    assert "time, launch 12" in told
    assert "time, launch 13" not in told
    assert told["time, other launches"] == "3 more, in records.jsonl"
    assert "time, other launches" not in facts_of(*(ok(collective(), launch) for launch in range(12)))
