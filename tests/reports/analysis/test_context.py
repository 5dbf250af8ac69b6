"""Context-parallel steps: what records tell of them, their tables, methods and ranks side by side, and the section."""

from typing import Any

import msgspec
import pytest

from parbench.bench.results.records import Record
from parbench.reports.analysis.attention import (
    Comparison,
    Context,
    compared,
    contexts,
    crossover,
    read_context,
)
from parbench.reports.analysis.summary import unreadable
from parbench.reports.sections.attention import attention_section, context_columns
from tests.support.report_rows import (
    analyze_records,
    column_texts,
    replace_metrics,
    require,
    summarize_rows,
)
from tests.support.reports_fixtures import (
    context_case,
    context_details,
    context_record,
    counted_metric,
    ok_record,
    step_case,
)


def read(*records: Record, launches: int = 1) -> tuple[Context, ...]:
    return contexts(summarize_rows(*records, launches=launches))


def one_of(*records: Record, launches: int = 1) -> Context:
    (found,) = read(*records, launches=launches)
    return found


def test_context_sums_over_attention_axes() -> None:
    one = one_of(context_record("zigzag", sequence=128, ranks=4))
    assert (one.method, one.ranks, one.facts.sequence, one.facts.mask) == (
        "zigzag",
        4,
        128,
        "causal",
    )
    assert [one_of(context_record(name)).is_ring for name in ("ring", "striped", "ulysses")] == [
        True,
        True,
        False,
    ]
    usp = context_record("usp", seconds=0.01, ranks=4, num_bytes=1000)
    one = one_of(usp)
    assert (one.axes, one.method, one.is_ring) == (("ulysses", "ring"), "usp ulysses=2", False)
    assert (one.sent_bytes(), one.sent_bytes("forward")) == (6000, 2000)
    assert one.exposed_share == pytest.approx(0.6), "of both axes"
    # the ratio is that of the axis where it is farthest from 1
    one = one_of(replace_metrics(usp, bytes_ratio__ring__forward=counted_metric(0.5, "")))
    assert (one.bytes_ratio("forward"), one.bytes_ratio("backward")) == (0.5, 1.25)


def test_context_sum_with_unknown_part_is_unknown() -> None:
    assert (
        one_of(replace_metrics(context_record("usp", ranks=4), bytes_sent__ring=None)).sent_bytes()
        is None
    )
    bare = one_of(ok_record(context_case(), details=context_details()))
    assert (bare.sent_bytes(), bare.bytes_ratio("forward"), bare.exposed_share) == (None,) * 3


def test_contradictory_attention_facts_are_notes() -> None:
    (row,) = summarize_rows(ok_record(step_case(), details={"method": "ring"}))
    assert (read_context(row), contexts([row]), unreadable([row], read_context)) == (None, (), ())
    assert attention_section(analyze_records(ok_record(step_case()))) is None
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tokens_per_rank": 30}, "sequence(64) % tokens_per_rank(30) != 0"),
        ({"tokens_per_rank": 0}, "sequence(64) % tokens_per_rank(0) != 0"),
        ({"method": 3}, "Expected `str`, got `int` - at `$.method`"),
    ]
    for changed, words in cases:
        record = ok_record(context_case(), details={**context_details(), **changed})
        section = require(attention_section(analyze_records(record)))
        assert (section.tables, contexts(summarize_rows(record))) == ((), ()), words
        (told,) = section.notes
        assert told.startswith(f"{record.case.label}: its details of attention"), words
        assert words in told


def test_context_columns_show_method_and_bytes() -> None:
    one = one_of(context_record(seconds=0.02))
    columns = context_columns([one])
    names = ("method", "mask", "cp", "bytes sent", "ratio backward", "exposed cp", "load balance")
    shown = column_texts(columns, one)
    assert [shown[name] for name in names] == [
        "ring",
        "causal",
        "2",
        "3.00 MiB",
        "1.250",
        "30.0 %",
        "65.0 %",
    ]


def timed(method: str, seconds: float, sequence: int = 64, **more: Any) -> Record:
    return context_record(method, seconds, sequence, **more)


def only(found: tuple[Comparison, ...]) -> Comparison:
    (one,) = found
    return one


def test_crossover_compares_ring_with_ulysses() -> None:
    rule = "Forward, Ulysses sends less than a ring above 1 + 1/g = 4 ranks, g = kv_heads / heads"
    for ranks, here in ((2, "more"), (4, "as much"), (8, "less")):
        found = read(timed("ring", 0.02, ranks=ranks, crossover_ranks=4.0))
        assert crossover(found) == f"{rule}: {here} on cp = {ranks}."
    assert crossover(read(timed("ring", 0.02, crossover_ranks=None))) == ""
    near, far = (
        timed("zigzag", 0.02, num_bytes=3 << 20),
        timed("ring", 0.02, sequence=128, num_bytes=5 << 20),
    )
    told = crossover(read(far, near, timed("ulysses", 0.02, num_bytes=2 << 20)))
    assert "(counted at sequence 64: 2.00 MiB beside zigzag's 3.00 MiB a microbatch)" in told
    assert "counted" not in crossover(read(far, timed("ulysses", 0.02)))


def test_methods_are_compared_on_equal_setups() -> None:
    elsewhere = timed("contiguous", 0.02)
    elsewhere = msgspec.structs.replace(
        elsewhere, world=msgspec.structs.replace(elsewhere.world, size=8)
    )
    apart = [timed("ulysses", 0.02, ranks=4), timed("striped", 0.02, mask="full"), elsewhere]
    one = only(compared(read(timed("ring", 0.02), timed("zigzag", 0.02), *apart)))
    assert [context.method for context in one.contexts] == ["ring", "zigzag"]
    assert one.title == "Methods compared: cp = 2, causal mask"
    deep = [
        ok_record(context_case(method, layers=8), details=context_details(method))
        for method in ("ring", "zigzag")
    ]
    found = compared(read(timed("ring", 0.02), timed("zigzag", 0.02), *deep))
    assert [one.title.partition("mask")[2] for one in found] == ["", ", layers=8"]
    assert (
        compared(read(timed("ring", 0.02), timed("ring", 0.04, sequence=128))) == ()
    )  # one method alone
