"""A proof is found only where the records name the cause and the right rank."""

import pytest

from parbench.bench.results.records import Arrival, Record
from parbench.bench.selftest import Proof, judge, render, selftest
from tests.support.reports_fixtures import collective_case, failed_record, ok_record

CASE = collective_case()
DIFFER = "results differ from the reference before the timed region: "


def blamed(
    late: int | None, share: float | None, out: int | None, out_share: float | None
) -> Record:
    places = {"late_rank": late, "share": share, "last_out_rank": out, "last_out_share": out_share}
    return ok_record(CASE, arrival=Arrival(method="one clock", uncertainty=1e-6, **places))  # type: ignore[arg-type]


def test_undisturbed_is_proved_by_a_right_result_only() -> None:
    assert judge("none", ok_record(CASE)) == Proof(injection="none", found=True, told="all right")
    failed = judge("none", failed_record(CASE, reason="it broke"))
    assert failed == Proof(injection="none", found=False, told="it broke")


def test_late_and_slow_are_proved_by_the_rank_that_arrived_and_that_left_last() -> None:
    for rank, share, found in ((1, 1.0, True), (1, 0.95, True), (1, 0.94, False), (0, 1.0, False)):
        told = f"rank {rank} arrived last in {share:.0%} of iterations"
        proof = judge("late", blamed(rank, share, 1 - rank, 1.0))
        assert proof == Proof(injection="late", found=found, told=told)
    for rank, share, found in ((1, 1.0, True), (1, 0.8, True), (1, 0.79, False), (0, 1.0, False)):
        told = f"rank {rank} left last in {share:.0%} of iterations"
        proof = judge("slow", blamed(1 - rank, 1.0, rank, share))
        assert proof == Proof(injection="slow", found=found, told=told)


def test_nobody_blamed_proves_nothing() -> None:
    nobody = blamed(None, None, None, None)
    assert [judge(injection, nobody).found for injection in ("late", "slow")] == [False, False]
    assert judge("late", ok_record(CASE)).told == "no rank was late"
    assert judge("slow", ok_record(CASE)).told == "no rank was slow"
    assert judge("slow", failed_record(CASE, status="hang", reason="it hung")).told == "it hung"


def test_corrupt_is_proved_by_a_wrong_result_on_that_rank_alone_without_a_time() -> None:
    for status, reason, more, found in (
        ("wrong", f"{DIFFER}1 on rank 1", {}, True),
        ("wrong", f"{DIFFER}1 on rank 0", {}, False),
        ("wrong", f"{DIFFER}1 on rank 11", {}, False),
        ("wrong", f"{DIFFER}2 on rank 0, 1 on rank 1", {}, False),
        ("failed", f"{DIFFER}1 on rank 1", {}, False),
        ("wrong", f"{DIFFER}1 on rank 1", {"metrics": ok_record(CASE).metrics}, False),
        ("ok", "", {}, False),
    ):
        proof = judge("corrupt", failed_record(CASE, status=status, reason=reason, **more))  # type: ignore[arg-type]
        assert proof == Proof(
            injection="corrupt", found=found, told=reason or "nothing was wrong"
        ), (status, more)


@pytest.mark.full
@pytest.mark.measures
def test_every_injection_is_found_here() -> None:
    proofs = selftest(("parbench.bench.plan.catalogue",), 2)
    assert [proof.injection for proof in proofs] == ["none", "late", "slow", "corrupt"]
    assert all(proof.found for proof in proofs), render(proofs)
