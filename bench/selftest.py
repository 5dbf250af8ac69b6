"""``parbench doctor --selftest``: disturb one rank, and check that the records name the cause and the rank."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from parbench.bench.launch.measure import run_options
from parbench.bench.plan.options import Options
from parbench.bench.results.records import Record
from parbench.bench.results.runs import load_run

_RANK = 1
_MIN_LATE_SHARE = 0.95
_MIN_SLOW_SHARE = 0.8


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The result of one injection."""

    injection: str
    found: bool
    """True if the record names the cause and the right rank."""
    told: str
    """The finding as text."""


def selftest(modules: Sequence[str], nproc: int | None = None) -> tuple[Proof, ...]:
    """Measure an all_reduce undisturbed, then with each injection, and judge the records."""
    undisturbed = Options(
        only=("all_reduce",),
        settings={"size_bytes": "1M"},
        repetitions=1,
        budget="20s",
        preset="smoke",
    )
    proofs = []
    for injection in (None, f"late:{_RANK}:3ms", f"slow:{_RANK}:100%", f"corrupt:{_RANK}"):
        options = replace(undisturbed, nproc=nproc, inject=injection)
        with tempfile.TemporaryDirectory(prefix="parbench-selftest-") as folder:
            path = run_options(options, modules, out=Path(folder), resume_path=None, as_json=False)
            assert path is not None, "a self-test starts its own ranks"
            record = load_run(path).records[-1]
        kind = (injection or "none").partition(":")[0]
        proofs.append(judge(kind, record))
    return tuple(proofs)


def judge(injection: str, record: Record) -> Proof:
    """Return True if a record names an injection of this kind and its rank."""
    if injection == "none":
        return Proof(
            injection=injection, found=record.status == "ok", told=record.reason or "all right"
        )
    if injection == "corrupt":
        is_blamed = list(record.wrong_by_rank) == [_RANK]
        found = record.status == "wrong" and is_blamed and not record.metrics
        return Proof(injection=injection, found=found, told=record.reason or "nothing was wrong")
    arrival = record.arrival
    rank: int | None = None
    share: float | None = None
    if arrival is not None:
        is_late = injection == "late"
        rank = arrival.late_rank if is_late else arrival.last_out_rank
        share = arrival.share if is_late else arrival.last_out_share
    if rank is None or share is None:
        return Proof(
            injection=injection, found=False, told=record.reason or f"no rank was {injection}"
        )
    verb, min_share = (
        ("arrived", _MIN_LATE_SHARE) if injection == "late" else ("left", _MIN_SLOW_SHARE)
    )
    message = f"rank {rank} {verb} last in {share:.0%} of iterations"
    return Proof(injection=injection, found=rank == _RANK and share >= min_share, told=message)


def render(proofs: Sequence[Proof]) -> str:
    """Return one line for each injection."""
    width = max(len(proof.injection) for proof in proofs)
    lines = []
    for proof in proofs:
        verdict = "proved" if proof.found else "NOT FOUND"
        lines.append(f"{proof.injection:<{width}}  {verdict}  {proof.told}")
    return "\n".join(lines)
