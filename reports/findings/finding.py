"""A finding, and the shares of the time from which problems are reported."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from parbench.bench.results.formatting import format_percent

MIN_SHARE = 0.05
"""The share of the time from which a specific cause is reported."""
MIN_GENERAL_SHARE = 0.1
"""The share of the time from which a part of a step is reported without a specific cause."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """An observation with its likely cause, and the command that measures it again."""

    kind: str
    subject: str
    """The step, operation, link or rank with the problem."""
    message: str
    command: str = ""
    time_share: float | None
    """The share of the time that the problem costs, None if its cost is not a time."""
    confidence: float = 1.0
    """1 if repetitions agree, 0.5 for a single repetition."""
    evidence: Mapping[str, object] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The message with the command."""
        return f"{self.message} -> {self.command}" if self.command else self.message

    @property
    def expected_share(self) -> float:
        """The share of the time that the problem costs, times the confidence in it."""
        return (self.time_share or 0.0) * self.confidence

    @property
    def name(self) -> str:
        """The subject, with the share of the time in percent if it is known."""
        if self.time_share is None:
            return self.subject
        return f"{self.subject} ({format_percent(self.time_share)})"


def describe_no_finding(min_share: float) -> str:
    """Return the sentence about a report without findings."""
    return f"Nothing stands out: no cause costs {format_percent(min_share)} of the step or more."
