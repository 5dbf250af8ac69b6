"""Phrases that the messages of several findings share."""

from collections.abc import Sequence

from parbench.bench.results.formatting import format_percent

MAX_NAMED_SUBJECTS = 3


def describe_exposed(label: str, share: float) -> str:
    """Return the sentence about exposed communication with which findings start."""
    return f"{label}: {format_percent(share)} of the step is exposed communication."


def add_subjects(message: str, amounts: Sequence[tuple[str, str]]) -> str:
    """Add the other steps with the same finding to a message, each with its amount."""
    if not amounts:
        return message
    named = [f"{subject} ({amount})" for subject, amount in amounts[:MAX_NAMED_SUBJECTS]]
    num_more = len(amounts) - len(named)
    more = f" and {num_more} more" if num_more else ""
    return f"{message} Also: {', '.join(named)}{more}."


def describe_no_finding(min_share: float) -> str:
    """Return the sentence about a report without findings."""
    return f"Nothing stands out: no cause costs {format_percent(min_share)} of the step or more."
