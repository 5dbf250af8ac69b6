"""A proof is found only where the records name the cause and the right rank."""

from pathlib import Path
from typing import Any

import pytest
from conftest import Command

from bench import prove as proving
from bench.arrival import Arrival
from bench.cases import make_case
from bench.prove import Proof, prove, render
from bench.records import Metric, Record, WorldInfo
from bench.runs import load_run

pytestmark = pytest.mark.measures

DIFFER = "results differ from the reference before the timed region: "
METRIC = Metric(value=1e-3, unit="s", better="lower")


def seen(**more: Any) -> Record:
    fields: dict[str, Any] = {
        "case": make_case("collective.all_reduce", "bench.collectives:all_reduce", {"size_bytes": 1024}),
        "world": WorldInfo(size=2, nodes=1, backend="gloo", device="cpu"),
        "launch": 0,
        "status": "ok",
        "started": "2026-01-02T03:04:05.678Z",
        "seconds": 0.1,
    }
    return Record(**{**fields, **more})


def blamed(late: int | None, share: float | None, out: int | None, out_share: float | None) -> Record:
    arrival = Arrival(
        method="one clock",
        uncertainty=1e-6,
        late_rank=late,
        share=share,
        last_out_rank=out,
        last_out_share=out_share,
    )
    return seen(arrival=arrival)


def test_undisturbed_is_proved_by_a_right_result_only() -> None:
    assert proving._judge_undisturbed(seen()) == Proof(injection="none", found=True, told="all right")
    failed = proving._judge_undisturbed(seen(status="failed", reason="it broke"))
    assert failed == Proof(injection="none", found=False, told="it broke")


@pytest.mark.parametrize(("rank", "share", "found"), [(1, 1.0, True), (1, 0.95, True), (1, 0.94, False), (0, 1, False)])
def test_late_is_proved_by_the_rank_that_arrived_last(rank: int, share: float, found: bool) -> None:
    proof = proving._judge_late(blamed(rank, share, 1 - rank, 1.0))
    assert proof.found is found
    assert proof.told == f"rank {rank} arrived last in {share:.0%} of iterations"


@pytest.mark.parametrize(("rank", "share", "found"), [(1, 1.0, True), (1, 0.8, True), (1, 0.79, False), (0, 1, False)])
def test_slow_is_proved_by_the_rank_that_left_last(rank: int, share: float, found: bool) -> None:
    proof = proving._judge_slow(blamed(1 - rank, 1.0, rank, share))
    assert proof.found is found
    assert proof.told == f"rank {rank} left last in {share:.0%} of iterations"


def test_nobody_blamed_proves_nothing() -> None:
    nobody = blamed(None, None, None, None)
    assert [judge(nobody).found for judge in (proving._judge_late, proving._judge_slow)] == [False, False]
    assert proving._judge_late(seen()).told == "no rank was late"
    assert proving._judge_slow(seen()).told == "no rank was slow"
    assert proving._judge_slow(seen(status="hang", reason="it hung")).told == "it hung"


@pytest.mark.parametrize(
    ("reason", "more", "found"),
    [
        (f"{DIFFER}1 on rank 1", {}, True),
        (f"{DIFFER}1 on rank 0", {}, False),
        (f"{DIFFER}1 on rank 11", {}, False),
        (f"{DIFFER}2 on rank 0, 1 on rank 1", {}, False),
        (f"{DIFFER}1 on rank 1", {"status": "failed"}, False),
        (f"{DIFFER}1 on rank 1", {"metrics": {"time": METRIC}}, False),
        ("", {"status": "ok"}, False),
    ],
)
def test_corrupt_is_proved_by_a_wrong_result_on_that_rank_alone_without_a_time(
    reason: str, more: dict[str, Any], found: bool
) -> None:
    proof = proving._judge_corrupt(seen(**{"status": "wrong", "reason": reason, **more}))
    assert proof.found is found
    assert proof.told == (reason or "nothing was wrong")


def test_proofs_are_aligned_lines() -> None:
    proofs = [
        Proof(injection="late", found=True, told="rank 1 arrived last"),
        Proof(injection="corrupt", found=False, told="nothing was wrong"),
    ]
    assert render(proofs).splitlines() == [
        "late     proved  rank 1 arrived last",
        "corrupt  NOT FOUND  nothing was wrong",
    ]


def measured_by_four(parbench: Command, tmp_path: Path, *words: str) -> Record:
    chosen = ("--only", "all_reduce", "--sizes", "64K", "--set", "mode=blocking", "--launches", "1", "--budget", "10s")
    done = parbench("run", "--preset", "smoke", "--nproc", "4", *chosen, *words)
    assert done.returncode == 0, done.stderr
    (record,) = load_run(tmp_path / done.stdout.splitlines()[-1]).records
    return record


@pytest.mark.slow
def test_a_late_rank_among_four_is_blamed_and_the_transfer_is_not(parbench: Command, tmp_path: Path) -> None:
    before = measured_by_four(parbench, tmp_path)
    late = measured_by_four(parbench, tmp_path, "--inject", "late:1:3ms")
    assert late.arrival is not None
    assert late.arrival.late_rank == 1
    assert (late.arrival.share or 0) >= 0.95
    skew, transfer, usual = late.metrics["skew"].value, late.metrics["transfer"].value, before.metrics["transfer"].value
    assert None not in (skew, transfer, usual)
    assert (skew or 0) >= 3e-3
    # four ranks on two cores scatter: what would be wrong is the delay in it
    assert (transfer or 1) < (usual or 0) + 1.5e-3


@pytest.mark.slow
def test_every_injection_is_found_here() -> None:
    proofs = prove(("bench.definitions",), 2)
    assert [proof.injection for proof in proofs] == ["none", "late", "slow", "corrupt"]
    assert all(proof.found for proof in proofs), render(proofs)
