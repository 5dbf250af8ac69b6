"""The findings engine: applies all rules to the evidence of a run or of traces."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from parbench.bench.text import name_first
from parbench.reports.findings import run_rules, step_rules
from parbench.reports.findings.evidence import CollectedEvidence
from parbench.reports.findings.finding import Finding

MAX_FINDINGS = 6
MAX_NAMED_SUBJECTS = 3


def apply_rules(evidence: CollectedEvidence) -> tuple[Finding, ...]:
    """Return the most important findings, the most expensive first."""
    findings: list[Finding] = []
    for run_rule in run_rules.RULES:
        findings += run_rule(evidence)
    for step in evidence.steps:
        for step_rule in step_rules.RULES:
            findings += step_rule(step)
    return _select(_join_kinds(findings))


def _join_kinds(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield the worst finding of each kind, which also names the other subjects."""
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
    """Return at most MAX_FINDINGS findings, the most expensive first, then untimed ones."""
    ordered = sorted(findings, key=lambda finding: finding.expected_share, reverse=True)
    timed = [finding for finding in ordered if finding.time_share is not None]
    untimed = [finding for finding in ordered if finding.time_share is None]
    return (*timed[: MAX_FINDINGS - len(untimed)], *untimed)
