from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import pytest
from reports_fixtures import bad, collective, link, make_plan, make_run, ok, rate_metric, seconds_metric

from bench.cases import make_case
from bench.ceiling import Efficiency, efficiency
from bench.fit import Fit, Segment
from bench.records import Check, Record
from reports.columns import (
    Column,
    check_word,
    communication_columns,
    figure,
    fit_columns,
    known,
    pair_columns,
    slowed_columns,
)
from reports.contrasts import interference, pairs
from reports.fits import Curve
from reports.summary import Row, summarize

T = TypeVar("T")


def rows_of(*records: Record, launches: int = 1) -> tuple[Row, ...]:
    return summarize(make_run(make_plan([record.case for record in records], launches=launches), records)).rows


def cells_of(columns: Sequence[Column[T]], row: T) -> dict[str, str]:
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


def test_every_column_is_explained() -> None:
    assert all(column.help for column in communication_columns([]))
    assert all(column.help for column in fit_columns([curve_of(TWO_LINES, of_link=efficiency(60e9, link(50e9)))]))


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


def test_launches_say_how_many_of_how_many() -> None:
    (row,) = rows_of(ok(collective()), launches=5)
    assert cells_of(communication_columns([row]), row)["launches"] == "1/5"


FIRST = Segment(
    first_bytes=1024,
    last_bytes=65536,
    latency_seconds=12e-6,
    latency_low=11.5e-6,
    latency_high=12.5e-6,
    bytes_per_second=8e9,
    bytes_per_second_low=7.5e9,
    bytes_per_second_high=8.6e9,
)
LAST = Segment(
    first_bytes=262144,
    last_bytes=1 << 26,
    latency_seconds=25e-6,
    latency_low=24e-6,
    latency_high=26e-6,
    bytes_per_second=40e9,
    bytes_per_second_low=38e9,
    bytes_per_second_high=None,
)
FLAT = Segment(
    first_bytes=1024,
    last_bytes=65536,
    latency_seconds=12e-6,
    latency_low=11e-6,
    latency_high=13e-6,
    bytes_per_second=None,
    bytes_per_second_low=1e12,
    bytes_per_second_high=None,
)
TWO_LINES = Fit(
    segments=(FIRST, LAST),
    half_bandwidth_bytes=1e6,
    off_curve=((4096, 0.583), (1 << 20, -0.31)),
    residual=0.0213,
    method="",
)
NO_SLOPE = Fit(segments=(FLAT,), half_bandwidth_bytes=None, off_curve=(), residual=0.001, method="")


def curve_of(
    found: Fit, factor: float | None = 1.5, of_link: Efficiency | None = None, record: Record | None = None
) -> Curve:
    rows = rows_of(record or ok(collective()))
    return Curve(rows=rows, fit=found, busbw_factor=factor, efficiency=of_link or efficiency(None, None))


def test_a_fit_with_a_knee() -> None:
    curve = curve_of(TWO_LINES)
    assert cells_of(fit_columns([curve]), curve) == {
        "operation": "all_reduce",
        "mode": "blocking",
        "dtype": "float32",
        "latency": "12.0 us [11.5, 12.5]",
        "algbw GB/s": "40.0 [38.0, -]",
        "busbw GB/s": "60.0 [57.0, -]",
        "n_1/2": "977 KiB",
        "knee": "127 KiB [64K, 256K]",
        "off the curve": "4K +58 %, 1M -31 %",
        "residual": "2.13 %",
        "lines": "1K to 64K: 12.0 us + size / 8.00 GB/s; 256K to 64M: 25.0 us + size / 40.0 GB/s",
    }


def test_a_flat_fit_has_a_latency_and_dashes() -> None:
    curve = curve_of(NO_SLOPE)
    cells = cells_of(fit_columns([curve]), curve)
    assert cells.pop("latency") == "12.0 us [11.0, 13.0]"
    assert cells.pop("residual") == "0.100 %"
    assert set(list(cells.values())[3:]) == {"-"}


def test_without_its_factor_a_bus_bandwidth_is_unknown() -> None:
    curve = curve_of(TWO_LINES, factor=None)
    columns = {column.title: column for column in fit_columns([curve])}
    assert (columns["busbw GB/s"].text(curve), columns["busbw GB/s"].sort(curve)) == ("-", None)
    assert columns["algbw GB/s"].sort(curve) == 40e9


@pytest.mark.parametrize(
    ("busbw", "text"), [(20e9, "40.0 %"), (50e9, "100 %"), (60e9, "120 % (above: see note)"), (None, "-")]
)
def test_efficiency_has_a_column_where_a_link_is_declared(busbw: float | None, text: str) -> None:
    curve, known = (curve_of(TWO_LINES, of_link=efficiency(rate, link(50e9))) for rate in (busbw, 1e9))
    assert cells_of(fit_columns([curve, known]), curve)["of link"] == text


def test_ranks_have_a_column_where_curves_differ_in_them() -> None:
    record = ok(collective())
    other = msgspec.structs.replace(record, world=msgspec.structs.replace(record.world, size=16, nodes=2))
    one, two = curve_of(NO_SLOPE), curve_of(NO_SLOPE, record=other)
    assert cells_of(fit_columns([one, two]), one)["ranks"] == "4 on 1 node"
    assert cells_of(fit_columns([one, two]), two)["ranks"] == "16 on 2 nodes"


def test_fits_are_sorted_as_numbers() -> None:
    curve = curve_of(TWO_LINES, of_link=efficiency(20e9, link(50e9)))
    sort = {column.title: column.sort(curve) for column in fit_columns([curve]) if column.number}
    assert sort == pytest.approx(
        {
            "latency": 12e-6,
            "algbw GB/s": 40e9,
            "busbw GB/s": 60e9,
            "n_1/2": 1e6,
            "knee": 13e-6 / (1 / 8e9 - 1 / 40e9),
            "residual": 0.0213,
            "of link": 0.4,
        }
    )


def test_latency_and_bandwidth_are_never_dropped_and_news_goes_late() -> None:
    news, none = (
        {column.title: column.drop for column in fit_columns([curve_of(found)])} for found in (TWO_LINES, NO_SLOPE)
    )
    assert {title for title, drop in news.items() if not drop} == {"operation", "latency", "busbw GB/s"}
    assert news["knee"] < news["residual"] < none["knee"]
    assert news["off the curve"] < news["residual"] < none["off the curve"]


def test_what_slows_a_row_has_a_column_for_each_load() -> None:
    records = [ok(collective(), seconds=1e-3), ok(collective(beside="gemm"), seconds=2e-3)]
    (found,) = interference(rows_of(*records))
    cells = cells_of(slowed_columns([found], "beside "), found)
    assert cells["operation"] == "all_reduce"
    assert cells["time"] == "1.00 ms [0.900, 1.10]"
    assert cells["beside gemm"].startswith("2.00 [1.7")
    assert list(cells) == ["operation", "mode", "dtype", "size", "time", "beside gemm"]


def test_a_load_that_a_row_did_not_meet_is_a_dash() -> None:
    records = [ok(collective(size_bytes=size, **more)) for size in (1, 2) for more in ({}, {"beside": "gemm"})]
    records.append(ok(collective(size_bytes=1, beside="all_to_all")))
    one, two = interference(rows_of(*records))
    columns = {column.title: column for column in slowed_columns([one, two], "beside ")}
    assert columns["beside all_to_all"].text(two) == "-"
    assert columns["beside all_to_all"].sort(two) is None
    assert columns["beside all_to_all"].sort(one) == 1.0


def test_a_matrix_has_a_column_for_each_receiver() -> None:
    rates = {(0, 1): 1e9, (1, 0): 2e9}
    cases = {
        ends: make_case("p2p.matrix", "x:y", {"size_bytes": 1, "source": ends[0], "target": ends[1]}) for ends in rates
    }
    records = [
        ok(cases[ends], metrics={"time": seconds_metric(1.0), "busbw": rate_metric(rate)})
        for ends, rate in rates.items()
    ]
    (matrix,) = pairs(rows_of(*records))
    columns = pair_columns(matrix)
    assert [[column.text(source) for column in columns] for source in matrix.ranks] == [
        ["0", "-", "1.00"],
        ["1", "2.00", "-"],
    ]
    assert [column.sort(1) for column in columns] == [1, 2e9, None]


def test_a_column_of_numbers_sorts_by_them_and_unknown_ones_have_no_column() -> None:
    columns: tuple[Column[str], ...] = (
        figure("length", len, lambda value: f"{value} letters", "how long it is"),
        figure("nothing", lambda text: None, str, "unknown"),
    )
    kept = known(columns, ["ab", "c"])
    assert [column.title for column in kept] == ["length"]
    assert (kept[0].text("ab"), kept[0].sort("ab"), kept[0].number, kept[0].drop) == ("2 letters", 2, True, 0)
    assert known(columns, []) == ()
