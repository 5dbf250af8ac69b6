"""A comparison as columns, table, Markdown, JSON and JUnit XML."""

import json
import re
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
import xmlschema

from parbench.bench.results.records import Record
from parbench.reports.regression import compare_show as columns
from parbench.reports.regression.compare import Comparison, compare
from parbench.reports.regression.compare_show import MARKDOWN_BYTES, as_json, as_markdown, as_table
from parbench.reports.regression.compare_words import effect_words, probability
from parbench.reports.regression.junit import as_junit
from parbench.reports.regression.rule import Effect, Rule
from tests.support import junit_schema
from tests.support.compare_fixtures import (
    OTHER_CASE,
    compare_records,
    make_repetitions,
    run_from_records,
)
from tests.support.report_rows import column_texts
from tests.support.reports_fixtures import HOSTILE_TEXT, collective_case, failed_record, step_case

CURVE = [collective_case(size_bytes=1024 * 4**i) for i in range(3)]
WRONG, LOST, FEW = collective_case("all_gather"), collective_case("all_to_all"), step_case("ddp")
WORST_FIRST = ("WRONG", "SLOWER", "MISSING", "INSUFFICIENT", "AMBIGUOUS", "NEW", "FASTER", "SAME")
VERDICTS = dict.fromkeys(WORST_FIRST, 1)


def curve(*factors: float) -> list[Record]:
    pairs = zip(CURVE, factors, strict=True)
    return [record for case, factor in pairs for record in make_repetitions(case, factor)]


def in_environments(older: dict[str, Any], newer: dict[str, Any], *meant: str) -> Comparison:
    return compare(
        run_from_records(make_repetitions(), older),
        run_from_records(make_repetitions(), newer),
        Rule(),
        meant,
    )


def torch_update(newer: str = "2.13") -> Comparison:
    return in_environments({"versions": {"torch": "2.12"}}, {"versions": {"torch": newer}})


def every_verdict() -> Comparison:
    complete = [
        record for case in (OTHER_CASE, WRONG, LOST, FEW) for record in make_repetitions(case)
    ]
    base = [*curve(1, 1, 1), *complete]
    new = [
        *curve(1.2, 1.0, 1.03),
        *make_repetitions(OTHER_CASE, 0.8),
        failed_record(WRONG, 0, "wrong", HOSTILE_TEXT),
    ]
    new += [*make_repetitions(FEW, count=2), *make_repetitions(step_case("new"))]
    older, newer = {"host": {"address": "a"}}, {"host": {"address": "b|c"}}
    return compare(run_from_records(base, older), run_from_records(new, newer), Rule())


def test_series_columns_hold_verdict_and_effect() -> None:
    failed_case = failed_record(OTHER_CASE, 0, "failed", "rank 1 died")
    comparison = compare_records(
        [*make_repetitions(), *make_repetitions(OTHER_CASE)],
        [*make_repetitions(factor=1.1), failed_case],
    )
    shown = columns.series_columns(comparison.series)
    slower, failed = (column_texts(shown, series) for series in comparison.series)
    assert slower["effect"].startswith("+10.0 % [+")
    assert 3 < float(slower["detectable"].removesuffix(" %")) < 10
    names = ("operation", "size", "verdict", "floor", "BASE", "NEW", "rank p", "launches", "why")
    assert [slower[name] for name in names] == [
        *("all_reduce", "1K", "SLOWER", "3.00 %", "1.00 ms", "1.10 ms", "0.0079", "5 v 5", "-")
    ]
    assert [failed[name] for name in ("verdict", "why", "effect")] == ["FAILED", "rank 1 died", "-"]


def test_family_columns_name_changed_sizes() -> None:
    [family] = compare_records(curve(1, 1, 1), curve(1.2, 1.0, 0.8)).families
    cells = column_texts(columns.family_columns([family]), family)
    assert (cells["sizes"], cells["verdict"], cells["p"]) == ("1K to 16K (3)", "SLOWER", "<0.0001")
    assert cells["slower at"].startswith("1K +20.0 % [")
    assert cells["faster at"].startswith("16K -20.0 % [")
    [family] = compare_records(
        make_repetitions(step_case()), make_repetitions(step_case(), 1.3)
    ).families
    cells = column_texts(columns.family_columns([family]), family)
    assert (cells["sizes"], cells["faster at"]) == ("-", "-")
    assert cells["slower at"].startswith("+30.0 % [")


def test_change_columns_mark_decisive_changes() -> None:
    older, newer = (
        {"versions": {"torch": text, "numpy": text}, "host": {"address": text}} for text in "12"
    )
    comparison = in_environments(older, newer, "versions.torch")
    shown = [column_texts(columns.change_columns(), change) for change in comparison.changes]
    assert {cells["what"]: cells["forbids a comparison"] for cells in shown} == {
        "versions.numpy": "yes",
        "host.address": "no",
        "versions.torch": "no: meant",
    }
    moved = make_repetitions()
    changed = {"changed": {"host.name": ["node-a", "node-b"]}}
    moved[3] = msgspec.structs.replace(moved[3], environment=changed)
    [change] = compare_records(make_repetitions(), moved).changes
    assert "NEW" in column_texts(columns.change_columns(), change)["forbids a comparison"]


@pytest.mark.parametrize(
    ("effect", "text"),
    [
        (None, "-"),
        (Effect(change=0.05, floor=0.03), "+5.00 %"),
        (Effect(change=-0.05, floor=0.03, low=-0.06, high=0.001), "-5.00 % [-6.00, +0.100]"),
        (Effect(change=17.0, floor=0.03, low=14.0, high=20.0), "+1700 % [+1400, +2000]"),
        (Effect(change=2.81, floor=0.03, low=-1.0, high=1.19e6), "cannot tell"),
    ],
)
def test_effect_words_round_to_three_digits(effect: Effect | None, text: str) -> None:
    assert effect_words(effect) == text


def test_probability_words_have_a_lower_limit() -> None:
    assert [probability(p) for p in (None, 0.0, 0.00794)] == ["-", "<0.0001", "0.0079"]


def test_table_has_families_series_and_changes() -> None:
    assert every_verdict().counts == VERDICTS
    text = as_table(every_verdict())
    titles = re.findall(r"^(\w.*)\n(?:operation|what) ", text, re.MULTILINE)
    assert titles == ["Families", "Series", "What differs around them"]
    lines = text.splitlines()
    start = lines.index("Series") + 1
    verdict_column = lines[start].index("verdict")
    rows = lines[start + 1 : start + 9]
    assert {row[verdict_column:].split()[0] for row in rows} == set(VERDICTS)
    assert "\x1b" not in text
    assert "What differs" not in as_table(compare_records(make_repetitions(), make_repetitions()))


def test_markdown_tables_are_intact_and_worst_first() -> None:
    text = as_markdown(every_verdict())
    assert "1 WRONG, 1 SLOWER, 1 MISSING" in text.splitlines()[0]
    tables = re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    assert len(tables) == 3
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1
    series = text.partition("### Series")[2].partition("| --- |")[2]
    assert re.findall(rf"\| ({'|'.join(VERDICTS)}) \|", series) == list(VERDICTS)
    assert "b\\|c" in text
    assert "<script>" not in text
    assert "\x1b" not in text


def test_markdown_fits_a_step_summary() -> None:
    cases = [collective_case(f"operation{i}" * 40) for i in range(300)]
    few = [record for case in cases for record in make_repetitions(case, count=1)]
    comparison = compare_records([*few, *make_repetitions()], [*few, *make_repetitions(factor=1.2)])
    assert len(as_markdown(comparison).encode()) < MARKDOWN_BYTES < 1 << 20
    text = as_markdown(comparison, limit_bytes=50_000)
    assert len(text.encode()) < 50_000
    for section in ("Families", "Series"):
        assert "SLOWER" in text.partition(f"### {section}")[2].partition("\n### ")[0]
    [_, hidden] = re.findall(r"(\d+) more rows", text)
    shown = text.partition("### Series")[2].count("| INSUFFICIENT |") + 1
    assert int(hidden) + shown == 301


def test_json_holds_every_number() -> None:
    data = json.loads(as_json(every_verdict(), code=1), parse_constant=pytest.fail)
    assert (data["schema_version"], data["exit_code"], data["verdicts"]) == (1, 1, VERDICTS)
    assert (data["base"]["id"], data["base"]["host"]) == ("run-1", "node-a")
    assert data["rule"]["floor"] == 0.03
    [family] = [family for family in data["families"] if len(family["series"]) == 3]
    assert (family["verdict"], family["slower_size_bytes"]) == ("SLOWER", [1024])
    series = family["series"][0]
    assert series["effect"]["change"] == pytest.approx(0.2)
    assert {"low", "high", "detectable", "p_value", "rank_p_value"} < series["effect"].keys()
    assert (len(series["base_seconds"]), series["case"]["params"]["size_bytes"]) == (5, 1024)
    assert series["environment"] == ["host.address"]
    change = data["environment"][0]
    assert (change["path"], change["base"], change["new"]) == ("host.address", "a", "b|c")


def test_json_unknown_numbers_are_null() -> None:
    few = json.loads(
        as_json(compare_records(make_repetitions(), make_repetitions(count=1)), code=0)
    )
    effect = few["families"][0]["series"][0]["effect"]
    assert (effect["low"], effect["p_value"]) == (None, None)


# The part of Jenkins' junit-10.xsd that is used.
ELEMENTS = """
error:message,type failure:message,type properties: property:name,value skipped:message,type
testcase:classname,name testcase:classname,name,time testsuite:errors,failures,name,skipped,tests
testsuites:errors,failures,name,tests
"""
NESTING = """
testcase>error testcase>failure testcase>skipped testsuite>properties testsuite>testcase
testsuites>testsuite properties>property
"""


def junit(comparison: Comparison) -> ElementTree.Element:
    return ElementTree.fromstring(as_junit(comparison))


def first(root: ElementTree.Element, tag: str) -> ElementTree.Element:
    return next(root.iter(tag))


def test_junit_uses_allowed_elements() -> None:
    elements = list(junit(every_verdict()).iter())
    used = {f"{element.tag}:{','.join(sorted(element.attrib))}" for element in elements}
    assert used == set(ELEMENTS.split())
    nesting = {f"{element.tag}>{child.tag}" for element in elements for child in element}
    assert nesting == set(NESTING.split())


@pytest.mark.full
def test_junit_schema_accepts_it_and_refuses_damage() -> None:
    schema = xmlschema.XMLSchema(junit_schema.schema_source())
    failed = compare_records(
        make_repetitions(), [failed_record(make_repetitions()[0].case, 0, "failed", HOSTILE_TEXT)]
    )
    for comparison in (every_verdict(), torch_update(HOSTILE_TEXT), failed):
        schema.validate(as_junit(comparison))
    text = as_junit(every_verdict())
    for good, damaged in (("failure", "failed"), (' errors="', ' broken="'), ("property", "prop")):
        assert not schema.is_valid(text.replace(good, damaged)), damaged


def test_junit_outcomes_match_verdicts_and_counts() -> None:
    comparison = every_verdict()
    root = junit(comparison)
    run, *cases = root.iter("testcase")
    assert [child.tag for child in run] == []
    assert [case.get("name") for case in cases] == [
        series.case.label for series in comparison.series
    ]
    pairs = zip(comparison.series, cases, strict=True)
    outcomes = {series.word: "".join(child.tag for child in case) for series, case in pairs}
    assert outcomes == {
        **dict.fromkeys(("WRONG", "MISSING"), "error"),
        **dict.fromkeys(("AMBIGUOUS", "INSUFFICIENT", "NEW"), "skipped"),
        **dict.fromkeys(("FASTER", "SAME"), ""),
        "SLOWER": "failure",
    }
    assert [root.get(name) for name in ("tests", "failures", "errors")] == ["9", "1", "2"]
    assert sum(int(suite.get("skipped", "")) for suite in root) == 3
    assert all(suite.get("tests") == str(len(suite.findall("testcase"))) for suite in root)
    times = [time for case in cases if (time := case.get("time"))]
    assert [bool(re.fullmatch(r"\d+\.\d{9}", time)) for time in times] == [True] * 6


def test_junit_messages_and_properties_hold_numbers() -> None:
    root = junit(every_verdict())
    failure = first(root, "failure")
    assert failure.get("type") == "SLOWER"
    assert "+20.0 %" in str(failure.get("message"))
    [suite] = [suite for suite in root if "all_reduce" in str(suite.get("name"))]
    properties = {item.get("name"): item.get("value") for item in suite.iter("property")}
    assert float(properties["1K change"] or "") == pytest.approx(0.2)
    assert properties["environment host.address"] == "a -> b|c"
    failed = compare_records(
        make_repetitions(), [failed_record(make_repetitions()[0].case, 0, "failed", "rank 1 died")]
    )
    error = first(junit(failed), "error")
    assert (error.get("type"), error.get("message")) == ("FAILED", "rank 1 died")
    skipped = first(junit(torch_update()), "skipped")
    assert skipped.get("type") == "ENV-CHANGED"
    assert "2.12 -> 2.13" in str(skipped.get("message"))
