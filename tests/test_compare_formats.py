"""A comparison as a table, Markdown, JSON and JUnit XML."""

import json
import re
from xml.etree import ElementTree

import pytest
from compare_fixtures import OTHER, compared, launches, only, run_of
from reports_fixtures import HOSTILE, bad, collective, step

from reports.comparing.compare import Comparison, compare
from reports.comparing.compare_formats import MARKDOWN_BYTES, as_json, as_junit, as_markdown, as_table
from reports.comparing.compare_rule import Rule

WRONG, LOST, FEW = collective("all_gather"), collective("all_to_all"), step("ddp")


def everything() -> Comparison:
    """Return a comparison with most verdicts, and a reason that no format may obey."""
    base = [record for case in (OTHER, WRONG, LOST, FEW) for record in launches(case)]
    curve = [collective(size_bytes=1024 * 4**i) for i in range(3)]
    factors = (1.2, 1.0, 1.03)
    new = [record for case, factor in zip(curve, factors, strict=True) for record in launches(case, factor)]
    new += [*launches(OTHER, 0.8), bad(WRONG, 0, "wrong", HOSTILE), *launches(FEW, count=2), *launches(step("new"))]
    before = [*(record for case in curve for record in launches(case)), *base]
    return compare(run_of(before, {"host": {"address": "a"}}), run_of(new, {"host": {"address": "b|c"}}), Rule())


VERDICTS = {
    "WRONG": 1,
    "SLOWER": 1,
    "MISSING": 1,
    "INSUFFICIENT": 1,
    "AMBIGUOUS": 1,
    "NEW": 1,
    "FASTER": 1,
    "SAME": 1,
}


def test_the_example_has_all_of_these() -> None:
    assert everything().counts == VERDICTS


# --- the table ---


def test_the_table_has_families_series_and_what_differs() -> None:
    text = as_table(everything())
    assert re.findall(r"^(\w.*)\n(?:operation|what) ", text, re.MULTILINE) == [
        "Families",
        "Series",
        "What differs around them",
    ]
    slower = next(line for line in text.splitlines() if "SLOWER" in line and "  5 v 5" in line)
    assert slower.split()[:5] == ["all_reduce", "blocking", "float32", "1K", "SLOWER"]
    assert "+20.0 % [" in slower
    assert "\x1b" not in text
    assert not [line for line in text.splitlines() if line != line.rstrip()]


def test_columns_stand_under_their_titles() -> None:
    lines = as_table(everything()).splitlines()
    start = lines.index("Series") + 1
    verdict = lines[start].index("verdict")
    words = {line[verdict:].split()[0] for line in lines[start + 1 : start + 9]}
    assert words == set(VERDICTS)
    end = lines[start].index("launches") - 2
    assert all(line[end - 1] != " " and line[end : end + 2] == "  " for line in lines[start + 1 : start + 9])


def test_a_narrow_terminal_leaves_columns_out_and_says_so() -> None:
    series = compared(launches(), launches(factor=1.2))
    wide, narrow = as_table(series), as_table(series, width=100)
    assert "No room for" not in wide
    assert "No room for: " in narrow
    body = narrow.partition("Series\n")[2].partition("No room")[0]
    assert max(map(len, body.splitlines())) <= 100
    assert "launches" not in body
    assert "SLOWER" in body
    assert "+20.0 %" in as_table(series, width=10)


def test_a_comparison_without_differences_has_no_table_of_them() -> None:
    assert "What differs" not in as_table(compared(launches(), launches()))


# --- Markdown ---


def test_markdown_has_tables_that_github_reads() -> None:
    text = as_markdown(everything())
    assert text.startswith("## parbench compare: 1 WRONG, 1 SLOWER, 1 MISSING, ")
    tables = re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    assert len(tables) == 3
    for table in tables:
        cells = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(cells) == 1, table
    assert "b\\|c" in text


def test_markdown_puts_the_worst_first() -> None:
    series = as_markdown(everything()).partition("### Series")[2].partition("| --- |")[2]
    words = re.findall(r"\| (WRONG|SLOWER|MISSING|INSUFFICIENT|AMBIGUOUS|NEW|FASTER|SAME) \|", series)
    assert words == list(VERDICTS)


def test_markdown_obeys_nothing_that_it_quotes() -> None:
    text = as_markdown(everything())
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


# --- JSON ---


def test_json_has_every_number_and_no_nan() -> None:
    comparison = everything()
    text = as_json(comparison, code=1)
    assert "NaN" not in text
    assert "Infinity" not in text
    read = json.loads(text)
    assert (read["schema_version"], read["exit_code"], read["verdicts"]) == (1, 1, VERDICTS)
    assert read["base"] == {
        "id": "run-1",
        "path": "runs/run-1",
        "host": "node-a",
        "started": "2026-01-02T03:04:05.678Z",
        "parbench": "0.1.0",
    }
    assert read["rule"] == {"floor": 0.03, "false_discovery_rate": 0.05, "rank_level": 0.05, "min_launches": 5}
    [curve] = [family for family in read["families"] if len(family["series"]) == 3]
    assert (curve["verdict"], curve["slower_size_bytes"], curve["faster_size_bytes"]) == ("SLOWER", [1024], [])
    first = curve["series"][0]
    assert first["effect"]["change"] == pytest.approx(0.2)
    assert set(first["effect"]) == {
        "change",
        "floor",
        "low",
        "high",
        "detectable",
        "p_value",
        "rank_p_value",
        "measured",
    }
    assert (len(first["base_seconds"]), first["metric"], first["case"]["params"]["size_bytes"]) == (5, "time", 1024)
    assert first["environment"] == ["host.address"]
    assert (first["measured_floor"], read["notes"]) == (None, [])
    assert read["environment"][0] == {
        "path": "host.address",
        "base": "a",
        "new": "b|c",
        "decisive": False,
        "meant": False,
        "within": "",
    }


def test_json_of_an_unknown_effect_is_null() -> None:
    read = json.loads(as_json(compared(launches(), launches(count=1)), code=0))
    effect = read["families"][0]["series"][0]["effect"]
    assert (effect["low"], effect["p_value"]) == (None, None)
    wrong = json.loads(as_json(compared(launches(), [bad(launches()[0].case, 0, "wrong")]), code=1))
    assert wrong["families"][0]["series"][0]["effect"] is None


# --- JUnit ---

# Jenkins' junit-10.xsd: what an element may hold, the attributes it must have, and those it may have
ALLOWED = {
    "testsuites": ({"testsuite"}, set(), {"name", "time", "tests", "failures", "errors"}),
    "testsuite": (
        {"testsuite", "properties", "testcase", "system-out", "system-err"},
        {"name", "tests", "failures", "errors"},
        {"skipped", "timestamp", "hostname", "id", "package", "file", "time", "group"},
    ),
    "properties": ({"property"}, set(), set()),
    "property": (set(), {"name", "value"}, set()),
    "testcase": ({"skipped", "error", "failure", "system-out"}, {"name"}, {"time", "classname", "group"}),
    "skipped": (set(), set(), {"type", "message"}),
    "error": (set(), set(), {"type", "message"}),
    "failure": (set(), set(), {"type", "message"}),
}


def refused(element: ElementTree.Element) -> list[str]:
    """Return what that schema would refuse."""
    children, needed, optional = ALLOWED[element.tag]
    found = [f"{child.tag} in {element.tag}" for child in element if child.tag not in children]
    if not needed <= set(element.attrib) <= needed | optional:
        found.append(f"{element.tag} with {sorted(element.attrib)}")
    return found + [one for child in element if child.tag in ALLOWED for one in refused(child)]


def test_junit_is_what_jenkins_schema_allows() -> None:
    assert refused(ElementTree.fromstring(as_junit(everything()))) == []


def test_that_check_refuses_what_the_schema_does() -> None:
    suite = "<testsuite name='a' tests='1' errors='0'><testcase><properties/></testcase></testsuite>"
    assert refused(ElementTree.fromstring(f"<testsuites>{suite}</testsuites>")) == [
        "testsuite with ['errors', 'name', 'tests']",
        "properties in testcase",
        "testcase with []",
    ]


def test_junit_has_a_case_for_each_series_and_counts_that_add_up() -> None:
    comparison = everything()
    root = ElementTree.fromstring(as_junit(comparison))
    cases = list(root.iter("testcase"))
    assert [case.get("name") for case in cases] == [one.case.label for one in comparison.series]
    outcome = {one.word: [child.tag for child in case] for one, case in zip(comparison.series, cases, strict=True)}
    assert outcome == {
        "WRONG": ["error"],
        "SLOWER": ["failure"],
        "MISSING": ["error"],
        "INSUFFICIENT": ["skipped"],
        "AMBIGUOUS": ["skipped"],
        "NEW": ["skipped"],
        "FASTER": [],
        "SAME": [],
    }
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("8", "1", "2")
    assert sum(int(suite.get("skipped", "")) for suite in root) == 3
    for suite in root:
        assert suite.get("tests") == str(len(suite.findall("testcase")))


def test_a_failure_says_how_much_and_properties_hold_the_numbers() -> None:
    comparison = everything()
    root = ElementTree.fromstring(as_junit(comparison))
    failure = root.find(".//failure")
    assert failure is not None
    assert failure.get("type") == "SLOWER"
    assert str(failure.get("message")).startswith("+20.0 % [+")
    [suite] = [one for one in root if "all_reduce" in str(one.get("name"))]
    assert suite.get("name") == "collective.all_reduce dtype=float32 mode=blocking on 4 ranks on 1 node, gloo, cpu"
    properties = {one.get("name"): one.get("value") for one in suite.iter("property")}
    assert float(properties["1K change"] or "") == pytest.approx(0.2)
    assert (properties["4K verdict"], properties["environment host.address"]) == ("SAME", "a -> b|c")
    [step_suite] = [one for one in root if "ddp" in str(one.get("name"))]
    assert "verdict" in {one.get("name") for one in step_suite.iter("property")}


def test_failed_and_changed_surroundings_have_their_tags() -> None:
    failed = compared(launches(), [bad(launches()[0].case, 0, "failed", "rank 1 died")])
    error = ElementTree.fromstring(as_junit(failed)).find(".//error")
    assert error is not None
    assert (error.get("type"), error.get("message")) == ("FAILED", "rank 1 died")
    older, newer = (run_of(launches(), {"versions": {"torch": version}}) for version in ("2.12", "2.13"))
    changed = compare(older, newer, Rule())
    assert only(changed).word == "ENV-CHANGED"
    skipped = ElementTree.fromstring(as_junit(changed)).find(".//skipped")
    assert skipped is not None
    assert skipped.get("type") == "ENV-CHANGED"
    assert "versions.torch: 2.12 -> 2.13" in str(skipped.get("message"))


def test_times_are_decimal_seconds() -> None:
    times = [case.get("time") for case in ElementTree.fromstring(as_junit(everything())).iter("testcase")]
    assert all(time is None or re.fullmatch(r"\d+\.\d{9}", time) for time in times)
    assert sum(time is None for time in times) == 2
