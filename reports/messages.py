"""Phrases that several findings share."""

from collections.abc import Sequence

from parbench.bench.results.formatting import format_percent

MAX_NAMED_SUBJECTS = 3


def add_subjects(message: str, names: Sequence[str]) -> str:
    """Add the other subjects of the same finding to a message."""
    if not names:
        return message
    text = ", ".join(names[:MAX_NAMED_SUBJECTS])
    num_more = len(names) - MAX_NAMED_SUBJECTS
    more = f" and {num_more} more" if num_more > 0 else ""
    return f"{message} Also: {text}{more}."


def describe_no_finding(min_share: float) -> str:
    """Return the sentence about a report without findings."""
    return f"Nothing stands out: no cause costs {format_percent(min_share)} of the step or more."
