"""How a case's rate grows with the ranks, over runs of different world sizes. Pure.

Steps train the same tokens on each rank, so their rate should grow as the ranks do; bus bandwidth should stay.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reports.summary import Row


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """A case at several world sizes."""

    rows: Mapping[int, Row]

    @property
    def first(self) -> Row:
        """The row of the smallest world."""
        return self.rows[min(self.rows)]

    def rate(self, ranks: int) -> float | None:
        """Return tokens a second of a step, bytes a second of bus bandwidth, else cases a second."""
        row = self.rows.get(ranks)
        if row is None:
            return None
        known = row.value("busbw" if row.is_communication else "tokens_per_second")
        seconds = row.value(row.headline)
        return known or (1 / seconds if seconds and not row.is_communication else None)

    def speed_up(self, ranks: int) -> float | None:
        """Return the rate over that of the smallest world."""
        rate, base = self.rate(ranks), self.rate(min(self.rows))
        return rate / base if rate is not None and base else None

    def efficiency(self, ranks: int) -> float | None:
        """Return the speed-up over what is hoped for: as many times the rate for steps, the same busbw."""
        found = self.speed_up(ranks)
        hoped = 1.0 if self.first.is_communication else ranks / min(self.rows)
        return None if found is None else found / hoped


def scaled(rows: Sequence[Row]) -> tuple[Scaled, ...]:
    """Return the cases that ran at two world sizes or more; of one size, the first run's row counts."""
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        if "group" not in row.case.params:
            found.setdefault(row.case.id, {}).setdefault(row.world.size, row)
    return tuple(Scaled(rows=of) for of in found.values() if len(of) > 1)


def worlds(cases: Sequence[Scaled]) -> tuple[int, ...]:
    """Return every world size of any case, the smallest first."""
    return tuple(sorted({ranks for one in cases for ranks in one.rows}))
