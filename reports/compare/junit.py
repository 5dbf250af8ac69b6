"""The report on a comparison as JUnit XML, which CI systems display."""

from xml.etree.ElementTree import Element, SubElement, indent, tostring

from parbench.bench.exit_codes import ExitCode
from parbench.bench.results.formatting import to_single_line
from parbench.reports.compare.compare import RunComparison
from parbench.reports.compare.pool import describe_world
from parbench.reports.compare.verdicts import EXIT_CODES, MEANINGS, Verdict
from parbench.reports.compare.wording import describe_overall, format_effect
from parbench.reports.limits import EXIT_CODES as LIMIT_CODES

TAGS = {
    ExitCode.BAD: "failure",
    ExitCode.DID_NOT_RUN: "error",
    ExitCode.UNDECIDED: "skipped",
}
"""The elements that mark test cases, keyed by exit code. A test case without one passes."""


def render_junit(comparison: RunComparison) -> str:
    """Return the report on a comparison as JUnit XML by the schema of Jenkins (junit-10.xsd).

    Limits, counts and times are a test suite each. A suite without test cases is left out.
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
    indent(root)
    return tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _build_limits(comparison: RunComparison) -> Element:
    """Return the test suite of the limits that the user set, with a test case for each limit."""
    suite = Element("testsuite", name="limits")
    for result in comparison.limits:
        name = f"{result.limit.cases} {result.limit.metric} {result.limit.text}"
        code = LIMIT_CODES[result.verdict]
        _add_case(suite, "limits", name, result.verdict, TAGS.get(code, ""), result.message)
    return suite


def _build_counts(comparison: RunComparison) -> Element:
    """Return the test suite of the exact counts, with a test case for each benchmark case.

    A test case fails if a count (calls, bytes, memory) changed and the change is not intended.
    """
    suite = Element("testsuite", name="counts")
    for series in comparison.counted_series:
        failures = [change.message for change in series.counts.changes if change.fails]
        verdict = Verdict.COUNT_CHANGED
        tag = _get_tag(verdict) if failures else ""
        if series.counts.varying and not failures:
            failures = [change.message for change in series.counts.varying]
            verdict = Verdict.UNCONFIRMED
            tag = _get_tag(verdict)
        _add_case(suite, "counts", series.case.label, verdict, tag, "; ".join(failures))
    return suite


def _build_times(comparison: RunComparison) -> Element:
    """Return the test suite of the times, with a test case for each benchmark case.

    If several cases were judged, there is also one for their median change.
    """
    suite = Element("testsuite", name="times")
    for series in comparison.series:
        parts = [format_effect(series.effect) if series.effect else "", series.reason]
        parts.append(MEANINGS[series.verdict])
        message = ". ".join(part for part in parts if part)
        classname = f"{series.case.name} on {describe_world(series.world)}"
        tag = _get_tag(series.verdict)
        case = _add_case(suite, classname, series.case.label, series.verdict, tag, message)
        seconds = series.new.seconds if series.new else None
        if seconds is not None:
            case.set("time", f"{seconds:.9f}")
    if comparison.overall is not None:
        verdict = comparison.overall.verdict
        message = describe_overall(comparison)
        _add_case(suite, "times", "overall", verdict, _get_tag(verdict), message)
    return suite


def _get_tag(verdict: Verdict) -> str:
    """Return the XML element that marks a test case with this verdict, empty if it passes.

    The elements are ``failure``, ``error`` and ``skipped``.
    """
    # Nothing was compared with a case that only the new run has.
    return "skipped" if verdict == Verdict.NEW else TAGS.get(EXIT_CODES[verdict], "")


def _add_case(
    suite: Element, classname: str, name: str, verdict: str, tag: str, message: str
) -> Element:
    """Add a test case to a suite, and return its XML element.

    Args:
        suite: the element of the test suite.
        classname: the group in which CI systems show the test case.
        name: the name of the test case.
        verdict: the verdict, which the message begins with.
        tag: the element that marks the result, such as ``failure``. Empty if it passes.
        message: the text for a test case that does not pass.
    """
    case = SubElement(
        suite, "testcase", classname=to_single_line(classname), name=to_single_line(name)
    )
    if tag:
        text = to_single_line(message)
        SubElement(case, tag, type=verdict, message=text).text = f"{verdict}: {text}"
    return case


def _set_totals(suite: Element) -> None:
    """Set the numbers of tests, failures, errors and skipped tests in a test suite."""
    suite.set("tests", str(len(suite.findall("testcase"))))
    for total, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(total, str(len(suite.findall(f"testcase/{tag}"))))
