"""The application of all rules for findings to the evidence from a run or from traces."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from parbench.bench.text import name_first
from parbench.reports.findings import run_rules, step_rules
from parbench.reports.findings.evidence import CollectedEvidence
from parbench.reports.findings.finding import Finding

MAX_FINDINGS = 6
"""The largest number of findings in a report."""
MAX_NAMED_SUBJECTS = 3
"""A finding also names at most this number of steps, links or ranks with the same problem."""


def apply_rules(evidence: CollectedEvidence) -> tuple[Finding, ...]:
    """Return the findings (problems with likely causes) from the facts of a run or of traces.

    At most six are returned, the ones that cost most time first. Findings whose cost is not a time,
    such as unexpected bytes, are all kept and come last.
    """
    findings: list[Finding] = []
    for run_rule in run_rules.RULES:
        findings += run_rule(evidence)
    for step in evidence.steps:
        for step_rule in step_rules.RULES:
            findings += step_rule(step)
    return _select(_join_kinds(findings))


def _join_kinds(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield one finding for each kind of problem: the one that costs most time.

    Its message also names the other steps, links or ranks with findings of this kind.
    """
    by_kind: dict[str, dict[str, Finding]] = {}
    for finding in sorted(findings, key=lambda finding: finding.expected_share, reverse=True):
        by_kind.setdefault(finding.kind, {}).setdefault(finding.subject, finding)
    for by_subject in by_kind.values():
        worst, *rest = by_subject.values()
        if rest:
            names = name_first([finding.name for finding in rest], MAX_NAMED_SUBJECTS)
            worst = replace(worst, message=f"{worst.message} Also: {', '.join(names)}.")
        yield worst


def _select(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return at most six findings, the ones that cost most time first.

    Findings whose cost is not a time (``time_share`` is None) are all kept and come last.
    """
    ordered = sorted(findings, key=lambda finding: finding.expected_share, reverse=True)
    timed = [finding for finding in ordered if finding.time_share is not None]
    untimed = [finding for finding in ordered if finding.time_share is None]
    return (*timed[: MAX_FINDINGS - len(untimed)], *untimed)
