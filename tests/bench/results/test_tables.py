"""Tables: how cells print, which columns a table shows, what is unknown."""

import json
import math

import numpy as np
import pytest

from parbench.bench.results.tables import (
    Column,
    ColumnKind,
    SortedText,
    Table,
    metric_column,
)

TIME = Column(key="seconds", title="time", kind="s", has_interval=True, is_result=True)


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("size", np.int64(65536), "64K"),
        ("size", 65536.0, "64K"),
        ("B/s", 2.5e9, "2.50"),
        ("percent", 0.125, "12.5 %"),
        ("GB", 3.0, "3.00 GB"),
        ("count", np.float64(4.0), "4"),
        ("s", math.nan, "-"),
        ("text", "", "-"),
        ("s", "not measured", "not measured"),
        ("number", SortedText("4/5", 4), "4/5"),
    ],
)
def test_format_cell_by_kind(kind: ColumnKind, value: object, text: str) -> None:
    column = Column(key="x", title="x", kind=kind)
    assert column.format_cell({"x": value}) == text


def test_sort_key_is_a_python_number() -> None:
    column = Column(key="x", title="x", kind="count")
    assert json.dumps(column.sort_key({"x": np.int64(4)})) == "4"
    assert column.sort_key({"x": SortedText("4/5", 4)}) == 4
    assert column.sort_key({}) is None


def test_interval_is_printed_if_it_is_known() -> None:
    row = {"seconds": 1e-3, "seconds_low": 0.9e-3, "seconds_high": 1.1e-3}
    assert TIME.format_cell(row) == "1.00 ms [0.900, 1.10]"
    assert TIME.format_cell({**row, "seconds_low": math.nan}) == "1.00 ms"


def test_constant_columns_leave_the_table() -> None:
    columns = [
        Column(key="size", title="size", kind="size"),
        Column(key="mode", title="mode"),
        Column(key="note", title="note"),
        TIME,
    ]
    rows = [{"size": 4, "mode": "blocking", "seconds": 1.0}] * 2
    table = Table(id="t", title="t", columns=columns, rows=rows)
    assert table.constant == "All rows: mode blocking."
    assert [column.title for column in table.varying] == ["size", "time"]
    assert len(Table(id="t", title="t", columns=columns, rows=rows[:1]).varying) == 3


def test_table_leaves_out_columns_without_values() -> None:
    columns = [TIME, Column("note")]
    assert Table("t", "t", columns=columns, rows=[{"seconds": 1.0}]).columns == [TIME]
    assert Table("t", "t", columns=columns, rows=[]).columns == columns


def test_grade_colors_the_cell() -> None:
    column = Column(key="variation", title="noise", kind="percent", grade_key="noise")
    assert column.mark({"variation": 0.5, "noise": "very noisy"}) == "very noisy"
    assert column.mark({"variation": 0.5, "noise": None}) == ""


def test_metric_column_follows_the_declaration() -> None:
    column = metric_column("busbw")
    assert (column.key, column.title, column.kind) == ("busbw", "busbw GB/s", "B/s")
    assert metric_column("exposed_comm.dp").key == "exposed_comm.dp"
    with pytest.raises(LookupError, match="not declared"):
        metric_column("no_such_metric")
