"""The self-test: a fault is proved only if the records name the cause and the right rank."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from parbench.bench.launch import measure as measuring
from parbench.bench.results.records import Record, Stragglers
from parbench.bench.selftest import judge, render, selftest
from tests.support.fake_runs import FakeRanks, isolate_driver
from tests.support.refusals import usage_error
from tests.support.reports.reports_fixtures import collective_case, failed_record, ok_record

CASE = collective_case()
OTHER_SHARES = {
    "late_rank": 0,
    "share": 1.0,
    "last_out_rank": 0,
    "last_out_share": 1.0,
}


def make_record(**arrival: int | float | None) -> Record:
    fields = {**OTHER_SHARES, **arrival}
    arrival_record = Stragglers(method="one clock", uncertainty=1e-6, **fields)  # type: ignore[arg-type]
    return ok_record(CASE, arrival=arrival_record)


def test_undisturbed_run_must_be_right() -> None:
    assert judge("none", ok_record(CASE)).is_proved
    result = judge("none", failed_record(CASE, reason="it broke"))
    assert not result.is_proved
    assert result.message == "it broke"


@pytest.mark.parametrize(
    ("kind", "arrival", "verb"),
    [
        ("late", {"late_rank": 1, "share": 0.8}, "arrived"),
        ("slow", {"last_out_rank": 1, "last_out_share": 0.8}, "left"),
    ],
)
def test_disturbed_rank_must_be_last(kind: str, arrival: dict[str, Any], verb: str) -> None:
    result = judge(kind, make_record(**arrival))
    assert result.is_proved
    assert f"rank 1 {verb} last in " in result.message
    rank, share = arrival
    for other in ({**arrival, rank: 0}, {**arrival, share: arrival[share] - 0.01}):
        assert not judge(kind, make_record(**other)).is_proved


@pytest.mark.parametrize("injection", ["late", "slow"])
def test_record_that_blames_no_rank_proves_nothing(injection: str) -> None:
    nobody = dict.fromkeys(OTHER_SHARES)
    assert not judge(injection, make_record(**nobody)).is_proved
    hang = failed_record(CASE, status="hang", reason="it hung")
    assert judge(injection, hang).message == "it hung"


@pytest.mark.parametrize(
    ("wrong_by_rank", "is_proved"),
    [
        ({1: 1}, True),
        ({11: 1}, False),
        ({0: 2, 1: 1}, False),
    ],
)
def test_corrupt_rank_must_be_the_only_wrong_one(
    wrong_by_rank: dict[int, int], is_proved: bool
) -> None:
    record = failed_record(CASE, 0, "wrong", "results differ", wrong_by_rank=wrong_by_rank)
    result = judge("corrupt", record)
    assert result.is_proved is is_proved
    assert result.message == "results differ"
    with_time = replace(record, metrics=ok_record(CASE).metrics)
    assert not judge("corrupt", with_time).is_proved


def test_interrupted_selftest_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    isolate_driver(monkeypatch, tmp_path)
    ranks = FakeRanks()
    ranks.interrupt(case=1)
    monkeypatch.setattr(measuring, "choose_launcher", ranks.choose_launcher)
    assert "ended early" in usage_error(selftest, ("parbench.bench.plan.catalogue",), 2)


@pytest.mark.full
@pytest.mark.measures
def test_every_injection_is_found_here() -> None:
    results = selftest(("parbench.bench.plan.catalogue",), 2)
    assert [result.injection for result in results] == ["none", "late", "slow", "corrupt"]
    assert all(result.is_proved for result in results), render(results)
