"""Operations against the groups that ran them: how fast each group of ranks is, side by side. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reports import cells
from reports.columns import Column, figure, mode_columns, size_column, words
from reports.contrasts import TOGETHER
from reports.labels import operation_without
from reports.summary import Row, common_details

_OF_GROUP = ("group", "group_index", "concurrent")


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """An operation of one size, mode and type, and its row for each group that ran it."""

    first: Row
    rows: Mapping[str, Row]

    @property
    def slowest(self) -> str | None:
        """The group with the least bus bandwidth of those that ran alone, None if fewer than two are known."""
        rates = {name: rate for name, row in self.rows.items() if (rate := row.value("busbw")) and not _together(row)}
        return min(rates, key=lambda name: rates[name]) if len(rates) > 1 else None


def grouped(rows: Sequence[Row]) -> tuple[Grouped, ...]:
    """Return each operation that several groups ran, or one both alone and beside all others."""
    found: dict[object, dict[str, Row]] = {}
    for row in rows:
        if "group" in row.case.params:
            found.setdefault(_identity(row), {})[group_name(row)] = row
    return tuple(Grouped(first=next(iter(of.values())), rows=of) for of in found.values() if len(of) > 1)


def group_name(row: Row) -> str:
    """Return a group as people call it: its kind, its ranks where they are known, and whether all ran at once."""
    params = row.case.params
    ranks = common_details(row).get("group_ranks")
    known = isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks)
    told = ",".join(map(str, ranks)) if known and ranks else f"member {params.get('group_index', 0)}"
    return f"{params['group']} {told}{f' {TOGETHER}' if _together(row) else ''}"


def grouped_columns(found: Sequence[Grouped]) -> tuple[Column[Grouped], ...]:
    """Return the columns: the operation, then each group's bus bandwidth, and which is slowest alone."""
    names = dict.fromkeys(name for one in found for name in one.rows)
    return (
        words("operation", lambda one: operation_without(one.first.case, _OF_GROUP), "what is done"),
        *mode_columns(lambda one: one.first),
        size_column(lambda one: one.first),
        *(_group(name) for name in names),
        words("slowest alone", lambda one: one.slowest or cells.UNKNOWN, "the group with the least bus bandwidth"),
    )


def _together(row: Row) -> bool:
    return bool(row.case.params.get("concurrent"))


def _identity(row: Row) -> object:
    kept = frozenset((name, value) for name, value in row.case.params.items() if name not in _OF_GROUP)
    return row.case.name, kept, row.world


def _group(name: str) -> Column[Grouped]:
    def rate(one: Grouped) -> float | None:
        return one.rows[name].value("busbw") if name in one.rows else None

    return figure(name, rate, cells.gigabytes, f"bus bandwidth of {name} in 1e9 B/s")
