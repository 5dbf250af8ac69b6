"""Context-parallel steps: what records tell of them, their tables, methods and ranks side by side, and the section."""

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from report_rows import cells_of, found_in, rows_of, run_of, there, with_metrics
from report_rows import told as line_of
from reports_fixtures import context_details, context_record, cp, ok, plain, seconds_metric, step, step_metrics

from parbench.bench.results.records import Record
from parbench.reports.analysis.attention import (
    Comparison,
    Context,
    compared,
    contexts,
    crossover,
    read_context,
    sizes,
    verdict,
)
from parbench.reports.analysis.summary import unreadable
from parbench.reports.render.terminal import render_text
from parbench.reports.sections.attention import attention_section, context_columns
from parbench.reports.sections.one_run import report_of


def read(*records: Record, launches: int = 1) -> tuple[Context, ...]:
    return contexts(rows_of(*records, launches=launches))


def one_of(*records: Record, launches: int = 1) -> Context:
    (found,) = read(*records, launches=launches)
    return found


def test_a_step_says_who_attends_how_over_every_axis_but_that_of_gradients() -> None:
    one = one_of(context_record("zigzag", sequence=128, ranks=4))
    assert (one.method, one.ranks, one.facts.sequence, one.facts.mask) == ("zigzag", 4, 128, "causal")
    assert [one_of(context_record(name)).is_ring for name in ("ring", "striped", "ulysses")] == [True, True, False]
    usp = context_record("usp", seconds=0.01, ranks=4, num_bytes=1000)
    one = one_of(usp)
    assert (one.axes, one.method, one.is_ring) == (("ulysses", "ring"), "usp ulysses=2", False)
    assert (one.sent_bytes(), one.sent_bytes("forward")) == (6000, 2000)
    assert one.exposed_share == pytest.approx(0.6), "of both axes"
    # the ratio is that of the axis where it is farthest from 1
    one = one_of(with_metrics(usp, bytes_ratio__ring__forward=plain(0.5, "")))
    assert (one.bytes_ratio("forward"), one.bytes_ratio("backward")) == (0.5, 1.25)


def test_a_sum_with_an_unknown_part_and_a_share_of_nothing_are_unknown() -> None:
    assert one_of(with_metrics(context_record("usp", ranks=4), bytes_sent__ring=None)).sent_bytes() is None
    bare = one_of(ok(cp(), details=context_details()))
    assert (bare.sent_bytes(), bare.bytes_ratio("forward"), bare.exposed_share) == (None,) * 3


def test_other_steps_are_none_and_facts_that_contradict_themselves_are_told() -> None:
    (row,) = rows_of(ok(step(), details={"method": "ring"}))
    assert (read_context(row), contexts([row]), unreadable([row], read_context)) == (None, (), ())
    assert attention_section(found_in(ok(step()))) is None
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tokens_per_rank": 30}, "sequence(64) % tokens_per_rank(30) != 0"),
        ({"tokens_per_rank": 0}, "sequence(64) % tokens_per_rank(0) != 0"),
        ({"method": 3}, "Expected `str`, got `int` - at `$.method`"),
    ]
    for changed, words in cases:
        record = ok(cp(), details={**context_details(), **changed})
        section = there(attention_section(found_in(record)))
        assert (section.tables, contexts(rows_of(record))) == ((), ()), words
        (told,) = section.notes
        assert told.startswith(f"{record.case.label}: its details of attention"), words
        assert words in told


def test_a_step_says_all_it_knows() -> None:
    one = one_of(context_record(seconds=0.02))
    columns = context_columns([one])
    assert line_of(columns, one) == (
        "method: ring | mask: causal | cp: 2 | sequence: 64 | "
        "step time, within this launch: 20.0 ms [18.0, 22.0] | tokens/s: 205000 | "
        "bytes sent: 3.00 MiB | ratio forward: 1.000 | ratio backward: 1.250 | exposed cp: 30.0 % | "
        "load balance: 65.0 % | activations: 5.00 MiB"
    )
    assert all(column.help for column in columns)


def test_what_nobody_knows_has_no_column_and_dashes_beside_others() -> None:
    bare = ok(cp("striped"), metrics=step_metrics(0.5), details=context_details("striped"))
    titles = " ".join(column.title for column in context_columns(read(bare)))
    assert titles == "method mask cp sequence step time, within this launch tokens/s"
    beside = read(context_record(), bare)
    cells = cells_of(context_columns(beside), beside[1])
    assert (cells["load balance"], cells["exposed cp"], cells["bytes sent"]) == ("-", "-", "-")
    more = [ok(cp(layers=n), metrics=step_metrics(0.5), details=context_details()) for n in (8, 4)]
    names = [cells_of(context_columns(read(*more)), one)["method"] for one in read(*more)]
    assert names == ["ring layers=8", "ring layers=4"]


def timed(method: str, seconds: float, reach: float = 0.01, sequence: int = 64, **more: Any) -> Record:
    record = context_record(method, seconds, sequence, **more)
    return with_metrics(record, step_time=seconds_metric(seconds, reach))


def only(found: tuple[Comparison, ...]) -> Comparison:
    (one,) = found
    return one


def test_the_fastest_is_named_with_its_lead_unless_its_interval_overlaps_anothers() -> None:
    told = verdict(read(timed("ring", 0.012), timed("zigzag", 0.010), timed("ulysses", 0.015)))
    place = "At sequence 64, cp = 2, causal mask, on this machine: "
    assert told == f"{place}zigzag is the fastest of 3, by 20.0 % before ring."
    close = [timed("ring", 0.0101), timed("zigzag", 0.010), timed("ulysses", 0.02), timed("usp", 0.0102)]
    assert verdict(read(*close)) == (
        f"{place}zigzag is the fastest of 4, by 1.00 % before ring "
        "(its interval overlaps that of ring and usp ulysses=2: no difference shown)."
    )
    wide = read(timed("ring", 0.012), timed("zigzag", 0.010), timed("ulysses", 0.02, reach=0.9))
    assert "overlaps that of ulysses: no difference shown" in verdict(wide)
    assert "overlaps that of ring" in verdict(read(timed("ring", 0.02, 0.5), timed("zigzag", 0.008, 0.25)))  # touch
    blind = with_metrics(timed("ring", 0.02), step_time=plain(0.02, "s"))
    assert verdict(read(timed("zigzag", 0.01), blind)).endswith("(an interval is unknown: no difference shown).")


def test_functional_steps_have_no_fastest_and_one_without_a_time_wins_nothing() -> None:
    ring, zigzag = timed("ring", 0.02), timed("zigzag", 0.01)
    note = "functional only: 4 ranks on 2 cores"
    told = "no method is called the fastest, for these steps are functional only."
    assert verdict(read(ring, zigzag), [note]).endswith(told)
    assert verdict(read(ring, msgspec.structs.replace(zigzag, notes=[note]))).endswith(told)
    assert only(compared(read(ring, zigzag), [note])).sentences[0].endswith(told)
    timeless = with_metrics(context_record("ulysses"), step_time=None)
    assert "fastest of 2" in only(compared(read(ring, zigzag, timeless))).sentences[0]


def test_the_crossover_is_told_against_these_ranks_and_beside_what_was_counted() -> None:
    rule = "Forward, Ulysses sends less than a ring above 1 + 1/g = 4 ranks, g = kv_heads / heads"
    for ranks, here in ((2, "more"), (4, "as much"), (8, "less")):
        found = read(timed("ring", 0.02, ranks=ranks, crossover_ranks=4.0))
        assert crossover(found) == f"{rule}: {here} on cp = {ranks}."
    assert crossover(read(timed("ring", 0.02, crossover_ranks=None))) == ""
    near, far = timed("zigzag", 0.02, num_bytes=3 << 20), timed("ring", 0.02, sequence=128, num_bytes=5 << 20)
    told = crossover(read(far, near, timed("ulysses", 0.02, num_bytes=2 << 20)))
    assert "(counted at sequence 64: 2.00 MiB beside zigzag's 3.00 MiB a microbatch)" in told
    assert "counted" not in crossover(read(far, timed("ulysses", 0.02)))


def test_only_the_same_model_mask_ranks_and_world_are_compared() -> None:
    elsewhere = timed("contiguous", 0.02)
    elsewhere = msgspec.structs.replace(elsewhere, world=msgspec.structs.replace(elsewhere.world, size=8))
    apart = [timed("ulysses", 0.02, ranks=4), timed("striped", 0.02, mask="full"), elsewhere]
    one = only(compared(read(timed("ring", 0.02), timed("zigzag", 0.02), *apart)))
    assert [context.method for context in one.contexts] == ["ring", "zigzag"]
    assert one.title == "Methods compared: cp = 2, causal mask"
    deep = [ok(cp(method, layers=8), details=context_details(method)) for method in ("ring", "zigzag")]
    found = compared(read(timed("ring", 0.02), timed("zigzag", 0.02), *deep))
    assert [one.title.partition("mask")[2] for one in found] == ["", ", layers=8"]
    assert compared(read(timed("ring", 0.02), timed("ring", 0.04, sequence=128))) == ()  # one method alone


def test_each_length_with_two_methods_has_a_verdict() -> None:
    lengths = [("zigzag", 0.04, 128), ("ring", 0.05, 128), ("ring", 0.02, 64), ("zigzag", 0.01, 64), ("ring", 0.9, 256)]
    one = only(compared(read(*(timed(method, seconds, sequence=n) for method, seconds, n in lengths))))
    starts = [sentence.partition(",")[0] for sentence in one.sentences]
    assert starts == ["At sequence 64", "At sequence 128", "Forward"]
    by_length = {name: [at.facts.sequence for at in of] for name, of in one.lines.items()}
    assert by_length == {"zigzag": [64, 128], "ring": [64, 128, 256]}


def on_ranks(*runs: Iterable[Record]) -> list[Context]:
    return [one for records in runs for one in read(*records)]


def both(ranks: int, sequence: int = 64) -> list[Record]:
    return [context_record(method, 0.02 / ranks, sequence, ranks=ranks) for method in ("ring", "ulysses")]


def test_each_method_is_a_line_by_ranks_for_each_length_that_ran_on_two_numbers_of_them() -> None:
    [one] = sizes(on_ranks(both(4), both(2)))
    assert one.title == "Methods against cp: sequence 64, causal mask"
    assert {name: [step.ranks for step in of] for name, of in one.lines.items()} == {"ring": [2, 4], "ulysses": [2, 4]}
    assert one.crossover_ranks == 2.0
    found = sizes(on_ranks([*both(2), *both(2, 128)], [*both(4), *both(4, 128)], both(2, 256)))
    assert [one.title for one in found] == [f"Methods against cp: sequence {n}, causal mask" for n in (64, 128)]
    assert sizes(on_ranks(both(2), both(2))) == sizes([]) == ()
    full = [context_record("ring", 0.02, ranks=4, mask="full")]
    assert sizes(on_ranks([context_record("ring", 0.02)], full)) == ()
    [one] = sizes(on_ranks(*([context_record("ring", 0.02, ranks=n, crossover_ranks=None)] for n in (2, 4))))
    assert one.crossover_ranks is None


def test_attention_section_has_verdicts_below_its_table() -> None:
    records = [context_record(method, 0.02, sequence) for method in ("ring", "zigzag") for sequence in (64, 128)]
    [table] = there(attention_section(found_in(*records))).tables
    assert len(table.rows) == 4
    assert [note.partition(",")[0] for note in table.notes[:2]] == ["At sequence 64", "At sequence 128"]
    assert "1 + 1/g" in table.notes[-1]
    alone = there(attention_section(found_in(context_record())))
    assert [(one.id, one.notes) for one in alone.tables] == [("context-table", ())]
    run = run_of(*records)
    text = render_text(report_of(run))
    for expected in ("Context parallelism\n", "At sequence 64, cp = 2"):
        assert expected in text
