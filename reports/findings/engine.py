"""The findings engine: applies all rules to the evidence of a run or of traces."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from parbench.reports.findings import communication_rules, rank_rules, step_rules
from parbench.reports.findings.evidence import Evidence
from parbench.reports.findings.finding import Finding, get_expected_share, select_findings
from parbench.reports.messages import add_subjects

STEP_RULES = (*step_rules.RULES, *rank_rules.STEP_RULES)
RUN_RULES = (*rank_rules.RULES, *communication_rules.RULES)


def find(evidence: Evidence) -> tuple[Finding, ...]:
    """Return the most important findings, those that cost most first."""
    findings: list[Finding] = []
    for rule in RUN_RULES:
        findings += rule(evidence)
    in_steps = [finding for step in evidence.steps for rule in STEP_RULES for finding in rule(step)]
    findings += _join_kinds(in_steps)
    return select_findings(findings)


def _join_kinds(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield the worst finding of each kind, which also names the other steps."""
    by_kind: dict[str, dict[str, Finding]] = {}
    for finding in sorted(findings, key=get_expected_share, reverse=True):
        by_kind.setdefault(finding.kind, {}).setdefault(finding.subject, finding)
    for by_subject in by_kind.values():
        worst, *others = by_subject.values()
        amounts = [(other.subject, other.amount) for other in others]
        yield replace(worst, message=add_subjects(worst.message, amounts))
