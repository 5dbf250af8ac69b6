"""The findings engine: applies all rules to the evidence of a run or of traces."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from parbench.reports.findings import run_rules, step_rules
from parbench.reports.findings.evidence import CollectedEvidence
from parbench.reports.findings.finding import Finding, select_findings
from parbench.reports.messages import add_subjects


def apply_rules(evidence: CollectedEvidence) -> tuple[Finding, ...]:
    """Return the most important findings, those that cost most first."""
    findings: list[Finding] = []
    for run_rule in run_rules.RULES:
        findings += run_rule(evidence)
    for step in evidence.steps:
        for step_rule in step_rules.RULES:
            findings += step_rule(step)
    return select_findings(_join_kinds(findings))


def _join_kinds(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield the worst finding of each kind, which also names the other subjects."""
    by_kind: dict[str, dict[str, Finding]] = {}
    for finding in sorted(findings, key=lambda finding: finding.expected_share, reverse=True):
        by_kind.setdefault(finding.kind, {}).setdefault(finding.subject, finding)
    for by_subject in by_kind.values():
        worst, *rest = by_subject.values()
        names = [finding.name for finding in rest]
        yield replace(worst, message=add_subjects(worst.message, names))
