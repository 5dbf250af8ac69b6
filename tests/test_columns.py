from collections.abc import Sequence
from typing import Any

import pytest
from reports_fixtures import bad, collective, make_plan, make_run, ok, seconds_metric, step

from bench.cases import make_case
from bench.records import Check, Record
from reports.columns import Column, check_word, communication_columns, step_columns
from reports.summary import Row, summarize


def rows_of(*records: Record, launches: int = 1) -> tuple[Row, ...]:
    return summarize(make_run(make_plan([record.case for record in records], launches=launches), records)).rows


def cells_of(columns: Sequence[Column], row: Row) -> dict[str, str]:
    return {column.title: column.text(row) for column in columns}


def test_a_communication_row() -> None:
    (row,) = rows_of(ok(collective("broadcast", 65536, root=1), seconds=1e-3, grade="fair"))
    assert cells_of(communication_columns([row]), row) == {
        "operation": "broadcast root=1",
        "mode": "blocking",
        "dtype": "float32",
        "size": "64K",
        "time": "1.00 ms [0.900, 1.10]",
        "algbw GB/s": "0.0655",
        "busbw GB/s": "0.0983",
        "p99": "2.00 ms",
        "noise": "fair",
        "n": "120",
        "launches": "1/1",
        "stop": "precision",
        "check": "ok",
    }


def test_a_step_row() -> None:
    (row,) = rows_of(ok(step("ddp"), seconds=0.012, notes=["functional only", "timed compute"]))
    cells = cells_of(step_columns([row]), row)
    assert cells["step"] == "ddp"
    assert cells["step time"] == "12.0 ms [10.8, 13.2]"
    assert cells["tokens/s"] == "341000"
    assert cells["p99"] == "-"
    assert cells["notes"] == "functional only; timed compute"


def test_a_step_without_notes_or_rates_shows_dashes() -> None:
    (row,) = rows_of(ok(step("mine"), metrics={"time": seconds_metric(2.0)}, noise=None, samples={"values": []}))
    cells = cells_of(step_columns([row]), row)
    assert cells["step time"] == "2.00 s [1.80, 2.20]"
    assert (cells["tokens/s"], cells["notes"], cells["noise"], cells["n"]) == ("-", "-", "-", "-")


def test_a_case_of_another_shape_shows_dashes() -> None:
    (row,) = rows_of(ok(make_case("p2p.mine", "m:f", {}), metrics={"time": seconds_metric(None)}))
    cells = cells_of(communication_columns([row]), row)
    assert [cells[title] for title in ("mode", "dtype", "size", "time", "busbw GB/s", "p99")] == ["-"] * 6


def test_numbers_are_sorted_as_numbers_and_unknown_is_none() -> None:
    small, large = rows_of(
        ok(collective(size_bytes=2048), seconds=900e-6), ok(collective(size_bytes=1 << 20), seconds=1.1e-3)
    )
    columns = {column.title: column for column in communication_columns([small, large])}
    for title, expected in {"size": (2048, 1 << 20), "time": (900e-6, 1.1e-3), "n": (120, 120)}.items():
        assert (columns[title].sort(small), columns[title].sort(large)) == pytest.approx(expected)
    (unknown,) = rows_of(ok(collective(), metrics={"time": seconds_metric(None)}))
    assert columns["time"].sort(unknown) is None
    assert columns["busbw GB/s"].sort(unknown) is None


@pytest.mark.parametrize(
    ("given", "dropped"),
    [({"mode": "pipelined"}, {"dtype"}), ({"dtype": "float16"}, {"mode"}), ({}, {"mode", "dtype"})],
)
def test_what_tells_rows_apart_is_never_dropped(given: dict[str, Any], dropped: set[str]) -> None:
    rows = rows_of(ok(collective()), ok(collective(size_bytes=4096, **given)))
    identity = [column for column in communication_columns(rows) if column.title in ("mode", "dtype")]
    assert {column.title for column in identity if column.drop} == dropped


def test_what_a_row_is_and_its_time_are_never_dropped() -> None:
    kept = {column.title for column in communication_columns([]) if not column.drop}
    assert kept == {"operation", "size", "time", "busbw GB/s"}
    assert {column.title for column in step_columns([]) if not column.drop} == {"step", "step time", "tokens/s"}


def test_every_column_is_explained() -> None:
    assert all(column.help for column in (*communication_columns([]), *step_columns([])))


@pytest.mark.parametrize(
    ("check", "word"),
    [
        (Check(), "unchecked"),
        (Check(passed=True, wrong=0), "ok"),
        (Check(passed=False, wrong=3), "3 wrong"),
        (Check(passed=False), "wrong"),
    ],
)
def test_the_check_in_a_word(check: Check, word: str) -> None:
    (row,) = rows_of(bad(collective(), check=check))
    assert check_word(row) == word


def test_the_p99_is_that_of_the_headline() -> None:
    metrics = {"step_time": seconds_metric(1.0), "step_time_p99": seconds_metric(3.0)}
    (row,) = rows_of(ok(step(), metrics=metrics))
    assert cells_of(step_columns([row]), row)["p99"] == "3.00 s"


def test_launches_say_how_many_of_how_many() -> None:
    (row,) = rows_of(ok(collective()), launches=5)
    assert cells_of(communication_columns([row]), row)["launches"] == "1/5"
