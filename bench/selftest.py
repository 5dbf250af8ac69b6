"""``parbench doctor --selftest``: injects faults into a rank, and checks that records name them.

A rank that is late or slow, or whose result is corrupt, must be the rank that the record names.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from parbench.bench.launch.measure import run_options
from parbench.bench.plan.options import Options
from parbench.bench.results.records import Record
from parbench.bench.results.runs import load_run
from parbench.bench.text import UserError, format_table

_RANK = 1
"""The rank into which each fault is injected."""
_MIN_SHARE = 0.8
"""The least fraction of iterations in which a delayed or slowed rank must be the last one."""


@dataclass(frozen=True, kw_only=True)
class InjectionResult:
    """The verdict of the self-test on one injected fault, with the evidence of the record."""

    injection: str
    """The kind of fault: ``late``, ``slow``, ``corrupt``, or ``none`` without a fault."""
    is_proved: bool
    """True if the record shows the fault and names the right rank.

    Without a fault: True if the record shows a correct result.
    """
    message: str
    """The evidence of the record as text, such as ``rank 1 arrived last in 100% of iterations``."""


def selftest(modules: Sequence[str], nproc: int | None = None) -> tuple[InjectionResult, ...]:
    """Measure an all_reduce without a fault and with each kind of fault, and return the verdicts.

    The kinds are late, slow and corrupt. ``modules`` are the names of the Python modules that
    define the benchmarks. ``nproc`` is the number of ranks, None for the default of ``parbench
    run``. Raises ``UserError`` if a measurement is interrupted.
    """
    results = []
    for injection in (None, f"late:{_RANK}:3ms", f"slow:{_RANK}:100%", f"corrupt:{_RANK}"):
        options = Options(
            names=("all_reduce",),
            settings={"size_bytes": "1M"},
            nproc=nproc,
            repetitions=1,
            budget="20s",
            preset="smoke",
            inject=injection,
        )
        with tempfile.TemporaryDirectory(prefix="parbench-selftest-") as folder:
            path = run_options(
                options, modules, out=Path(folder), command="parbench doctor --selftest"
            )
            assert path is not None, "a self-test starts its own ranks"
            records = load_run(path).records
        if not records:
            raise UserError("the self-test ended early")
        kind = (injection or "none").partition(":")[0]
        results.append(judge(kind, records[-1]))
    return tuple(results)


def judge(injection: str, record: Record) -> InjectionResult:
    """Return the verdict on one fault, from the record of the all_reduce with that fault.

    ``injection`` is the kind of fault: ``late``, ``slow``, ``corrupt``, or ``none`` without a
    fault.
    """
    is_proved = False
    message = record.reason
    if injection == "none":
        is_proved = record.status == "ok"
    elif injection == "corrupt":
        is_blamed = list(record.wrong_by_rank) == [_RANK]
        is_proved = record.status == "wrong" and is_blamed and not record.metrics
    elif record.arrival is not None:
        arrival = record.arrival
        verb, rank, share = "arrived", arrival.late_rank, arrival.share or 0.0
        if injection == "slow":
            verb, rank, share = "left", arrival.last_out_rank, arrival.last_out_share or 0.0
        is_proved = rank == _RANK and share >= _MIN_SHARE
        message = f"rank {rank} {verb} last in {share:.0%} of iterations"
    if not message:
        message = "the result is correct" if is_proved else f"the case has status {record.status}"
    return InjectionResult(injection=injection, is_proved=is_proved, message=message)


def render(results: Sequence[InjectionResult]) -> str:
    """Return the verdicts as text, with one line for each injected fault."""
    rows = []
    for result in results:
        verdict = "ok" if result.injection == "none" else "detected"
        verdict = verdict if result.is_proved else f"NOT {verdict.upper()}"
        rows.append((result.injection, verdict, result.message))
    return format_table(rows)
