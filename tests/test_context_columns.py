"""The tables of attention over ranks: what a row says, and what has no column as nobody knows it."""

from collections.abc import Sequence
from typing import TypeVar

from reports_fixtures import context_details, context_record, cp, hop, make_plan, make_run, ok, step_metrics

from bench.records import Record
from reports.columns import Column
from reports.parallel.context import Context, contexts, hops
from reports.parallel.context_columns import context_columns, hop_columns
from reports.summary import summarize

T = TypeVar("T")


def found_in(*records: Record) -> tuple[Context, ...]:
    return contexts(summarize(make_run(make_plan([record.case for record in records]), records)).rows)


def cells_of(columns: Sequence[Column[T]], row: T) -> dict[str, str]:
    return {column.title: column.text(row) for column in columns}


def test_a_step_says_all_it_knows() -> None:
    (one,) = found_in(context_record(seconds=0.02))
    assert cells_of(context_columns([one]), one) == {
        "method": "ring",
        "mask": "causal",
        "cp": "2",
        "sequence": "64",
        "step time": "20.0 ms [18.0, 22.0]",
        "tokens/s": "205000",
        "bytes sent": "3.00 MiB",
        "ratio forward": "1.000",
        "ratio backward": "1.250",
        "balance": "65.0 %",
        "ceiling": "67.0 %",
        "exposed cp": "6.00 ms",
        "comm alone": "4.00 ms",
        "exposed hops": "3.00 ms",
        "exposed part": "75.0 %",
        "waited": "6.00 ms",
        "activations": "5.00 MiB",
    }


def test_what_nobody_knows_has_no_column_and_dashes_beside_others() -> None:
    bare = ok(cp("torch_cp"), metrics=step_metrics(0.5), details=context_details("torch_cp", attention_steps=[]))
    (alone,) = found_in(bare)
    titles = [column.title for column in context_columns([alone])]
    assert titles == ["method", "mask", "cp", "sequence", "step time", "tokens/s"]
    both = found_in(context_record(), bare)
    cells = cells_of(context_columns(both), both[1])
    assert (cells["balance"], cells["exposed cp"], cells["bytes sent"]) == ("-", "-", "-")


def test_steps_are_named_by_method_and_what_has_no_column() -> None:
    details = context_details()
    more = ok(cp("ring", layers=8), metrics=step_metrics(0.5), details=details)
    found = found_in(more, ok(cp("ring", layers=4), metrics=step_metrics(0.4), details=details))
    assert [context_columns(found)[0].text(one) for one in found] == ["ring layers=8", "ring layers=4"]


def test_each_hop_stands_beside_what_it_takes_alone() -> None:
    (_, line) = hops(found_in(context_record()))
    assert cells_of(hop_columns([line]), line) == {
        "method": "ring",
        "mask": "causal",
        "cp": "2",
        "sequence": "64",
        "direction": "backward",
        "step": "1",
        "what": "gradients",
        "bytes": "128 KiB",
        "count": "4",
        "alone": "2.00 ms",
        "exposed": "3.00 ms",
        "exposed part": "150 %",
        "waited": "3.00 ms",
        "pairs max/mean": "1.5",
    }


def test_a_hop_without_time_or_pairs_has_no_share() -> None:
    told = [hop(comm_seconds=0.0, pairs_by_rank=[0, 0])]
    lines = hops(found_in(context_record(attention_steps=told)))
    cells = cells_of(hop_columns(lines), lines[0])
    assert cells["exposed part"] == "-"
    assert "pairs max/mean" not in cells


def test_a_narrow_terminal_keeps_time_and_what_is_exposed() -> None:
    found = found_in(context_record())
    kept = [column.title for column in context_columns(found) if not column.drop]
    assert kept == ["method", "mask", "cp", "sequence", "step time", "exposed cp"]


def test_every_column_is_explained() -> None:
    found = found_in(context_record())
    assert all(column.help for column in context_columns(found))
    assert all(column.help for column in hop_columns(hops(found)))
