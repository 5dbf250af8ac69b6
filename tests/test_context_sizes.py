"""Methods against the number of ranks, over several runs: like with like, and where Ulysses begins to send less."""

from collections.abc import Iterable

from reports_fixtures import context_record, make_plan, make_run

from bench.records import Record
from reports.parallel.context import Context, contexts
from reports.parallel.context_sizes import sizes
from reports.summary import summarize


def contexts_of(*runs: Iterable[Record]) -> list[Context]:
    """Return the steps of several runs."""
    found: list[Context] = []
    for records in map(list, runs):
        rows = summarize(make_run(make_plan([record.case for record in records]), records)).rows
        found += contexts(rows)
    return found


def on(ranks: int, sequence: int = 64) -> list[Record]:
    return [context_record(method, 0.02 / ranks, sequence, ranks=ranks) for method in ("ring", "ulysses")]


def test_each_method_is_a_line_by_ranks_whatever_the_order_of_the_runs() -> None:
    [one] = sizes(contexts_of(on(4), on(2)))
    assert one.title == "Methods against cp: sequence 64, causal mask"
    assert {name: [step.ranks for step in of] for name, of in one.lines.items()} == {"ring": [2, 4], "ulysses": [2, 4]}
    assert one.crossover_ranks == 2.0


def test_lengths_are_not_mixed_and_one_number_of_ranks_is_no_comparison() -> None:
    found = sizes(contexts_of([*on(2), *on(2, 128)], [*on(4), *on(4, 128)], on(2, 256)))
    assert [one.title for one in found] == [f"Methods against cp: sequence {n}, causal mask" for n in (64, 128)]
    assert sizes(contexts_of(on(2), on(2))) == ()
    assert sizes([]) == ()


def test_an_unknown_crossover_is_none() -> None:
    records = [[context_record("ring", 0.02, ranks=n, crossover_ranks=None)] for n in (2, 4)]
    [one] = sizes(contexts_of(*records))
    assert one.crossover_ranks is None
