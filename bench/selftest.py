"""``parbench doctor --selftest``: disturb one rank on purpose, and see that the suite finds it and blames it."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from parbench.bench.launch.measure import run_options
from parbench.bench.plan.options import Options
from parbench.bench.results.records import Record
from parbench.bench.results.runs import load_run

_RANK = 1


@dataclass(frozen=True, kw_only=True)
class Proof:
    """An injection, and what the suite said of it; ``found`` is whether it named the cause and the right rank."""

    injection: str
    found: bool
    told: str


def selftest(modules: Sequence[str], nproc: int | None = None) -> tuple[Proof, ...]:
    """Measure an all_reduce undisturbed, then with each injection, and judge what the records say."""
    undisturbed = Options(only=("all_reduce",), settings={"size_bytes": "1M"}, launches=1, budget="20s", preset="smoke")
    proofs = []
    for injection in (None, f"late:{_RANK}:3ms", f"slow:{_RANK}:100%", f"corrupt:{_RANK}"):
        options = replace(undisturbed, nproc=nproc, inject=injection)
        with tempfile.TemporaryDirectory(prefix="parbench-selftest-") as folder:
            path = run_options(options, modules, out=Path(folder), resume_path=None, as_json=False)
            assert path is not None, "no rank of a self-test only joins"
            proofs.append(judge((injection or "none").partition(":")[0], load_run(path).records[-1]))
    return tuple(proofs)


def judge(injection: str, record: Record) -> Proof:
    if injection == "none":
        return Proof(injection=injection, found=record.status == "ok", told=record.reason or "all right")
    if injection == "corrupt":
        blamed = list(record.wrong_by_rank) == [_RANK]
        found = record.status == "wrong" and blamed and not record.metrics
        return Proof(injection=injection, found=found, told=record.reason or "nothing was wrong")
    rank = share = None
    if (arrival := record.arrival) and injection == "late":
        rank, share, verb, least = arrival.late_rank, arrival.share, "arrived", 0.95
    elif arrival:
        rank, share, verb, least = arrival.last_out_rank, arrival.last_out_share, "left", 0.8
    if rank is None or share is None:
        return Proof(injection=injection, found=False, told=record.reason or f"no rank was {injection}")
    told = f"rank {rank} {verb} last in {share:.0%} of iterations"
    return Proof(injection=injection, found=rank == _RANK and share >= least, told=told)


def render(proofs: Sequence[Proof]) -> str:
    width = max(len(proof.injection) for proof in proofs)
    verdicts = {True: "proved", False: "NOT FOUND"}
    return "\n".join(f"{proof.injection:<{width}}  {verdicts[proof.found]}  {proof.told}" for proof in proofs)
