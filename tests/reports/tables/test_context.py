"""Context-parallel steps: their table, and methods compared."""

import pytest
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
            "load balance": "65.0 %",
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


@pytest.mark.parametrize(
    ("ranks", "verdict"),
    [(2, "sends more"), (4, "sends as many"), (8, "sends fewer")],
)
def test_crossover_depends_on_the_ranks(ranks: int, verdict: str) -> None:
    methods = ("ring", "zigzag")
    records = [context_record(name, ranks=ranks, crossover_ranks=4.0) for name in methods]
    table = find_table_of_run(load_records(*records), "context-table")
    (note,) = table.notes
    assert "= 4 ranks" in note
    assert verdict in note


def test_methods_are_compared_paired_by_repetition() -> None:
    drifts = (1.0, 1.2, 1.5)
    records = []
    for repetition, drift in enumerate(drifts):
        for method, seconds in (("ring", 0.010), ("ulysses", 0.009)):
            record = context_record(method, seconds=drift * seconds)
            records.append(replace(record, repetition=repetition))
    ring, ulysses = report_lines("context-table", *records)
    assert ring["time change"] == "base"
    assert ulysses["time change"] == "-10.0 % [-10.0 %, -10.0 %]"


def test_methods_are_compared_on_equal_ranks() -> None:
    records = [context_record("ring"), context_record("ulysses", ranks=4)]
    assert "time change" not in report_lines("context-table", *records)[0]


def test_figures_compare_methods_over_sequences() -> None:
    records = [
        context_record(method, sequence=sequence)
        for method in ("ring", "ulysses")
        for sequence in (64, 128)
    ]
    table = find_table_of_run(load_records(*records), "context-table")
    charts = {chart.name: chart for chart in table.figures()}
    assert list(charts) == ["context_1", "context_2", "context_3"]
    texts = find_texts(charts["context_1"].draw())
    assert {"ring", "ulysses"} <= set(texts)
