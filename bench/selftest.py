"""``parbench doctor --prove``: disturb one rank on purpose, and see that the suite finds it and blames it."""

import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.launch.measure import run_options
from bench.plan.options import Options
from bench.results.records import Record
from bench.results.runs import load_run

_RANK = 1
_BUDGET = "20s"
_CERTAIN = 0.95
_LIKELY = 0.8


@dataclass(frozen=True, kw_only=True)
class Proof:
    """An injection, and what the suite said of it; ``found`` is whether it named the cause and the right rank."""

    injection: str
    found: bool
    told: str


def selftest(modules: Sequence[str], nproc: int | None = None) -> tuple[Proof, ...]:
    """Measure an all_reduce undisturbed, then with each injection, and judge what the records say."""
    trials: tuple[tuple[str | None, Callable[[Record], Proof]], ...] = (
        (None, _judge_undisturbed),
        (f"late:{_RANK}:3ms", _judge_late),
        (f"slow:{_RANK}:100%", _judge_slow),
        (f"corrupt:{_RANK}", _judge_corrupt),
    )
    return tuple(judge(_measure(modules, nproc, injection)) for injection, judge in trials)


def _measure(modules: Sequence[str], nproc: int | None, injection: str | None) -> Record:
    with tempfile.TemporaryDirectory(prefix="parbench-prove-") as folder:
        options = Options(
            preset="smoke",
            only=("all_reduce",),
            settings={"size_bytes": "1M"},
            nproc=nproc,
            launches=1,
            budget=_BUDGET,
            inject=injection,
        )
        path = run_options(options, modules, out=Path(folder), resume_path=None, as_json=False)
        assert path is not None, "a prover is no rank that only joins"
        return load_run(path).records[-1]


def _judge_undisturbed(record: Record) -> Proof:
    return Proof(injection="none", found=record.status == "ok", told=record.reason or "all right")


def _judge_late(record: Record) -> Proof:
    arrival = record.arrival
    if arrival is None or arrival.late_rank is None or arrival.share is None:
        return Proof(injection="late", found=False, told=record.reason or "no rank was late")
    told = f"rank {arrival.late_rank} arrived last in {arrival.share:.0%} of iterations"
    return Proof(injection="late", found=arrival.late_rank == _RANK and arrival.share >= _CERTAIN, told=told)


def _judge_slow(record: Record) -> Proof:
    arrival = record.arrival
    if arrival is None or arrival.last_out_rank is None or arrival.last_out_share is None:
        return Proof(injection="slow", found=False, told=record.reason or "no rank was slow")
    told = f"rank {arrival.last_out_rank} left last in {arrival.last_out_share:.0%} of iterations"
    return Proof(
        injection="slow", found=arrival.last_out_rank == _RANK and arrival.last_out_share >= _LIKELY, told=told
    )


def _judge_corrupt(record: Record) -> Proof:
    blamed = re.findall(r"on rank (\d+)", record.reason) == [str(_RANK)]
    found = record.status == "wrong" and blamed and not record.metrics
    return Proof(injection="corrupt", found=found, told=record.reason or "nothing was wrong")


def render(proofs: Sequence[Proof]) -> str:
    """Return the proofs as aligned lines."""
    width = max(len(proof.injection) for proof in proofs)
    return "\n".join(
        f"{proof.injection.ljust(width)}  {'proved' if proof.found else 'NOT FOUND'}  {proof.told}" for proof in proofs
    )
