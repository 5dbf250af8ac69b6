"""Findings: problems of a run or of traces that cost enough time to be reported."""

from dataclasses import dataclass

MIN_SHARE = 0.05
"""A problem with a specific cause is reported if it costs this fraction of a step or operation."""
MIN_GENERAL_SHARE = 0.1
"""A problem without a specific cause is reported if it costs this fraction of a step."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A problem with its likely cause, and the command that measures it again."""

    kind: str
    """The kind of problem, such as ``slow-link`` or ``pipeline-bubble``."""
    subject: str
    """The step, operation, link or rank with the problem."""
    message: str
    """The observation with numbers, then the likely cause, in sentences."""
    command: str = ""
    """The command to run next, empty if there is none."""
    time_share: float | None
    """The fraction of the time of the step or operation that the problem costs.

    None if its cost is not a time, such as for unexpected bytes.
    """

    @property
    def text(self) -> str:
        """The message, followed by ``-> COMMAND`` if there is a command."""
        return f"{self.message} -> {self.command}" if self.command else self.message
