"""The report on a comparison as JUnit XML, which CI systems display."""

from xml.etree.ElementTree import Element, SubElement, indent, tostring

from parbench.bench.exit_codes import ExitCode
from parbench.bench.results.formatting import to_single_line
from parbench.reports.compare.compare import RunComparison
from parbench.reports.compare.pool import describe_world
from parbench.reports.compare.verdicts import EXIT_CODES, MEANINGS, Verdict
from parbench.reports.compare.wording import format_effect
from parbench.reports.limits import EXIT_CODES as LIMIT_CODES

TAGS = {
    ExitCode.BAD: "failure",
    ExitCode.DID_NOT_RUN: "error",
    ExitCode.UNDECIDED: "skipped",
}
"""The XML elements that mark test cases, keyed by exit code. A test case without one passes."""


def render_junit(comparison: RunComparison) -> str:
    """Return the report on a comparison as JUnit XML by the schema of Jenkins (junit-10.xsd).

    It has one test suite for limits of metrics, one for exact counts and one for times. A suite
    without test cases is left out.
    """
    suites = {name: Element("testsuite", name=name) for name in ("limits", "counts", "times")}
    for result in comparison.limits:
        name = f"{result.case} {result.metric} {result.limit.text}"
        tag = TAGS.get(LIMIT_CODES[result.verdict], "")
        _add_case(suites["limits"], "limits", name, tag, result.message)
    for series in comparison.series:
        label = series.case.label
        changes = [change for change in series.counts.changes if not change.is_intended]
        if changes or series.counts.num_compared:
            has_failed = any(change.fails for change in changes)
            verdict = Verdict.COUNT_CHANGED if has_failed else Verdict.UNDECIDED
            message = "; ".join([verdict, *(change.message for change in changes)])
            tag = TAGS[EXIT_CODES[verdict]] if changes else ""
            _add_case(suites["counts"], "counts", label, tag, message)
        parts = [series.verdict, series.reason, MEANINGS[series.verdict]]
        if series.effect:
            parts.insert(1, format_effect(series.effect))
        # Nothing was compared with a case that only the new run has.
        is_new = series.verdict == Verdict.NEW
        tag = "skipped" if is_new else TAGS.get(EXIT_CODES[series.verdict], "")
        classname = f"{series.case.name} on {describe_world(series.world)}"
        case = _add_case(suites["times"], classname, label, tag, ". ".join(filter(None, parts)))
        if series.times.new_seconds is not None:
            case.set("time", f"{series.times.new_seconds:.9f}")
    root = Element("testsuites", name="parbench compare")
    for suite in suites.values():
        if len(suite):
            suite.set("tests", str(len(suite)))
            suite.set("failures", str(len(suite.findall("testcase/failure"))))
            suite.set("errors", str(len(suite.findall("testcase/error"))))
            root.append(suite)
    indent(root)
    return tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _add_case(suite: Element, classname: str, name: str, tag: str, message: str) -> Element:
    """Add a test case to a suite, and return its XML element.

    Args:
        suite: the element of the test suite.
        classname: the group in which CI systems show the test case.
        name: the name of the test case.
        tag: the element that marks the result, such as ``failure``. Empty if it passes.
        message: the text for a test case that does not pass.
    """
    case = SubElement(
        suite, "testcase", classname=to_single_line(classname), name=to_single_line(name)
    )
    if tag:
        text = to_single_line(message)
        SubElement(case, tag, message=text).text = text
    return case
