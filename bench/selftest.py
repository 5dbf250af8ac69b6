"""``parbench doctor --selftest``: disturbs a rank, and checks that records name rank and cause."""

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
class InjectionResult:
    """The verdict on an injected fault: detected or not, with the evidence."""

    injection: str
    """The fault as ``--inject`` takes it, ``none`` for the undisturbed measurement."""
    is_proved: bool
    """True if the record names the cause and the right rank."""
    message: str
    """The evidence of the record as text."""


def selftest(modules: Sequence[str], nproc: int | None = None) -> tuple[InjectionResult, ...]:
    """Measure an all_reduce undisturbed, then with each injection, and judge the records."""
    undisturbed = Options(
        names=("all_reduce",),
        settings={"size_bytes": "1M"},
        repetitions=1,
        budget="20s",
        preset="smoke",
    )
    results = []
    for injection in (None, f"late:{_RANK}:3ms", f"slow:{_RANK}:100%", f"corrupt:{_RANK}"):
        options = replace(undisturbed, nproc=nproc, inject=injection)
        with tempfile.TemporaryDirectory(prefix="parbench-selftest-") as folder:
            path = run_options(options, modules, out=Path(folder))
            assert path is not None, "a self-test starts its own ranks"
            record = load_run(path).records[-1]
        kind = (injection or "none").partition(":")[0]
        results.append(judge(kind, record))
    return tuple(results)


def judge(injection: str, record: Record) -> InjectionResult:
    """Return the verdict on an injected fault, from the rank and the cause that a record names."""
    is_proved = False
    message = record.reason
    if injection == "none":
        is_proved = record.status == "ok"
    elif injection == "corrupt":
        is_blamed = list(record.wrong_by_rank) == [_RANK]
        is_proved = record.status == "wrong" and is_blamed and not record.metrics
    elif record.arrival is not None:
        arrival = record.arrival
        verb, min_share = "arrived", _MIN_LATE_SHARE
        rank, share = arrival.late_rank, arrival.share or 0.0
        if injection == "slow":
            verb, min_share = "left", _MIN_SLOW_SHARE
            rank, share = arrival.last_out_rank, arrival.last_out_share or 0.0
        is_proved = rank == _RANK and share >= min_share
        message = f"rank {rank} {verb} last in {share:.0%} of iterations"
    message = message or f"the record is {record.status}"
    return InjectionResult(injection=injection, is_proved=is_proved, message=message)


def render(results: Sequence[InjectionResult]) -> str:
    """Return the verdicts as text, with one line for each injection."""
    width = max(len(result.injection) for result in results)
    lines = []
    for result in results:
        verdict = "proved" if result.is_proved else "NOT FOUND"
        lines.append(f"{result.injection:<{width}}  {verdict}  {result.message}")
    return "\n".join(lines)
