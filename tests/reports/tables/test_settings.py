"""The table of environment variables names the best setting of each size."""

from parbench.bench.results.records import Record
from tests.support.reports.report_rows import report_lines
from tests.support.reports.reports_fixtures import collective_case, ok_record

KIB, MIB = 1024, 1 << 20


def measure(size: int, setting: str, *milliseconds: float) -> list[Record]:
    case = collective_case(size_bytes=size, NCCL_ALGO=setting)
    times = enumerate(milliseconds)
    return [ok_record(case, repetition, value / 1e3) for repetition, value in times]


def test_best_setting_by_size() -> None:
    lines = report_lines(
        "settings",
        *measure(KIB, "", 1.0, 1.01, 0.99, 1.02),
        *measure(KIB, "Ring", 2.0, 2.01, 1.99, 2.02),
        *measure(MIB, "", 9.9, 10, 10.1, 10),
        *measure(MIB, "Ring", 10, 9.8, 10.2, 10.2),
    )
    sizes = [(line["case"], line["unset"], line["Ring"], line["best"]) for line in lines]
    assert sizes == [
        ("all_reduce 1K blocking float32", "1.00 ms", "2.00 ms", "unset"),
        ("all_reduce 1M blocking float32", "10.0 ms", "10.0 ms", "unset, Ring"),
    ]
    assert lines[0]["next / fastest"].startswith("2.00 [")
