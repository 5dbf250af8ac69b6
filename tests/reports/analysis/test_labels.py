"""Names that tell rows apart, and facts of an environment as text."""

from typing import Any

import pytest

from parbench.bench.plan.cases import Case, make_case
from parbench.reports.analysis.labels import (
    differences,
    environment_facts,
    flatten,
    short_labels,
)
from tests.support.report_rows import summarize_rows
from tests.support.reports_fixtures import ok_record, step_case


@pytest.mark.parametrize(
    ("cases", "labels"),
    [
        ([step_case("ddp"), step_case("ddp", bucket_mb=1.0)], ["ddp", "ddp bucket_mb=1.0"]),
        ([step_case("ddp"), make_case("mine.ddp", "m:f", {})], ["step.ddp", "mine.ddp"]),
        ([step_case("a", b="\x1b[1m"), step_case("a", b="c")], ["a b=\\x1b[1m", "a b=c"]),
    ],
)
def test_short_labels_tell_steps_apart(cases: list[Case], labels: list[str]) -> None:
    rows = summarize_rows(*(ok_record(case) for case in cases))
    assert list(short_labels(rows).values()) == labels


def test_differences_leave_out_names_and_empty_values() -> None:
    even = step_case("a", split="", chunks=1)
    uneven = step_case("a", split="3,1", chunks=2)
    rows = summarize_rows(ok_record(even), ok_record(uneven))
    assert list(differences(rows).values()) == ["chunks=1", "split=3,1 chunks=2"]
    assert list(differences(rows, without=("chunks",)).values()) == ["", "split=3,1"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({}, "-"),
        ([0, None], "0, -"),
        (True, "yes"),
        (0.1234567, "0.123457"),
    ],
)
def test_flatten_shows_unknown_values_as_dashes(value: Any, text: str) -> None:
    assert flatten({"name": value}) == [("name", text)]


def test_pairs_of_ranks_are_joined_by_kind() -> None:
    locality = {f"0-{rank}": "same node" for rank in range(1, 100)}
    locality["0-100"] = "other node"
    facts = dict(environment_facts({"a": {"b": 1}, "locality": locality}))
    assert facts["a.b"] == "1"
    assert facts["pairs of ranks: same node"].startswith("0-1, 0-2, ")
    assert "(99 pairs)" in facts["pairs of ranks: same node"]
    assert facts["pairs of ranks: other node"] == "0-100"
