"""Expert-parallel steps: expert load by layer and rank, columns, and the report's section."""

from typing import Any

import pytest

from parbench.bench.results.records import Record
from parbench.reports.analysis.experts import Mixture, mixtures, read_mixture, shares
from parbench.reports.analysis.summary import unreadable
from parbench.reports.sections.experts import (
    claims,
    experts_section,
    mixture_columns,
    share_columns,
)
from tests.support.report_rows import analyze_records, column_texts, require, summarize_rows
from tests.support.reports_fixtures import (
    EXPERT_LOADS,
    expert_case,
    expert_record,
    ok_record,
    step_case,
)


def read(*records: Record) -> tuple[Mixture, ...]:
    return mixtures(summarize_rows(*records))


def mixture_of(record: Record) -> Mixture:
    (mixture,) = read(record)
    return mixture


def layered(*loads: list[int]) -> Record:
    return expert_record(expert_load=list(loads), rank_load=[[1, 2]] * len(loads))


def test_mixture_has_scope_routing_and_capacity() -> None:
    mixture = mixture_of(expert_record("ep_dispatch", "zipf", 1.25))
    assert (mixture.scope, mixture.routing, mixture.capacity) == ("ep_dispatch", "zipf", 1.25)
    assert (mixture.ep, mixture.variant, mixture.experts) == (2, "all_to_all", 8)
    assert mixture_of(expert_record(capacity=0.0)).capacity is None


def test_claims_are_listed_once_per_scope() -> None:
    found = read(expert_record(), expert_record(routing="zipf"), expert_record("ep_step"))
    assert claims(found) == ("ep_layer: what it may claim", "ep_step: what it may claim")


def test_shares_divide_experts_between_ranks() -> None:
    first, second = shares(read(expert_record(routing="hot_rank")))
    assert (first.rank, first.first_expert, first.chosen, first.of_mean) == (0, 0, [192] * 4, 1.5)
    assert (second.rank, second.first_expert, second.chosen) == (1, 4, [64] * 4)
    replicated = expert_record(rank_load=[[100, 200, 30, 40]])
    assert [share.kept for share in shares(read(replicated))] == [130, 240]
    (share,) = shares(read(expert_record(axes={})))
    assert share.chosen == list(EXPERT_LOADS["balanced"]), "one rank has all experts"
    empty = expert_record(expert_load=[[0] * 8], rank_load=[[0, 0]])
    assert [share.of_mean for share in shares(read(empty))] == [None, None]


def test_other_steps_are_no_mixtures() -> None:
    (row,) = summarize_rows(ok_record(step_case()))
    assert (read_mixture(row), mixtures([row])) == (None, ())
    assert unreadable([row], read_mixture) == ()
    assert experts_section(analyze_records(ok_record(step_case()))) is None


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
def test_contradictory_loads_are_notes_of_the_section(details: dict[str, Any], value: str) -> None:
    record = ok_record(expert_case(), details={**expert_record().details, **details})
    section = require(experts_section(analyze_records(record)))
    assert (section.tables, read(record)) == ((), ())
    (note,) = section.notes
    assert note.startswith(record.case.label)
    assert value in note


def test_mixture_columns_show_load_and_cost() -> None:
    mixture = mixture_of(expert_record("ep_step", "zipf", 1.25, 0.02))
    cells = column_texts(mixture_columns([mixture]), mixture)
    names = (
        "EP",
        "capacity",
        "rank load",
        "expert load",
        "dropped",
        "imbalance time",
        "exposed ep",
    )
    assert [cells[name] for name in names] == [
        *("2", "1.25", "1.35", "2.95", "12.5 %", "4.00 ms", "8.00 ms")
    ]


def test_share_columns_show_choices_by_expert() -> None:
    lines = shares(read(expert_record(routing="zipf")))
    cells = column_texts(share_columns(lines), lines[1])
    names = ("rank", "experts", "chosen", "of mean", "kept", "by expert")
    assert [cells[name] for name in names] == [
        *("1", "4 to 7", "690", "1.35", "690", "190 46 76 378")
    ]
    many = shares(read(expert_record(expert_load=[list(range(64))])))
    assert column_texts(share_columns(many), many[1])["by expert"] == "32 to 63"


def test_share_columns_join_equal_layers() -> None:
    load = list(range(8))
    for other, layers in ((load, ["all", "all"]), (load[::-1], ["0", "0", "1", "1"])):
        lines = shares(read(layered(load, other)))
        assert [column_texts(share_columns(lines), line)["layer"] for line in lines] == layers


def test_section_has_steps_and_each_routing_once() -> None:
    records = [expert_record(), expert_record(routing="zipf", capacity=1.25)]
    section = require(experts_section(analyze_records(*records, expert_record(routing="zipf"))))
    sizes = {table.id: len(table.rows) for table in section.tables}
    assert sizes == {"experts-table": 3, "experts-load": 4}
