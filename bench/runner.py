"""One case on the ranks: prepare, check, warm up, time, check again. Every subject goes the same way."""

import importlib
import io
import time
from collections.abc import Callable
from typing import cast

import msgspec
import numpy as np

from bench.cases import Case
from bench.errors import UserError
from bench.messages import Outcome
from bench.plan import Measure
from bench.progress import Progress
from bench.records import Check, Status
from bench.subject import Description, Subject
from bench.timing import Timed, time_steps
from bench.world import World

Prepare = Callable[..., Subject]


def run_case(case: Case, world: World, measure: Measure, budget_seconds: float, progress: Progress) -> Outcome:
    """Measure a case; every rank takes part, and rank 0's outcome is the one that counts."""
    began = time.perf_counter()
    progress.enter("prepare")
    subject, refusal = _prepare(case, world)
    reason = _common_refusal(world.gather(refusal))
    if subject is None or reason is not None:
        if subject is not None:
            subject.close()
        status: Status = "skipped" if refusal and reason == refusal else "failed"
        return Outcome(status=status, reason=reason or "", wall_seconds=time.perf_counter() - began)
    try:
        outcome = _measure(case, subject, world, measure, budget_seconds, progress)
    finally:
        subject.close()
    return msgspec.structs.replace(outcome, wall_seconds=time.perf_counter() - began)


def load_target(target: str) -> Prepare:
    """Return the function that ``package.module:function`` names; ``UserError`` if there is none."""
    module_name, _, name = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(f"target {target!r} cannot be loaded: {error}") from error
    if not callable(getattr(module, name, None)):
        raise UserError(f"target {target!r} cannot be loaded: {module_name} has no function {name!r}")
    return cast(Prepare, getattr(module, name))


def _prepare(case: Case, world: World) -> tuple[Subject | None, str | None]:
    """Return the subject, or the words in which it refuses these parameters or this machine."""
    params = {name: value for name, value in case.params.items() if name != "mode"}
    try:
        return load_target(case.target)(world, **params), None
    except UserError as error:
        return None, str(error)


def _common_refusal(refusals: list[object]) -> str | None:
    """Return why the case cannot be measured: all ranks refuse, or they disagree; None if no rank refuses."""
    if not any(refusals):
        return None
    if len(set(refusals)) == 1:
        return str(refusals[0])
    told = "; ".join(f"rank {rank}: {refusal or 'ready'}" for rank, refusal in enumerate(refusals))
    return f"ranks disagree about whether this can run: {told}"


def _measure(
    case: Case, subject: Subject, world: World, measure: Measure, budget_seconds: float, progress: Progress
) -> Outcome:
    description = subject.describe()
    told = world.gather(repr(description))
    unlike = ", ".join(str(rank) for rank, other in enumerate(told) if other != told[0])
    if unlike:
        return Outcome(status="failed", reason=f"ranks disagree about what a step does: {unlike} unlike rank 0")
    before = _check(subject, world, progress, fresh=True)
    if before:
        return _wrong(before, "before the timed region")
    pipelined = case.params.get("mode") == "pipelined"
    timed = time_steps(subject, world, measure, pipelined=pipelined, budget_seconds=budget_seconds, progress=progress)
    after = _check(subject, world, progress, fresh=pipelined)
    if after:
        return _wrong(after, "after the timed region")
    return _outcome(description, world, timed)


def _check(subject: Subject, world: World, progress: Progress, *, fresh: bool) -> dict[int, int]:
    """Return how many results are wrong by rank, right ones left out; of the last step, or of a fresh one."""
    progress.enter("check")
    if fresh:
        subject.reset()
        world.sync()
        progress.steps += 1
        world.barrier()
        subject.step()
        world.sync()
    counts = world.gather(subject.check())
    return {rank: int(cast(int, count)) for rank, count in enumerate(counts) if count}


def _wrong(counts: dict[int, int], when: str) -> Outcome:
    """Return the outcome of a wrong result: it has no time."""
    told = ", ".join(f"{count} on rank {rank}" for rank, count in counts.items())
    total = sum(counts.values())
    return Outcome(
        status="wrong",
        reason=f"results differ from the reference {when}: {told}",
        check=Check(passed=False, wrong=total),
    )


def _outcome(description: Description, world: World, timed: Timed | None) -> Outcome:
    passed = Check(passed=True, wrong=0)
    if timed is None:
        return Outcome(status="ok", check=passed)
    clock = {"clock": world.clock.method, "clock_uncertainty_s": world.clock.uncertainty_ns / 1e9}
    counts = {"warmup": timed.warmup, "steps_per_sample": timed.steps_per_sample}
    return Outcome(
        status="ok",
        stop=timed.stop,
        check=passed,
        headline=description.headline,
        seconds=timed.seconds(),
        skew_seconds=timed.skew_seconds(),
        work=list(description.work),
        details={**description.details, **counts, **clock},
        notes=list(description.notes),
        raw=_pack(timed, world),
    )


def _pack(timed: Timed, world: World) -> bytes:
    """Return every rank's samples as a compressed npz: ns since the first arrival, on rank 0's clock."""
    first = timed.stamps[0].min()
    with io.BytesIO() as file:
        np.savez_compressed(
            file,
            arrival_ns=timed.stamps[0] - first,
            exit_ns=timed.stamps[1] - first,
            duration_ns=timed.stamps[2],
            steps_per_sample=np.int64(timed.steps_per_sample),
            clock_offsets_ns=np.array(world.clock.offsets_ns, dtype=np.int64),
        )
        return file.getvalue()
