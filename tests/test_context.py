"""Context-parallel steps as records tell them: what is read, what is added over axes, and what is refused."""

import msgspec
import pytest
from reports_fixtures import context_details, context_record, cp, make_plan, make_run, ok, plain, step

from bench.errors import UserError
from bench.records import Record
from reports.parallel.context import Context, contexts, hops, read_context, unreadable_contexts
from reports.summary import Row, summarize


def rows_of(*records: Record, launches: int = 1) -> tuple[Row, ...]:
    cases = {record.case.id: record.case for record in records}.values()
    return summarize(make_run(make_plan(cases, launches=launches), records)).rows


def context_of(record: Record) -> Context:
    (found,) = contexts(rows_of(record))
    return found


def test_a_step_says_who_attends_how() -> None:
    one = context_of(context_record("zigzag", sequence=128, ranks=4))
    assert (one.method, one.ranks, one.facts.sequence, one.facts.mask) == ("zigzag", 4, 128, "causal")
    assert one.is_ring
    assert not context_of(context_record("ulysses")).is_ring


def test_attention_is_on_every_axis_but_that_of_gradients() -> None:
    one = context_of(context_record("usp", seconds=0.01, ranks=4, num_bytes=1000))
    assert one.axes == ("ulysses", "ring")
    assert one.method == "usp ulysses=2"
    assert one.sent_bytes() == 6000
    assert one.sent_bytes("forward") == 2000
    assert one.exposed_seconds == pytest.approx(0.006)


def test_a_sum_with_an_unknown_part_is_unknown() -> None:
    record = context_record("usp", ranks=4)
    less = {name: metric for name, metric in record.metrics.items() if name != "bytes_sent.ring"}
    assert context_of(msgspec.structs.replace(record, metrics=less)).sent_bytes() is None
    bare = context_of(ok(cp(), details=context_details()))
    assert (bare.sent_bytes(), bare.bytes_ratio("forward"), bare.exposed_seconds) == (None, None, None)
    assert bare.exposed_part is None


def test_the_ratio_is_that_of_the_worst_axis() -> None:
    record = context_record("usp", ranks=4)
    changed = record.metrics | {"bytes_ratio.ring.forward": plain(0.5, "")}
    one = context_of(msgspec.structs.replace(record, metrics=changed))
    assert (one.bytes_ratio("forward"), one.bytes_ratio("backward")) == (0.5, 1.25)


def test_the_exposed_part_is_over_the_time_alone() -> None:
    record = context_record()
    assert context_of(record).exposed_part == pytest.approx(0.75)
    nothing = msgspec.structs.replace(record, metrics=record.metrics | {"attention_comm": plain(0.0, "s")})
    assert context_of(nothing).exposed_part is None


def test_hops_come_with_their_step_in_order() -> None:
    found = hops(contexts(rows_of(context_record("ring"), context_record("zigzag"))))
    assert [(one.context.method, one.hop.direction, one.hop.step) for one in found] == [
        ("ring", "forward", 0),
        ("ring", "backward", 1),
        ("zigzag", "forward", 0),
        ("zigzag", "backward", 1),
    ]
    assert found[0].hop.num_bytes == 128 << 10


def test_the_launch_that_tells_steps_tells_all() -> None:
    silent = ok(cp(), 0, details=context_details(crossover_ranks=1.0, attention_steps=[]))
    telling = ok(cp(), 1, details=context_details(crossover_ranks=2.0))
    (one,) = contexts(rows_of(silent, telling, launches=2))
    assert one.facts.crossover_ranks == 2.0
    assert len(one.facts.attention_steps) == 2


def test_other_steps_are_none() -> None:
    (row,) = rows_of(ok(step(), details={"method": "ring"}))
    assert read_context(row) is None
    assert (contexts([row]), unreadable_contexts([row])) == ((), ())


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"tokens_per_rank": 30}, "sequence(64) % tokens_per_rank(30) != 0"),
        ({"tokens_per_rank": 0}, "sequence(64) % tokens_per_rank(0) != 0"),
        ({"method": 3}, "Expected `str`, got `int` - at `$.method`"),
        ({"attention_steps": [{"direction": "forward"}]}, "$.attention_steps[0]"),
    ],
)
def test_facts_that_contradict_themselves_are_told(changed: dict[str, object], told: str) -> None:
    (row,) = rows_of(ok(cp(), details={**context_details(), **changed}))
    assert contexts([row]) == ()
    (sentence,) = unreadable_contexts([row])
    assert sentence.startswith("No context facts: the attention of ")
    assert told in sentence
    with pytest.raises(UserError):
        read_context(row)
