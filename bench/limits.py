"""Types of numbers in files with the limits that msgspec checks, and a check of timestamps."""

from datetime import datetime
from typing import Annotated

from msgspec import Meta

NonNegative = Annotated[float, Meta(ge=0)]
"""A number of at least 0."""
Count = Annotated[int, Meta(ge=0)]
"""A whole number of at least 0."""
Rank = Annotated[int, Meta(ge=0)]
"""The number of a rank, from 0."""
NumRanks = Annotated[int, Meta(ge=1, le=1 << 20)]
"""The number of ranks or nodes, from 1 to 2**20."""
RepetitionIndex = Annotated[int, Meta(ge=0)]
"""The number of a repetition in its run, from 0."""
NumRepetitions = Annotated[int, Meta(ge=1, le=65_536)]
"""The number of repetitions of a run, from 1 to 65536."""
Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""A whole number that fits into 64 bits with a sign."""
ParamValue = bool | Int64 | float | str
"""The value of a parameter of a case, as files store it."""


def check_timestamp(text: str) -> None:
    """Raise ``ValueError`` unless the text is a time in ISO 8601 format with a time zone."""
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError(f"{text[:30]!r} has no time zone")
