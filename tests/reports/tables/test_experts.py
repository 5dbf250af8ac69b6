"""Expert-parallel steps: their table, the load of experts and ranks, and damaged facts."""

from parbench.reports.tables.experts import list_expert_tables
from tests.support.reports.report_rows import (
    assert_cells,
    load_records,
    report_lines,
)
from tests.support.reports.reports_fixtures import expert_case, expert_record, ok_record


def test_table_shows_scope_load_and_cost() -> None:
    (line,) = report_lines("experts-table", expert_record("ep_step", "zipf", 1.25, 0.02))
    assert_cells(
        line,
        {
            "scope": "ep_step",
            "routing": "zipf",
            "capacity": "1.25",
            "EP": "2",
            "rank load": "1.35",
            "dropped": "12.5 %",
            "imbalance time": "4.00 ms",
            "exposed ep": "8.00 ms",
        },
    )


def test_load_is_divided_between_ranks() -> None:
    first, second = report_lines("experts-load", expert_record(routing="hot_rank"))
    assert_cells(
        first,
        {
            "experts": "0 to 3",
            "routed tokens": "768",
            "load / mean": "1.50",
            "tokens per expert": "192 192 192 192",
        },
    )
    assert_cells(
        second,
        {
            "rank": "1",
            "experts": "4 to 7",
            "kept": "256",
        },
    )


def test_kept_pairs_are_summed_over_replicas() -> None:
    lines = report_lines("experts-load", expert_record(rank_load=[[100, 200, 30, 40]]))
    assert [line["kept"] for line in lines] == ["130", "240"]


def test_experts_that_ranks_cannot_share_are_a_note() -> None:
    details = {**expert_record().details, "expert_load": [[1] * 7]}
    record = ok_record(expert_case(), details=details)
    table = list_expert_tables(load_records(record))[0]
    assert not table.rows
    (note,) = table.notes
    assert record.case.short_name in note
    assert "experts(7) is not a multiple of ep(2)" in note
