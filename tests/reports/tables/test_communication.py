"""The table of fits, and operations over sizes."""

from msgspec.structs import replace

from parbench.bench.results.records import Record
from tests.support.reports.report_rows import (
    report_lines,
)
from tests.support.reports.reports_fixtures import (
    collective_case,
    curve_records,
    ok_record,
)


def breakpoint_records() -> list[Record]:
    """Return an operation whose messages above 64K take another protocol."""
    records = []
    for size in [1024 * 2**i for i in range(17)]:
        seconds = 10e-6 + size / 1e9 if size <= 1 << 16 else 100e-6 + size / 5e9
        records.append(ok_record(collective_case(size_bytes=size), seconds=seconds))
    return records


def test_fit_shows_latency_bandwidth_and_breakpoint() -> None:
    (line,) = report_lines("fits", *breakpoint_records())
    assert line["operation"] == "all_reduce"
    assert line["latency"] == "10.0 us"
    assert line["algbw GB/s"] == "5.00"
    assert line["busbw GB/s"] == "7.50"
    assert line["n_1/2"] == "488 KiB"
    assert line["breakpoint"] == "64K to 128K"


def test_fit_has_intervals_over_repetitions() -> None:
    repeated = curve_records("broadcast")
    for repetition in (1, 2):
        repeated += [
            replace(record, repetition=repetition) for record in curve_records("broadcast")
        ]
    single, several = report_lines("fits", *curve_records(), *repeated)
    assert single["latency"] == "20.0 us"
    assert several["latency"].startswith("20.0 us [")
