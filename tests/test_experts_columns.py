"""The tables of experts over ranks: what a row says, and what has no column as nobody knows it."""

from collections.abc import Sequence
from typing import TypeVar

from reports_fixtures import make_plan, make_run, mixture_record, ok, step_metrics

from bench.records import Record
from reports.columns import Column
from reports.parallel.experts import Mixture, mixtures, shares
from reports.parallel.experts_columns import claims, mixture_columns, share_columns
from reports.summary import summarize

T = TypeVar("T")


def found_in(*records: Record) -> tuple[Mixture, ...]:
    return mixtures(summarize(make_run(make_plan([record.case for record in records]), records)).rows)


def cells_of(columns: Sequence[Column[T]], row: T) -> dict[str, str]:
    return {column.title: column.text(row) for column in columns}


def test_a_step_says_all_it_knows() -> None:
    (one,) = found_in(mixture_record("ep_step", "zipf", 1.25, 0.02))
    assert cells_of(mixture_columns([one]), one) == {
        "scope": "ep_step",
        "routing": "zipf",
        "capacity": "1.25",
        "EP": "2",
        "variant": "all_to_all",
        "step time": "20.0 ms [18.0, 22.0]",
        "rank load": "1.35",
        "expert load": "2.95",
        "dropped": "12.5 %",
        "expected": "12.5 %",
        "bytes ratio": "1.000",
        "dedup": "0.750",
        "dispatch GB/s": "1.00",
        "dispatch GB/s (logical)": "2.00",
        "combine GB/s": "1.00",
        "combine GB/s (logical)": "2.00",
        "exposed ep": "8.00 ms",
        "lost": "4.00 ms",
        "slow-down": "1.25x",
        "claim": "ep_step: what it may claim",
    }


def test_what_nobody_knows_has_no_column_and_dashes_beside_others() -> None:
    record = mixture_record()
    bare = ok(record.case, metrics=step_metrics(0.5), details=record.details)
    (alone,) = found_in(bare)
    titles = [column.title for column in mixture_columns([alone])]
    assert titles == ["scope", "routing", "capacity", "EP", "variant", "step time", "claim"]
    assert cells_of(mixture_columns([alone]), alone)["claim"] == "-"
    both = found_in(bare, mixture_record(routing="zipf"))
    assert cells_of(mixture_columns(both), both[0])["dedup"] == "-"


def test_each_claim_is_told_once() -> None:
    found = found_in(mixture_record(), mixture_record(routing="zipf"), mixture_record("ep_step"))
    assert claims(found) == ("ep_layer: what it may claim", "ep_step: what it may claim")


def test_each_rank_says_who_is_chosen() -> None:
    lines = shares(found_in(mixture_record(routing="zipf")))
    assert cells_of(share_columns(lines), lines[1]) == {
        "step": "ep_layer",
        "capacity": "dropless",
        "rank": "1",
        "experts": "4 to 7",
        "chosen": "690",
        "of mean": "1.35",
        "kept": "690",
        "by expert": "190 46 76 378",
    }


def test_layers_are_named_where_there_are_several() -> None:
    load = list(range(8))
    alike = shares(found_in(mixture_record(expert_load=[load] * 2, rank_load=[[1, 2]] * 2)))
    assert [cells_of(share_columns(alike), one)["layer"] for one in alike] == ["all", "all"]
    apart = shares(found_in(mixture_record(expert_load=[load, load[::-1]], rank_load=[[1, 2]] * 2)))
    assert [cells_of(share_columns(apart), one)["layer"] for one in apart] == ["0", "0", "1", "1"]


def test_many_experts_are_told_by_their_least_and_most() -> None:
    lines = shares(found_in(mixture_record(expert_load=[list(range(64))])))
    assert cells_of(share_columns(lines), lines[1])["by expert"] == "32 to 63"
    single = shares(found_in(mixture_record(expert_load=[[5, 7]])))
    assert cells_of(share_columns(single), single[1])["experts"] == "1"


def test_every_column_is_explained() -> None:
    found = found_in(mixture_record())
    assert all(column.help for column in mixture_columns(found))
    assert all(column.help for column in share_columns(shares(found)))
