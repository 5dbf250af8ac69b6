"""The columns of the tables on communication: what each shows and sorts by."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from parbench.bench.plan.cases import make_case
from parbench.bench.results.fit import Fit, Segment
from parbench.bench.results.records import Check, Record
from parbench.reports.analysis.contrasts import group_name, grouped
from parbench.reports.analysis.fits import Ceiling, Curve
from parbench.reports.report import Column
from parbench.reports.sections.row_columns import communication_columns
from tests.support.report_rows import (
    analyze_records,
    column_texts,
    find_analysis_table,
    row_text,
    summarize_row,
    summarize_rows,
)
from tests.support.reports_fixtures import collective_case, failed_record, ok_record, seconds_metric

WITHIN, LATENCY = "time, within this launch", "latency, within this launch"


def fit_columns(curves: Sequence[Curve]) -> tuple[Column[Any], ...]:
    return find_analysis_table(
        replace(analyze_records(ok_record(collective_case())), curves=tuple(curves)), "fits"
    ).columns


def test_communication_columns_show_gaps_as_dashes() -> None:
    row = summarize_row(ok_record(collective_case("broadcast", 65536, root=1)))
    assert column_texts(communication_columns([row]), row)["operation"] == "broadcast root=1"
    other = summarize_row(
        ok_record(make_case("p2p.mine", "m:f", {}), metrics={"time": seconds_metric(None)}),
        launches=5,
    )
    cells = column_texts(communication_columns([other]), other)
    assert [cells[title] for title in ("mode", "dtype", "size", "time", "busbw GB/s", "p99")] == [
        "-"
    ] * 6
    assert cells["launches"] == "1/5"


def test_interval_of_one_repetition_is_marked() -> None:
    alone = [summarize_row(ok_record(collective_case(size_bytes=size))) for size in (1024, 2048)]
    row_text = column_texts(communication_columns(alone), alone[0])
    assert (row_text[WITHIN], row_text["noise (one launch)"]) == ("1.00 ms [0.900, 1.10]", "stable")
    cut = summarize_row(ok_record(collective_case()), launches=2)
    whole = summarize_row(
        *(ok_record(collective_case(size_bytes=2048), i, 1e-3 * 2**i) for i in range(3)), launches=3
    )
    row_text, other = (
        column_texts(communication_columns([cut, whole]), row) for row in (cut, whole)
    )
    assert (row_text["time"], row_text["noise"]) == (
        "1.00 ms (one launch)",
        "stable within this launch",
    )
    assert (other["time"].startswith("2.00 ms ["), other["noise"]) == (True, "very noisy")


def test_check_column_has_one_word() -> None:
    row_text = {
        "unchecked": Check(),
        "ok": Check(passed=True, wrong=0),
        "3 wrong": Check(passed=False, wrong=3),
    }
    for word, check in {**row_text, "wrong": Check(passed=False)}.items():
        row = summarize_row(failed_record(collective_case(), check=check))
        assert column_texts(communication_columns([row]), row)["check"] == word


def segment(sizes: tuple[int, int], latency: float, reach: float, *rates: float | None) -> Segment:
    row_text = {
        "latency_seconds": latency,
        "latency_low": latency - reach,
        "latency_high": latency + reach,
    }
    names = ("bytes_per_second", "bytes_per_second_low", "bytes_per_second_high")
    row_text |= dict(zip(names, rates, strict=True))  # type: ignore[arg-type]
    return Segment(first_bytes=sizes[0], last_bytes=sizes[1], **row_text)


FIRST = segment((1024, 65536), 12e-6, 0.5e-6, 8e9, 7.5e9, 8.6e9)
LAST = segment((262144, 1 << 26), 25e-6, 1e-6, 40e9, 38e9, None)
FLAT = segment((1024, 65536), 12e-6, 1e-6, None, 1e12, None)
TWO_LINES = Fit(
    segments=(FIRST, LAST),
    half_bandwidth_bytes=1e6,
    off_curve=((4096, 0.583), (1 << 20, -0.31)),
    residual=0.0213,
    launches=1,
    method="",
)
NO_SLOPE = Fit(
    segments=(FLAT,), half_bandwidth_bytes=None, off_curve=(), residual=0.001, launches=1, method=""
)


def curve_of(
    found: Fit,
    factor: float | None = 1.5,
    ceiling: Ceiling | None = None,
    record: Record | None = None,
) -> Curve:
    rows = summarize_rows(record or ok_record(collective_case()))
    return Curve(rows=rows, fit=found, busbw_factor=factor, ceiling=ceiling)


def test_fit_columns_show_a_breakpoint() -> None:
    curve = curve_of(TWO_LINES)
    assert row_text(fit_columns([curve]), curve) == (
        "operation: all_reduce | mode: blocking | dtype: float32 | latency, within this launch: 12.0 us [11.5, 12.5] | "
        "algbw GB/s: 40.0 [38.0, -] | busbw GB/s: 60.0 [57.0, -] | n_1/2: 977 KiB | knee: 127 KiB [64K, 256K] | "
        "off the curve: 4K +58 %, 1M -31 % | residual: 2.13 % | "
        "lines: 1K to 64K: 12.0 us + size / 8.00 GB/s; 256K to 64M: 25.0 us + size / 40.0 GB/s"
    )


def test_fit_of_one_repetition_has_no_interval() -> None:
    alone, several = curve_of(NO_SLOPE), curve_of(replace(TWO_LINES, launches=5))
    one, other = (column_texts(fit_columns([alone, several]), curve) for curve in (alone, several))
    assert (one["latency"], other["latency"]) == ("12.0 us (one launch)", "12.0 us [11.5, 12.5]")
    two = curve_of(TWO_LINES)
    assert column_texts(fit_columns([two, several]), two)["busbw GB/s"] == "60.0 (one launch)"


def test_contrast_has_a_column_per_load() -> None:
    records = [
        ok_record(collective_case(size_bytes=size, **more), seconds=2e-3 if more else 1e-3)
        for size in (1024, 2048)
        for more in ({}, {"background": "gemm"})
    ]
    table = find_analysis_table(
        analyze_records(*records, ok_record(collective_case(background="all_to_all"))), "contrast-1"
    )
    columns, (one, two) = table.columns, table.rows
    cells, row_text = column_texts(columns, one), ("time", "beside gemm", "beside all_to_all")
    assert list(cells) == [
        "operation",
        "mode",
        "dtype",
        "size",
        *(WITHIN.replace("time", name) for name in row_text),
    ]
    assert (cells["operation"], cells[WITHIN]) == ("all_reduce", "1.00 ms [0.900, 1.10]")
    assert cells[WITHIN.replace("time", "beside gemm")].startswith("2.00 [1.7")
    *_, last = columns
    assert (last.text(two), last.sort(two), last.sort(one)) == ("-", None, 1.0)


def member(number: int, seconds: float = 1e-3, size: int = 1024, **more: Any) -> Record:
    params = {"group": "pairs", "group_index": number, **more}
    ranks = [2 * number, 2 * number + 1]
    return ok_record(
        collective_case("all_reduce", size, **params),
        seconds=seconds,
        details={"group_ranks": ranks},
    )


def group_words(*records: Record) -> list[str]:
    table = find_analysis_table(analyze_records(*records), "operation-group")
    return [row_text(table.columns, row) for row in table.rows]


def test_groups_are_columns_and_sizes_lines() -> None:
    assert group_words(member(0), member(1, 4e-3), member(1, 8e-3, concurrent=True)) == [
        "operation: all_reduce | mode: blocking | dtype: float32 | size: 1K | pairs 0,1: 0.00154 | "
        "pairs 2,3: 0.000384 | pairs 2,3 together: 0.000192 | slowest alone: pairs 2,3"
    ]
    small, large = group_words(member(0), member(1), member(0, size=4096), member(2, size=4096))
    assert ("size: 1K" in small, "size: 4K" in large) == (True, True)
    assert "pairs 4,5: -" in small
    assert "pairs 2,3: -" in large


def test_groups_need_a_second_group() -> None:
    assert grouped(summarize_rows(member(0), ok_record(collective_case()))) == ()
    (one,) = grouped(summarize_rows(member(0), member(0, concurrent=True)))
    assert one.slowest is None
    assert (
        group_name(summarize_row(ok_record(collective_case(group="node", group_index=3))))
        == "node member 3"
    )
