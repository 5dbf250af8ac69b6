"""A finding, and the order of findings."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

MIN_SHARE = 0.05
"""The share of the time from which a specific cause is reported."""
MIN_GENERAL_SHARE = 0.1
"""The share of the time from which a part of a step is reported without a specific cause."""
MAX_FINDINGS = 6


@dataclass(frozen=True, kw_only=True)
class Finding:
    """An observation with its likely cause, and the command that measures it again."""

    kind: str
    subject: str
    """The step, operation or rank that it is about."""
    message: str
    command: str = ""
    amount: str
    """The size of the effect as text: ``12 %``."""
    time_share: float | None
    """The share of the time that it costs. None if its cost is not a time."""
    confidence: float = 1.0
    """1 if repetitions agree, otherwise less."""
    evidence: Mapping[str, object]

    @property
    def text(self) -> str:
        return f"{self.message} -> {self.command}" if self.command else self.message


def get_confidence(num_observations: int) -> float:
    """Return 1 for several repetitions, and 0.5 for one, which may be an exception."""
    return 1.0 if num_observations > 1 else 0.5


def select_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return at most MAX_FINDINGS: those that cost most time first, then those without a time."""
    timed, others = [], []
    for finding in findings:
        (others if finding.time_share is None else timed).append(finding)
    timed.sort(key=get_expected_share, reverse=True)
    others = others[:MAX_FINDINGS]
    return (*timed[: MAX_FINDINGS - len(others)], *others)


def get_expected_share(finding: Finding) -> float:
    """Return the share of the time that a finding costs, less if it is uncertain."""
    return (finding.time_share or 0.0) * finding.confidence
