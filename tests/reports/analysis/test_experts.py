"""Expert-parallel steps: their table, the load of experts and ranks, and contradictory loads."""

from typing import Any

import pytest

from parbench.reports.sections.experts import experts_section
from tests.support.report_rows import analyze_records, find_analysis_table, report_lines
from tests.support.reports_fixtures import expert_case, expert_record, ok_record, step_case


def test_table_shows_scope_load_and_cost() -> None:
    (line,) = report_lines("experts-table", expert_record("ep_step", "zipf", 1.25, 0.02))
    assert line["scope"] == "ep_step"
    assert line["routing"] == "zipf"
    assert line["capacity"] == "1.25"
    assert line["EP"] == "2"
    assert line["rank load"] == "1.35"
    assert line["expert load"] == "2.95"
    assert line["dropped"] == "12.5 %"
    assert line["imbalance time"] == "4.00 ms"
    assert line["exposed ep"] == "8.00 ms"
    (line,) = report_lines("experts-table", expert_record(capacity=0.0))
    assert line["capacity"] == "dropless"


def test_claims_are_listed_once_per_scope() -> None:
    records = [expert_record(), expert_record(routing="zipf"), expert_record("ep_step")]
    table = find_analysis_table(analyze_records(*records), "experts-table")
    assert table.notes == ("ep_layer: what it may claim", "ep_step: what it may claim")


def test_load_is_divided_between_ranks() -> None:
    first, second = report_lines("experts-load", expert_record(routing="hot_rank"))
    assert first["experts"] == "0 to 3"
    assert first["chosen"] == "768"
    assert first["of mean"] == "1.50"
    assert first["by expert"] == "192 192 192 192"
    assert second["rank"] == "1"
    assert second["experts"] == "4 to 7"
    assert second["kept"] == "256"


def test_kept_pairs_are_summed_over_replicas() -> None:
    lines = report_lines("experts-load", expert_record(rank_load=[[100, 200, 30, 40]]))
    assert [line["kept"] for line in lines] == ["130", "240"]


def test_single_rank_has_all_experts() -> None:
    (line,) = report_lines("experts-load", expert_record(axes={}))
    assert line["experts"] == "0 to 7"


def test_empty_load_has_no_mean() -> None:
    empty = expert_record(expert_load=[[0] * 8], rank_load=[[0, 0]])
    assert [line["of mean"] for line in report_lines("experts-load", empty)] == ["-", "-"]


def test_many_experts_are_shown_as_a_range() -> None:
    lines = report_lines("experts-load", expert_record(expert_load=[list(range(64))]))
    assert lines[1]["by expert"] == "32 to 63"


@pytest.mark.parametrize(
    ("second_layer", "layers"),
    [(list(range(8)), ["all", "all"]), (list(range(8, 0, -1)), ["0", "0", "1", "1"])],
)
def test_equal_layers_are_joined(second_layer: list[int], layers: list[str]) -> None:
    loads = [list(range(8)), second_layer]
    record = expert_record(expert_load=loads, rank_load=[[1, 2], [1, 2]])
    assert [line["layer"] for line in report_lines("experts-load", record)] == layers


def test_each_routing_is_listed_once() -> None:
    dropping = expert_record(routing="zipf", capacity=1.25)
    records = [expert_record(), expert_record(routing="zipf"), dropping]
    assert len(report_lines("experts-table", *records)) == 3
    assert len(report_lines("experts-load", *records)) == 4


@pytest.mark.parametrize(
    ("details", "value"),
    [
        ({"rank_load": [[1, 2], [1, 2]]}, "expert_load(1) != layers of rank_load(2)"),
        ({"expert_load": [], "rank_load": []}, "none"),
        ({"expert_load": [[1] * 7]}, "experts(7) % ep(2)"),
        ({"rank_load": [[1, 2, 3]]}, "ranks(3) % ep(2)"),
        ({"expert_load": [[1] * 8, [1] * 6], "rank_load": [[1, 2]] * 2}, "layers differ"),
        ({"expert_load": [["many"] * 8]}, "`str`"),
        ({"axes": {"ep": {"ranks": 0}}}, "ep(0)"),
    ],
)
def test_contradictory_loads_are_notes(details: dict[str, Any], value: str) -> None:
    record = ok_record(expert_case(), details={**expert_record().details, **details})
    section = experts_section(analyze_records(record))
    assert section is not None
    assert section.tables == ()
    (note,) = section.notes
    assert record.case.label in note
    assert value in note


def test_other_steps_have_no_experts_section() -> None:
    assert experts_section(analyze_records(ok_record(step_case()))) is None
