"""Context-parallel steps: their table, and methods compared."""

import pytest
from msgspec.structs import replace

from parbench.bench.results.records import Record
from parbench.reports.analysis.attention import Comparison
from tests.support.report_rows import analyze_records, assert_cells, report_lines
from tests.support.reports_fixtures import (
    context_record,
    counted_metric,
)


def test_table_shows_method_bytes_and_exposed_share() -> None:
    (line,) = report_lines("context-table", context_record("ring", num_bytes=1 << 20, ranks=2))
    assert_cells(
        line,
        {
            "method": "ring",
            "cp": "2",
            "bytes sent": "3.00 MiB",
            "ratio backward": "1.250",
            "exposed cp": "30.0 %",
            "load balance": "65.0 %",
        },
    )


def test_usp_sums_over_both_axes() -> None:
    record = context_record("usp", ranks=4, num_bytes=1000)
    ratio = counted_metric(0.5, "")
    record = replace(record, metrics={**record.metrics, "bytes_ratio.ring.forward": ratio})
    (line,) = report_lines("context-table", record)
    assert_cells(
        line,
        {
            "method": "usp ulysses=2",
            "bytes sent": "5.86 KiB",
            "exposed cp": "60.0 %",
            "ratio forward": "0.500",
        },
    )


def test_unknown_part_makes_the_sum_unknown() -> None:
    record = context_record("usp", ranks=4)
    unknown = {**record.metrics, "bytes_sent.ring": counted_metric(None, "B")}
    (context,) = analyze_records(replace(record, metrics=unknown)).contexts
    assert context.sent_bytes() is None


def compare(*records: Record) -> tuple[Comparison, ...]:
    return analyze_records(*records).context_comparisons


@pytest.mark.parametrize(
    ("ranks", "verdict"),
    [(2, "more on cp = 2"), (4, "as much on cp = 4"), (8, "less on cp = 8")],
)
def test_crossover_depends_on_the_ranks(ranks: int, verdict: str) -> None:
    methods = ("ring", "zigzag")
    records = [context_record(name, ranks=ranks, crossover_ranks=4.0) for name in methods]
    (comparison,) = compare(*records)
    assert "= 4 ranks" in comparison.crossover
    assert verdict in comparison.crossover


def test_methods_are_compared_on_equal_setups() -> None:
    (comparison,) = compare(
        context_record("ring"),
        context_record("zigzag"),
        context_record("ulysses", ranks=4),
    )
    assert [context.method for context in comparison.contexts] == ["ring", "zigzag"]
    assert "cp = 2" in comparison.title
