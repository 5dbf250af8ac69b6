"""The verdicts on a run: right, complete, quiet; what each counts, and what it advises."""

from collections.abc import Sequence
from typing import Any

import msgspec

from parbench.bench.launch.control_channel import LEFT_OUT
from parbench.bench.machine.environment import DISTURBANCES, VOLATILE
from parbench.bench.plan.cases import Case
from parbench.bench.plan.plan import Skipped
from parbench.bench.results.records import Check, Record
from parbench.reports.analysis.summary import summarize
from parbench.reports.analysis.verdicts import Verdict, verdict_words, verdicts
from tests.support.reports_fixtures import (
    collective_case,
    failed_record,
    make_plan,
    make_run,
    ok_record,
    step_case,
)

FIRST, SECOND = collective_case(), collective_case(size_bytes=2048)


def found(
    records: Sequence[Record],
    cases: Sequence[Case] = (FIRST,),
    environment: dict[str, Any] | None = None,
    **plan: Any,
) -> list[Verdict]:
    run = make_run(msgspec.structs.replace(make_plan(cases, **plan), budget_seconds=60.0), records)
    run = msgspec.structs.replace(
        run, info=msgspec.structs.replace(run.info, environment=environment)
    )
    return list(verdicts(run, summarize(run)))


def late(case: Case, launch: int) -> Record:
    return failed_record(case, launch, "skipped", LEFT_OUT)


def told(one: Verdict) -> tuple[str, str, str, str]:
    return one.word, one.level, one.told, one.remedy


def test_correctness_counts_checked_results() -> None:
    unchecked = msgspec.structs.replace(ok_record(FIRST), check=Check(passed=None))
    for records, word, level, count in (
        ([ok_record(FIRST), ok_record(SECOND)], "CORRECT", "good", "2 of 2 results equal"),
        (
            [ok_record(FIRST), failed_record(SECOND, 0, "wrong")],
            "WRONG",
            "bad",
            "1 of 2 results differ",
        ),
        ([ok_record(SECOND), unchecked], "CORRECT", "doubtful", "1 of 2 results equal"),
        ([unchecked], "UNCHECKED", "doubtful", "0 of 1 results equal"),
    ):
        first = found(records, (FIRST, SECOND)[: len(records)])[0]
        assert (first.word, first.level) == (word, level)
        assert first.told.startswith(count)


def test_completeness_counts_what_is_missing() -> None:
    cannot = Skipped(case=step_case(), reason="needs 4 ranks")
    whole = [ok_record(FIRST, 0), ok_record(FIRST, 1)]
    assert told(found(whole, launches=2)[1]) == ("COMPLETE", "good", "1 case, 2 launches each", "")
    (_, complete, _) = found(whole, launches=2, skipped=[cannot])
    assert complete.told == "1 case, 2 launches each; 1 case cannot run here"
    (_, broken, _) = found(
        [*whole, failed_record(SECOND), failed_record(step_case(), 0, "hang")],
        (FIRST, SECOND, step_case()),
        launches=2,
    )
    assert told(broken)[:3] == ("BROKEN", "bad", "1 failed and 1 hung of 3 cases")
    (_, unfinished, _) = found(whole[:1], launches=2)
    assert unfinished.level == "bad"
    assert "1 of 2 measurements" in unfinished.told
    # a case takes a tenth of a second and the rest of the first launch is its start
    cases = (FIRST, SECOND, step_case())
    records = [
        *whole,
        ok_record(SECOND, 0),
        late(SECOND, 1),
        late(step_case(), 0),
        late(step_case(), 1),
    ]
    (_, partial, _) = found(records, cases, launches=2)
    assert told(partial)[:2] == ("PARTIAL", "bad")
    assert "1 have none of 2, 1 have 1 of 2" in partial.told
    assert "--budget 10s" in partial.remedy
    (_, partial, _) = found([*whole, late(FIRST, 2)], launches=3)
    assert told(partial)[:2] == ("PARTIAL", "doubtful"), "two launches tell how far launches differ"


def test_nothing_measured_has_a_reason() -> None:
    for records, skipped, why in (
        ([late(FIRST, 0)], [], "the budget of 1 min 0 s ended before any case"),
        ([failed_record(FIRST, 0, "skipped", "no float8")], [], "no float8"),
        ([], [Skipped(case=step_case(), reason="needs 4 ranks")], "needs 4 ranks"),
    ):
        cases = (FIRST,) if records else ()
        (only,) = found(records, cases, skipped=skipped)
        assert (only.word, only.level, only.told) == ("NOTHING MEASURED", "bad", why)


def test_noise_is_the_variation_of_repetitions() -> None:
    quiet = [ok_record(FIRST, i, seconds=1e-3 * (1 + 0.001 * i)) for i in range(3)]
    loud = [ok_record(SECOND, i, seconds=1e-3 * 2**i) for i in range(3)]
    assert told(found(quiet, launches=3)[2])[:2] == ("QUIET", "good")
    disturbed = {
        VOLATILE: {DISTURBANCES: {"virtual machine": "yes", "load average": "3.10 on 2 cores"}}
    }
    (*_, noise) = found([*quiet, *loud], (FIRST, SECOND), disturbed, launches=3)
    assert told(noise)[:2] == ("NOISY", "doubtful")
    assert noise.told.endswith(
        "by over 15 % in 1 of 2 cases: virtual machine, load average 3.10 on 2 cores"
    )
    (*_, unknown) = found([ok_record(FIRST)])
    assert told(unknown)[:2] == ("NOISE UNKNOWN", "doubtful")
    run = make_run(make_plan([FIRST]), [ok_record(FIRST)])
    assert verdict_words(run, summarize(run)) == "CORRECT, COMPLETE, NOISE UNKNOWN"
