"""What a comparison shows: its columns and sentences, as a table, Markdown, JSON and JUnit XML."""

import json
import re
from typing import Any
from xml.etree import ElementTree

import junit_schema
import msgspec
import pytest
import xmlschema
from compare_fixtures import OTHER, compared, launches, only, run_of
from report_rows import cells_of
from reports_fixtures import HOSTILE, bad, collective, step

from parbench.reports.regression import compare_show as columns
from parbench.reports.regression.compare import Comparison, compare
from parbench.reports.regression.compare_show import MARKDOWN_BYTES, as_json, as_markdown, as_table
from parbench.reports.regression.compare_words import effect_words, probability
from parbench.reports.regression.junit import as_junit
from parbench.reports.regression.rule import Effect, Rule

CURVE = [collective(size_bytes=1024 * 4**i) for i in range(3)]
WRONG, LOST, FEW = collective("all_gather"), collective("all_to_all"), step("ddp")
VERDICTS = dict.fromkeys(("WRONG", "SLOWER", "MISSING", "INSUFFICIENT", "AMBIGUOUS", "NEW", "FASTER", "SAME"), 1)


def records_of(*factors: float) -> list[Any]:
    return [record for case, factor in zip(CURVE, factors, strict=True) for record in launches(case, factor)]


def curve(*factors: float) -> Comparison:
    return compared(records_of(1, 1, 1), records_of(*factors))


def around(older: dict[str, Any], newer: dict[str, Any], *meant: str) -> Comparison:
    return compare(run_of(launches(), older), run_of(launches(), newer), Rule(), meant)


def torches(newer: str = "2.13") -> Comparison:
    return around({"versions": {"torch": "2.12"}}, {"versions": {"torch": newer}})


def everything() -> Comparison:
    base = [*records_of(1, 1, 1), *(record for case in (OTHER, WRONG, LOST, FEW) for record in launches(case))]
    new = [*records_of(1.2, 1.0, 1.03), *launches(OTHER, 0.8), bad(WRONG, 0, "wrong", HOSTILE)]
    new += [*launches(FEW, count=2), *launches(step("new"))]
    return compare(run_of(base, {"host": {"address": "a"}}), run_of(new, {"host": {"address": "b|c"}}), Rule())


def test_a_series_shows_its_verdict_with_effect_floor_and_what_could_be_seen() -> None:
    found = compared([*launches(), *launches(OTHER)], [*launches(factor=1.1), bad(OTHER, 0, "failed", "rank 1 died")])
    shown, failed = (cells_of(columns.series_columns(found.series), one) for one in found.series)
    assert shown.pop("effect").startswith("+10.0 % [+")
    assert 3 < float(shown.pop("detectable").removesuffix(" %")) < 10
    assert " | ".join(f"{title}: {text}" for title, text in shown.items()) == (
        "operation: all_reduce | mode: blocking | dtype: float32 | size: 1K | verdict: SLOWER | floor: 3.00 % | "
        "noise: 0.794 % | BASE: 1.00 ms | NEW: 1.10 ms | rank p: 0.0079 | launches: 5 v 5 | why: -"
    )
    assert (failed["verdict"], failed["launches"], failed["why"]) == ("FAILED", "0 v 0", "rank 1 died")
    assert {failed[title] for title in ("effect", "NEW", "floor", "detectable", "rank p")} == {"-"}


def test_a_family_names_the_sizes_that_moved() -> None:
    [family] = curve(1.2, 1.0, 0.8).families
    shown = cells_of(columns.family_columns([family]), family)
    assert (shown["operation"], shown["sizes"], shown["verdict"]) == ("all_reduce", "1K to 16K (3)", "SLOWER")
    assert shown["slower at"].startswith("1K +20.0 % [")
    assert shown["faster at"].startswith("16K -20.0 % [")
    assert shown["p"] == "<0.0001"
    [family] = compared(launches(step()), launches(step(), 1.3)).families
    shown = cells_of(columns.family_columns([family]), family)
    assert (shown["sizes"], shown["faster at"]) == ("-", "-"), "one step has no size"
    assert shown["slower at"].startswith("+30.0 % [")


def test_changes_say_whether_they_forbid_a_comparison() -> None:
    older, newer = (
        {"versions": {"torch": text, "numpy": text}, "host": {"address": text, "name": f"n{text}"}} for text in "12"
    )
    found = around(older, newer, "versions.torch")
    shown = {one.path: cells_of(columns.change_columns(), one)["forbids a comparison"] for one in found.changes}
    forbids = {"host.name": "yes", "versions.numpy": "yes", "host.address": "no", "versions.torch": "no: meant"}
    assert shown == forbids
    moved = launches()
    moved[3] = msgspec.structs.replace(moved[3], environment={"changed": {"host.name": ["node-a", "node-b"]}})
    [change] = compared(launches(), moved).changes
    assert cells_of(columns.change_columns(), change)["forbids a comparison"] == "yes (NEW changed within itself)"


def test_effects_and_probabilities_in_words() -> None:
    for found, text in (
        (None, "-"),
        (Effect(change=0.05, floor=0.03), "+5.00 %"),
        (Effect(change=-0.05, floor=0.03, low=-0.06, high=0.001), "-5.00 % [-6.00, +0.100]"),
        (Effect(change=0.0, floor=0.03, low=-0.01, high=0.01), "0 % [-1.00, +1.00]"),
        (Effect(change=17.0, floor=0.03, low=14.0, high=20.0), "+1700 % [+1400, +2000]"),
        (Effect(change=2.81, floor=0.03, low=-1.0, high=1.19e6), "cannot tell"),
    ):
        assert effect_words(found) == text
    for value, text in ((None, "-"), (0.0, "<0.0001"), (0.00794, "0.0079"), (1.0, "1.0000")):
        assert probability(value) == text


def test_the_table_has_families_series_and_what_differs_under_their_titles() -> None:
    text = as_table(everything())
    assert everything().counts == VERDICTS
    titles = re.findall(r"^(\w.*)\n(?:operation|what) ", text, re.MULTILINE)
    assert titles == ["Families", "Series", "What differs around them"]
    slower = next(line for line in text.splitlines() if "SLOWER" in line and "  5 v 5" in line)
    assert slower.split()[:5] == ["all_reduce", "blocking", "float32", "1K", "SLOWER"]
    assert "+20.0 % [" in slower
    assert "\x1b" not in text
    lines = text.splitlines()
    assert not [line for line in lines if line != line.rstrip()]
    start = lines.index("Series") + 1
    rows, verdict, end = lines[start + 1 : start + 9], lines[start].index("verdict"), lines[start].index("launches") - 2
    assert {line[verdict:].split()[0] for line in rows} == set(VERDICTS)
    assert all(line[end - 1] != " " and line[end : end + 2] == "  " for line in rows)
    assert "What differs" not in as_table(compared(launches(), launches()))


def test_markdown_has_tables_that_github_reads_the_worst_first_and_obeys_nothing() -> None:
    text = as_markdown(everything())
    assert text.startswith("## parbench compare: 1 WRONG, 1 SLOWER, 1 MISSING, ")
    tables = re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    assert len(tables) == 3
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1, table
    assert "b\\|c" in text
    series = text.partition("### Series")[2].partition("| --- |")[2]
    assert re.findall(rf"\| ({'|'.join(VERDICTS)}) \|", series) == list(VERDICTS)
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    assert "\x1b" not in text


def test_markdown_fits_a_step_summary_whatever_it_compares() -> None:
    cases = [collective(f"operation{i}" * 40) for i in range(900)]
    base = [record for case in cases for record in launches(case, count=1)]
    comparison = compared([*base, *launches()], [*base, *launches(factor=1.2)])
    text = as_markdown(comparison)
    assert len(text.encode()) < MARKDOWN_BYTES < 1 << 20
    for section in ("Families", "Series"):
        assert "SLOWER" in text.partition(f"### {section}")[2].partition("\n### ")[0]
    small = as_markdown(comparison, limit_bytes=50_000)
    assert len(small.encode()) < 50_000
    [families, series] = re.findall(r"(\d+) more rows have no room here", small)
    shown = small.partition("### Series")[2].count("| INSUFFICIENT |") + 1
    assert int(series) + shown == 901
    assert int(families) > int(series)


def test_json_has_every_number_and_no_nan() -> None:
    text = as_json(everything(), code=1)
    assert "NaN" not in text
    assert "Infinity" not in text
    read = json.loads(text)
    assert (read["schema_version"], read["exit_code"], read["verdicts"]) == (1, 1, VERDICTS)
    about = {"id": "run-1", "path": "runs/run-1", "host": "node-a", "parbench": "0.1.0"}
    assert read["base"] == {**about, "started": "2026-01-02T03:04:05.678Z"}
    assert read["rule"] == {
        "floor": 0.03,
        "level": 0.05,
        "false_discovery_rate": 0.04,
        "rank_level": 0.05,
        "min_launches": 5,
    }
    [curve] = [family for family in read["families"] if len(family["series"]) == 3]
    assert (curve["verdict"], curve["slower_size_bytes"], curve["faster_size_bytes"]) == ("SLOWER", [1024], [])
    first = curve["series"][0]
    assert first["effect"]["change"] == pytest.approx(0.2)
    known = {"change", "floor", "low", "high", "detectable", "p_value", "rank_p_value", "noise"}
    assert set(first["effect"]) == known
    assert (len(first["base_seconds"]), first["metric"], first["case"]["params"]["size_bytes"]) == (5, "time", 1024)
    assert (first["environment"], first["measured_floor"], read["notes"]) == (["host.address"], None, [])
    change = {"path": "host.address", "base": "a", "new": "b|c", "decisive": False, "meant": False, "within": ""}
    assert read["environment"][0] == change
    unknown = json.loads(as_json(compared(launches(), launches(count=1)), code=0))
    effect = unknown["families"][0]["series"][0]["effect"]
    assert (effect["low"], effect["p_value"]) == (None, None)
    wrong = json.loads(as_json(compared(launches(), [bad(launches()[0].case, 0, "wrong")]), code=1))
    assert wrong["families"][0]["series"][0]["effect"] is None


# what Jenkins' junit-10.xsd allows, and all that is used of it
USED = """
error:message,type failure:message,type properties: property:name,value skipped:message,type
testcase:classname,name testcase:classname,name,time testsuite:errors,failures,name,skipped,tests
testsuites:errors,failures,name,tests
"""
INSIDE = "testcase>error testcase>failure testcase>skipped testsuite>properties testsuite>testcase testsuites>testsuite"


def root_of(comparison: Comparison) -> ElementTree.Element:
    return ElementTree.fromstring(as_junit(comparison))


def first(root: ElementTree.Element, tag: str) -> ElementTree.Element:
    return next(root.iter(tag))


def test_junit_is_what_jenkins_schema_allows() -> None:
    elements = list(root_of(everything()).iter())
    assert {f"{one.tag}:{','.join(sorted(one.attrib))}" for one in elements} == set(USED.split())
    inside = {f"{one.tag}>{child.tag}" for one in elements for child in one}
    assert inside == {*INSIDE.split(), "properties>property"}


@pytest.mark.full
def test_junit_is_what_the_schema_itself_accepts_and_that_does_refuse() -> None:
    schema = xmlschema.XMLSchema(junit_schema.schema_source())
    failed = compared(launches(), [bad(launches()[0].case, 0, "failed", HOSTILE)])
    for found in (everything(), torches(HOSTILE), failed):
        schema.validate(as_junit(found))
    text = as_junit(everything())
    spoiled = (("failure", "failed"), ("<testcase classname", "<testcase class"), (' errors="', ' broken="'))
    for good, broken in (*spoiled, ("property", "prop")):
        assert good in text
        assert not schema.is_valid(text.replace(good, broken)), broken


def test_junit_has_a_case_for_each_series_and_counts_that_add_up() -> None:
    comparison = everything()
    root = root_of(comparison)
    cases = list(root.iter("testcase"))
    assert [case.get("name") for case in cases] == ["the whole run", *(one.case.label for one in comparison.series)]
    assert [child.tag for child in cases[0]] == [], "one is slower, one faster, and in the middle all is the same"
    pairs = zip(comparison.series, cases[1:], strict=True)
    outcome = " ".join(sorted(f"{one.word}:{','.join(child.tag for child in case)}" for one, case in pairs))
    assert outcome == (
        "AMBIGUOUS:skipped FASTER: INSUFFICIENT:skipped MISSING:error NEW:skipped SAME: SLOWER:failure WRONG:error"
    )
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("9", "1", "2")
    assert sum(int(suite.get("skipped", "")) for suite in root) == 3
    assert all(suite.get("tests") == str(len(suite.findall("testcase"))) for suite in root)
    times = [case.get("time") for case in cases]
    assert all(time is None or re.fullmatch(r"\d+\.\d{9}", time) for time in times), "decimal seconds"
    assert sum(time is None for time in times) == 3


def test_a_failure_says_how_much_and_properties_hold_the_numbers() -> None:
    root = root_of(everything())
    failure = first(root, "failure")
    assert failure.get("type") == "SLOWER"
    assert str(failure.get("message")).startswith("+20.0 % [+")
    [suite] = [one for one in root if "all_reduce" in str(one.get("name"))]
    assert suite.get("name") == "collective.all_reduce dtype=float32 mode=blocking on 4 ranks on 1 node, gloo, cpu"
    properties = {one.get("name"): one.get("value") for one in suite.iter("property")}
    assert float(properties["1K change"] or "") == pytest.approx(0.2)
    assert (properties["4K verdict"], properties["environment host.address"]) == ("SAME", "a -> b|c")
    [step_suite] = [one for one in root if "ddp" in str(one.get("name"))]
    assert "verdict" in {one.get("name") for one in step_suite.iter("property")}
    error = first(root_of(compared(launches(), [bad(launches()[0].case, 0, "failed", "rank 1 died")])), "error")
    assert (error.get("type"), error.get("message")) == ("FAILED", "rank 1 died")
    assert only(torches()).word == "ENV-CHANGED"
    skipped = first(root_of(torches()), "skipped")
    assert skipped.get("type") == "ENV-CHANGED"
    assert "versions.torch: 2.12 -> 2.13" in str(skipped.get("message"))
