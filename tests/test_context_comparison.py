"""Methods side by side: who is compared with whom, who is called the fastest, and when nothing is shown."""

from typing import Any

import msgspec
from reports_fixtures import context_metrics, context_record, cp, make_plan, make_run, ok

from bench.records import Metric, Record
from reports.parallel.context import Context, contexts
from reports.parallel.context_comparison import Comparison, compared, crossover, verdict
from reports.summary import summarize


def found_in(*records: Record) -> tuple[Context, ...]:
    return contexts(summarize(make_run(make_plan([record.case for record in records]), records)).rows)


def timed(method: str, seconds: float, reach: float = 0.01, sequence: int = 64, **more: Any) -> Record:
    """Return a step with an interval of its own."""
    record = context_record(method, seconds, sequence, **more)
    time = Metric(
        value=seconds, unit="s", better="lower", low=seconds * (1 - reach), high=seconds * (1 + reach), method="x"
    )
    return msgspec.structs.replace(record, metrics=record.metrics | {"step_time": time})


def only(found: tuple[Comparison, ...]) -> Comparison:
    (one,) = found
    return one


def test_the_fastest_is_named_with_its_lead() -> None:
    found = found_in(timed("ring", 0.012), timed("zigzag", 0.010), timed("ulysses", 0.015))
    assert verdict(found) == (
        "At sequence 64, cp = 2, causal mask, on this machine: zigzag is the fastest of 3, by 20.0 % before ring."
    )


def test_overlapping_intervals_show_no_difference() -> None:
    found = found_in(timed("ring", 0.0101), timed("zigzag", 0.010), timed("ulysses", 0.02), timed("usp", 0.0102))
    assert verdict(found).endswith(
        "zigzag is the fastest of 4, by 1.00 % before ring "
        "(its interval overlaps that of ring and usp ulysses=2: no difference shown)."
    )


def test_a_slow_one_with_a_wide_interval_is_not_told_apart_either() -> None:
    found = found_in(timed("ring", 0.012), timed("zigzag", 0.010), timed("ulysses", 0.02, reach=0.9))
    assert "overlaps that of ulysses: no difference shown" in verdict(found)


def test_intervals_that_touch_overlap() -> None:
    assert "overlaps that of ring" in verdict(found_in(timed("ring", 0.02, 0.5), timed("zigzag", 0.008, 0.25)))


def test_an_unknown_interval_shows_no_difference() -> None:
    record = timed("ring", 0.02)
    blind = msgspec.structs.replace(record.metrics["step_time"], low=None, high=None)
    found = found_in(
        timed("zigzag", 0.01), msgspec.structs.replace(record, metrics=record.metrics | {"step_time": blind})
    )
    assert verdict(found).endswith("(an interval is unknown: no difference shown).")


def test_functional_steps_have_no_fastest() -> None:
    found = found_in(timed("ring", 0.02), timed("zigzag", 0.01))
    note = "functional only: 4 ranks on 2 cores"
    told = "no method is called the fastest, for these steps are functional only."
    assert verdict(found, [note]).endswith(told)
    noted = found_in(timed("ring", 0.02), msgspec.structs.replace(timed("zigzag", 0.01), notes=[note]))
    assert verdict(noted).endswith(told)
    assert only(compared(found, [note])).sentences[0].endswith(told)


def test_the_crossover_is_told_against_these_ranks() -> None:
    def told(ranks: int) -> str:
        return crossover(found_in(timed("ring", 0.02, ranks=ranks, crossover_ranks=4.0)))

    rule = "Forward, Ulysses sends less than a ring above 1 + 1/g = 4 ranks, g = kv_heads / heads"
    assert told(2) == f"{rule}: more on cp = 2."
    assert told(4) == f"{rule}: as much on cp = 4."
    assert told(8) == f"{rule}: less on cp = 8."
    assert crossover(found_in(timed("ring", 0.02, crossover_ranks=None))) == ""


def test_what_was_counted_stands_beside_the_rule() -> None:
    ring, far = timed("zigzag", 0.02, num_bytes=3 << 20), timed("ring", 0.02, sequence=128, num_bytes=5 << 20)
    found = found_in(far, ring, timed("ulysses", 0.02, num_bytes=2 << 20))
    assert "(counted at sequence 64: 2.00 MiB beside zigzag's 3.00 MiB a microbatch)" in crossover(found)
    assert "counted" not in crossover(found_in(far, timed("ulysses", 0.02)))


def test_only_the_same_model_mask_and_ranks_are_compared() -> None:
    found = found_in(
        timed("ring", 0.02),
        timed("zigzag", 0.02),
        timed("ulysses", 0.02, ranks=4),
        timed("striped", 0.02, mask="full"),
    )
    one = only(compared(found))
    assert [context.method for context in one.contexts] == ["ring", "zigzag"]
    assert one.title == "Methods compared: cp = 2, causal mask"


def test_models_are_told_apart() -> None:
    details = context_record().details
    others = [
        ok(cp(method, layers=8), metrics=context_metrics(0.1), details={**details, "method": method})
        for method in ("ring", "zigzag")
    ]
    found = found_in(timed("ring", 0.02), timed("zigzag", 0.02), *others)
    assert [one.title.partition("mask")[2] for one in compared(found)] == ["", ", layers=8"]


def test_each_length_with_two_methods_has_a_verdict() -> None:
    found = found_in(
        timed("zigzag", 0.04, sequence=128),
        timed("ring", 0.05, sequence=128),
        timed("ring", 0.02),
        timed("zigzag", 0.01),
        timed("ring", 0.9, sequence=256),
    )
    one = only(compared(found))
    assert [sentence.partition(",")[0] for sentence in one.sentences[:-1]] == ["At sequence 64", "At sequence 128"]
    assert one.sentences[-1].startswith("Forward, Ulysses")
    assert {name: [at.facts.sequence for at in of] for name, of in one.lines.items()} == {
        "zigzag": [64, 128],
        "ring": [64, 128, 256],
    }


def test_one_method_alone_is_no_comparison() -> None:
    assert compared(found_in(timed("ring", 0.02), timed("ring", 0.04, sequence=128))) == ()


def test_a_step_without_a_time_wins_nothing() -> None:
    timeless = context_record("ulysses")
    metrics = {name: metric for name, metric in timeless.metrics.items() if name != "step_time"}
    found = found_in(timed("ring", 0.02), timed("zigzag", 0.01), msgspec.structs.replace(timeless, metrics=metrics))
    assert "fastest of 2" in only(compared(found)).sentences[0]
