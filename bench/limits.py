"""What numbers, times and texts may be in files, beyond what any machine makes: more could cost memory or time."""

import re
from datetime import datetime
from typing import Annotated

from msgspec import Meta

Amount = Annotated[float, Meta(ge=-1e30, le=1e30)]
"""Of any unit."""
Positive = Annotated[float, Meta(ge=0, le=1e30)]
Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Whole = Annotated[int, Meta(ge=-(1 << 53), le=1 << 53)]
Rank = Annotated[int, Meta(ge=0, lt=1 << 20)]
Ranks = Annotated[int, Meta(ge=1, le=1 << 20)]
Launch = Annotated[int, Meta(ge=0, lt=1 << 16)]
Launches = Annotated[int, Meta(ge=1, le=1 << 16)]
Name = Annotated[str, Meta(max_length=2_000)]
Id = Annotated[str, Meta(max_length=300, pattern=r"^[^/\x00-\x1f\x7f]+$")]
"""A run's: it is shown as a path, and chosen by."""
Words = Annotated[str, Meta(max_length=100_000)]
Long = Annotated[str, Meta(max_length=1 << 20)]
"""A stack of calls, or rows of a matrix."""
ParamValue = bool | Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | Amount | Long
"""A parameter's value."""
ParamValues = Annotated[dict[Name, ParamValue], Meta(max_length=200)]
"""A case's: its rows are compared by each of them."""
MOST_CASES, MOST_NOTES, MOST_MEASUREMENTS = 20_000, 1_000, 1 << 20
_YEARS = re.compile("(19[7-9]|2[01])[0-9]")


def check_time(text: str) -> None:
    """Refuse what is no time in ISO 8601, or in no year that dates are drawn for; ``ValueError``."""
    if _YEARS.match(text) is None:
        raise ValueError(f"{text[:30]!r} is no time")
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError(f"{text[:30]!r} tells no zone")
