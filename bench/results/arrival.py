"""Who comes late and who leaves last: blame from the ranks' stamps on one clock. Pure.

The slowest own duration does not name the straggler: who arrives late waits least.
"""

from collections import Counter
from collections.abc import Sequence

import msgspec


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """The rank that most often arrives last and in what share of iterations; the same for leaving last.

    ``uncertainty`` (s) is the clock's; where it exceeds the skew, the late rank is not known.
    """

    method: str
    uncertainty: float
    late_rank: int | None
    share: float | None
    last_out_rank: int | None
    last_out_share: float | None


def blame(
    last_in: Sequence[int], last_out: Sequence[int], skew_seconds: Sequence[float], method: str, uncertainty: float
) -> Arrival:
    """Return who was last, from the rank that was last in each iteration; nobody where the clock cannot tell."""
    told = [rank for rank, skew in zip(last_in, skew_seconds, strict=True) if skew > uncertainty]
    late, share = _most_often(told, len(last_in))
    out, out_share = _most_often(list(last_out), len(last_out))
    return Arrival(
        method=method,
        uncertainty=uncertainty,
        late_rank=late,
        share=share,
        last_out_rank=out,
        last_out_share=out_share,
    )


def _most_often(ranks: Sequence[int], total: int) -> tuple[int | None, float | None]:
    if not ranks:
        return None, None
    rank, count = Counter(ranks).most_common(1)[0]
    return rank, round(count / total, 4)
