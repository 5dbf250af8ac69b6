"""A comparison as JUnit XML, which CI systems display."""

from xml.etree.ElementTree import Element, SubElement, indent, tostring

from parbench.bench.results.formatting import to_single_line
from parbench.reports.compare.compare import RunComparison, SeriesComparison
from parbench.reports.compare.pool import describe_world
from parbench.reports.compare.verdicts import VERDICTS
from parbench.reports.compare.wording import describe_overall, format_effect
from parbench.reports.limits import LimitVerdict

LIMIT_TAGS: dict[LimitVerdict, str] = {
    "NOT MET": "failure",
    "NOT RUN": "error",
    "UNKNOWN": "skipped",
    "MET": "",
}


def render_junit(comparison: RunComparison) -> str:
    """Return JUnit XML by the schema of Jenkins (junit-10.xsd).

    Limits, counts and times are a test suite each.
    """
    root = Element("testsuites", name="parbench compare")
    suites = (
        _build_limits(comparison),
        _build_counts(comparison),
        _build_times(comparison),
    )
    for suite in suites:
        if suite.find("testcase") is not None:
            _set_totals(suite)
            root.append(suite)
    for total in ("tests", "failures", "errors"):
        root.set(total, str(sum(int(suite.get(total, "0")) for suite in root)))
    indent(root)
    return tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _build_limits(comparison: RunComparison) -> Element:
    suite = Element("testsuite", name="limits")
    for result in comparison.limits:
        name = f"{result.limit.cases} {result.limit.metric} {result.limit.text}"
        tag = LIMIT_TAGS[result.verdict]
        _add_case(suite, "limits", name, result.verdict, tag, result.message)
    return suite


def _build_counts(comparison: RunComparison) -> Element:
    suite = Element("testsuite", name="counts")
    for series in comparison.counted_series:
        failures = [change.message for change in series.counts.changes if change.fails]
        tag = VERDICTS["CHANGED"].junit_tag if failures else ""
        _add_case(suite, "counts", series.case.label, "CHANGED", tag, "; ".join(failures))
    return suite


def _build_times(comparison: RunComparison) -> Element:
    suite = Element("testsuite", name="times")
    for series in comparison.series:
        _add_series(suite, series)
    if comparison.overall is not None:
        verdict = comparison.overall.verdict
        tag = VERDICTS[verdict].junit_tag
        _add_case(suite, "times", "overall", verdict, tag, describe_overall(comparison))
    return suite


def _add_series(suite: Element, series: SeriesComparison) -> None:
    verdict = series.verdict
    parts = [format_effect(series.effect) if series.effect else "", series.reason]
    parts.append(VERDICTS[verdict].meaning)
    message = ". ".join(part for part in parts if part)
    classname = f"{series.case.name} on {describe_world(series.world)}"
    case = _add_case(
        suite, classname, series.case.label, verdict, VERDICTS[verdict].junit_tag, message
    )
    seconds = series.new.seconds if series.new else None
    if seconds is not None:
        case.set("time", f"{seconds:.9f}")


def _add_case(
    suite: Element, classname: str, name: str, verdict: str, tag: str, message: str
) -> Element:
    """Add a test case, with an element of this tag unless it passes."""
    case = SubElement(
        suite, "testcase", classname=to_single_line(classname), name=to_single_line(name)
    )
    if tag:
        text = to_single_line(message)
        SubElement(case, tag, type=verdict, message=text).text = f"{verdict}: {text}"
    return case


def _set_totals(suite: Element) -> None:
    suite.set("tests", str(len(suite.findall("testcase"))))
    for total, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(total, str(len(suite.findall(f"testcase/{tag}"))))
