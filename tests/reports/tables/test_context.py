"""Context-parallel steps: their table, and methods compared."""

from msgspec.structs import replace

from tests.support.reports.figure_parts import find_texts
from tests.support.reports.report_rows import (
    assert_cells,
    find_table_of_run,
    load_records,
    report_lines,
)
from tests.support.reports.reports_fixtures import (
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
            "exposed cp": "30.0 %",
        },
    )


def test_usp_sums_over_both_axes() -> None:
    record = context_record("usp", ranks=4, num_bytes=1000)
    (line,) = report_lines("context-table", record)
    assert_cells(
        line,
        {
            "method": "usp ulysses=2",
            "bytes sent": "5.86 KiB",
            "exposed cp": "60.0 %",
        },
    )


def test_unknown_part_makes_the_sum_unknown() -> None:
    record = context_record("usp", ranks=4)
    unknown = {**record.metrics, "bytes_sent.ring": counted_metric(None, "B")}
    (line,) = report_lines("context-table", replace(record, metrics=unknown))
    assert "bytes sent" not in line


def test_figures_compare_methods_over_sequences() -> None:
    records = [
        context_record(method, sequence=sequence)
        for method in ("ring", "ulysses")
        for sequence in (64, 128)
    ]
    table = find_table_of_run(load_records(*records), "context-table")
    [chart] = table.figures()
    assert chart.name == "context"
    texts = find_texts(chart.draw())
    assert {"ring", "ulysses"} <= set(texts)
