"""Operations against groups: a column for each group of ranks, alone and together, and the slowest by name."""

from typing import Any

from reports_fixtures import collective, make_plan, make_run, ok

from bench.records import Record
from reports.group_table import Grouped, group_name, grouped, grouped_columns
from reports.summary import Row, summarize


def rows_of(*records: Record) -> tuple[Row, ...]:
    return summarize(make_run(make_plan([record.case for record in records]), records)).rows


def member(number: int, seconds: float = 1e-3, size: int = 1024, **more: Any) -> Record:
    params = {"group": "pairs", "member": number, **more}
    ranks = [2 * number, 2 * number + 1]
    return ok(collective("all_reduce", size, **params), seconds=seconds, details={"group_ranks": ranks})


def cells_of(found: tuple[Grouped, ...], place: int = 0) -> dict[str, str]:
    return {column.title: column.text(found[place]) for column in grouped_columns(found)}


def test_each_group_is_a_column_of_its_ranks() -> None:
    found = grouped(rows_of(member(0), member(1, 4e-3), member(1, 8e-3, together=True)))
    assert cells_of(found) == {
        "operation": "all_reduce",
        "mode": "blocking",
        "dtype": "float32",
        "size": "1K",
        "pairs 0,1": "0.00154",
        "pairs 2,3": "0.000384",
        "pairs 2,3 together": "0.000192",
        "slowest alone": "pairs 2,3",
    }


def test_sizes_are_lines_and_a_group_without_one_reads_unknown() -> None:
    found = grouped(rows_of(member(0), member(1), member(0, size=4096), member(2, size=4096)))
    assert [one.first.case.params["size_bytes"] for one in found] == [1024, 4096]
    assert cells_of(found)["pairs 4,5"] == "-"
    assert cells_of(found, 1)["pairs 2,3"] == "-"


def test_one_group_alone_is_no_comparison() -> None:
    assert grouped(rows_of(member(0), ok(collective()))) == ()


def test_one_known_group_is_slower_than_none() -> None:
    (one,) = grouped(rows_of(member(0), member(0, together=True)))
    assert one.slowest is None


def test_a_group_of_unknown_ranks_is_called_by_its_number() -> None:
    (row,) = rows_of(ok(collective(group="node", member=3)))
    assert group_name(row) == "node member 3"
    (other,) = rows_of(ok(collective(group="tp"), details={"group_ranks": "0-1"}))
    assert group_name(other) == "tp member 0"
