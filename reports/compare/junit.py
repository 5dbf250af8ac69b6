"""A comparison as JUnit XML, which every CI shows."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from parbench.bench.results.formatting import format_case_size, to_single_line
from parbench.reports.compare.compare import VERDICTS, Comparison, Family, describe_world
from parbench.reports.compare.wording import effect_words, whole_words
from parbench.reports.limits import Standing

_OF_BUDGET: Mapping[Standing, str] = {
    "KEPT": "",
    "OVER": "failure",
    "NOT RUN": "error",
    "UNKNOWN": "skipped",
}

_Told = tuple[str, str, str, str, str]
"""A test case's class and name, its verdict, the element that stands for it, none where it passes, and words."""


def as_junit(comparison: Comparison) -> str:
    """Return JUnit XML as Jenkins' junit-10.xsd takes it: properties are a suite's, and their names tell a size."""
    root = Element("testsuites", name="parbench compare")
    for name, cases in _of_the_run(comparison).items():
        if cases:
            suite = SubElement(root, "testsuite", name=name, tests=str(len(cases)))
            for of_the_run in cases:
                _add(suite, *of_the_run)
            _count(suite)
    for family in comparison.families:
        name = to_single_line(f"{family.name} on {describe_world(family.series[0].world)}")
        suite = SubElement(root, "testsuite", name=name, tests=str(len(family.series)))
        properties = SubElement(suite, "properties")
        for key, value in _properties(family).items():
            SubElement(
                properties, "property", name=to_single_line(key), value=to_single_line(value)
            )
        for one in family.series:
            parts = (effect_words(one.effect) if one.effect else "", one.reason)
            told = ": ".join(filter(None, parts)) or one.word
            case = _add(
                suite, one.case.name, one.case.label, one.word, VERDICTS[one.word].junit, told
            )
            seconds = one.new.value(one.new.headline) if one.new else None
            if seconds is not None:
                case.set("time", f"{seconds:.9f}")
        _count(suite)
    for counts in ("tests", "failures", "errors"):
        root.set(counts, str(sum(int(suite.get(counts, "0")) for suite in root)))
    indent(root)
    return tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _of_the_run(comparison: Comparison) -> Mapping[str, Sequence[_Told]]:
    """Return by suite what is no series."""
    budgets = [
        (
            "budgets",
            f"{one.budget.cases} {one.budget.metric} {one.budget.text}",
            one.word,
            _OF_BUDGET[one.word],
            one.told,
        )
        for one in comparison.budgets
    ]
    counts = list[_Told]()
    for one, held in comparison.counted:
        told = "; ".join(found.told for found in held.changes if found.fails)
        counts.append(
            ("counts", one.case.label, "CHANGED", VERDICTS["CHANGED"].junit if told else "", told)
        )
    whole, told = comparison.whole, whole_words(comparison)
    words = (
        [("compare", "the whole run", whole.word, VERDICTS[whole.word].junit, told)]
        if whole
        else []
    )
    return {"budgets": budgets, "counts": counts, "the whole run": words}


def _add(suite: Element, classname: str, name: str, word: str, tag: str, told: str) -> Element:
    case, text = (
        SubElement(suite, "testcase", classname=classname, name=to_single_line(name)),
        to_single_line(told),
    )
    if tag:
        SubElement(case, tag, type=word, message=text).text = f"{word}: {text}"
    return case


def _count(suite: Element) -> None:
    for counts, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(counts, str(len(suite.findall(f"testcase/{tag}"))))


def _properties(family: Family) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in family.series:
        prefix = "" if one.size is None else f"{format_case_size(one.size)} "
        known = asdict(one.effect) if one.effect else {}
        found |= {
            f"{prefix}{name}": f"{value:.6g}" for name, value in known.items() if value is not None
        }
        found[f"{prefix}verdict"] = one.word
    around = {
        change.path: f"{change.base} -> {change.new}"
        for one in family.series
        for change in one.changes
    }
    return found | {f"environment {path}": text for path, text in around.items()}
