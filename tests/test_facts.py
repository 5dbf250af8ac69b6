from typing import Any

import pytest
from reports_fixtures import collective, make_plan, make_run, ok

from bench.records import Record
from reports.facts import flatten, row_facts
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
