"""Types of numbers and parameters in files with their limits, and the check of times."""

from datetime import datetime
from typing import Annotated

from msgspec import Meta

NonNegative = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=0)]
Rank = Annotated[int, Meta(ge=0)]
NumRanks = Annotated[int, Meta(ge=1, le=1 << 20)]
RepetitionIndex = Annotated[int, Meta(ge=0)]
MAX_REPETITIONS = 65_536
NumRepetitions = Annotated[int, Meta(ge=1, le=MAX_REPETITIONS)]
Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
ParamValue = bool | Int64 | float | str


def check_timestamp(text: str) -> None:
    """Raise ``ValueError`` unless the text is an ISO 8601 time with a time zone."""
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError(f"{text[:30]!r} has no time zone")
