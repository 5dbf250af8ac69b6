"""One case on the ranks: prepare, check, warm up, time, check again. Every subject goes the same way."""

import importlib
import io
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch.distributed as dist
from msgspec.structs import replace

from bench.launch.control_channel import Outcome
from bench.operations.local import NOTHING, background_load
from bench.plan.cases import Case
from bench.plan.catalogue import OF_THE_RUNNER
from bench.plan.plan import FaultSpec, Measure
from bench.rank.timing import Progress, Timed, Timing
from bench.results.records import Check, blame, encode_timeline
from bench.text import UserError
from bench.world.subject import Description, Differing, Explained, Subject
from bench.world.world import StandBy, Subgroup, Subgroups, World

_MOST_NAMED = 3
"""Wrong results that a reason names; of more it says how many."""


class Disturbed:
    """A subject whose step takes longer, or whose result is wrong; ``sync`` waits for its device."""

    def __init__(self, subject: Subject, fault: FaultSpec, sync: Callable[[], None]) -> None:
        self._subject, self._fault, self._sync = subject, fault, sync
        self.reset, self.check = subject.reset, subject.check
        self.describe, self.close = subject.describe, subject.close

    def step(self) -> None:
        began = time.perf_counter()
        self._subject.step()
        if self._fault.kind == "slow":
            self._sync()  # a share of the step, not of its launch
            time.sleep(self._fault.amount * (time.perf_counter() - began))
        elif self._fault.kind == "corrupt":
            if not hasattr(self._subject, "corrupt"):
                raise UserError(f"--inject {self._fault.text}: this subject has no corrupt()")
            self._subject.corrupt()

    def issue(self) -> Sequence[dist.Work]:
        """Refuse to be slow or wrong: issued apart, a step can only come late."""
        raise UserError(f"--inject {self._fault.text}: mode async knows only late")


def run_case(
    case: Case, subgroups: Subgroups, measure: Measure, seconds: float, progress: Progress, fault: FaultSpec | None
) -> Outcome:
    """Measure a case within a budget of seconds; every rank takes part, and rank 0's outcome is the one that counts."""
    began, world = time.perf_counter(), subgroups.world
    progress.phase, progress.steps = "prepare", 0
    subject = subgroup = refusal = None
    try:
        subgroup = subgroups.of(case.whole)
        subject = _prepare(case, subgroup.world, fault)
    except UserError as error:
        refusal = str(error)
    refusals = world.gather(refusal)
    if subject is None or subgroup is None or any(refusals):
        if subject is not None:
            subject.close()
        active = range(len(refusals)) if subgroup is None else subgroup.active
        return replace(_refused(refusals, active), wall_seconds=time.perf_counter() - began)
    # a disturbed rank cannot explain itself, and the others wait for nobody
    explains = all(world.gather(isinstance(subject, Explained)))
    # what explains itself is a step, whose preparing takes a noticeable part of its share
    share = 0.6 * seconds - (time.perf_counter() - began) if explains else seconds
    timing = Timing(
        subject=subject,
        world=world,
        progress=progress,
        measure=measure,
        ranks=subgroup.ranks,
        budget_seconds=max(share, 0.0),
        mode=str(case.whole.get("mode", "blocking")),
        late_seconds=fault.amount if fault and fault.kind == "late" and fault.rank == world.global_rank else 0.0,
    )
    try:
        outcome = _measure(timing, subgroup, str(case.whole.get("background", NOTHING)))
        if explains and outcome.status == "ok":
            progress.phase = "explain"
            [left] = world.decide([max(seconds - (time.perf_counter() - began), 0.0)])
            found = cast(Explained, subject).explain(timing.start_line, left)
            outcome = replace(
                outcome,
                explained=found.metrics,
                details={**outcome.details, **found.details},
                notes=[*outcome.notes, *found.notes],
                timeline=b"" if found.timeline is None else encode_timeline(found.timeline),
            )
    finally:
        subject.close()
    return replace(outcome, injected=fault.text if fault else "", wall_seconds=time.perf_counter() - began)


def load_target(target: str) -> Callable[..., Subject]:
    """Return the function that ``package.module:function`` names; ``UserError`` if there is none."""
    module, _, name = target.partition(":")
    try:
        found: Callable[..., Subject] | None = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        raise UserError(f"target {target!r} cannot be loaded: {error}") from error
    if not callable(found):
        raise UserError(f"target {target!r} cannot be loaded: {module} has no function {name!r}")
    return found


def _prepare(case: Case, world: World | None, fault: FaultSpec | None) -> Subject:
    if world is None:
        return StandBy()
    params = {name: value for name, value in case.whole.items() if name not in OF_THE_RUNNER}
    subject = load_target(case.target)(world, **params)
    if fault is not None and fault.kind != "late" and fault.rank == world.global_rank:
        return Disturbed(subject, fault, world.sync)
    return subject


def _refused(refusals: Sequence[str | None], active: Sequence[int]) -> Outcome:
    """Say that all active ranks refuse these parameters or this machine in the same words, or that they disagree."""
    if len({refusals[rank] for rank in active}) == 1:
        return Outcome(status="skipped", reason=str(refusals[active[0]]))
    told = "; ".join(f"rank {rank}: {refusals[rank] or 'ready'}" for rank in active)
    return Outcome(status="failed", reason=f"ranks disagree about whether this can run: {told}")


def _measure(timing: Timing, subgroup: Subgroup, background: str) -> Outcome:
    first = subgroup.ranks[0]
    told = timing.world.gather(timing.subject.describe())
    if unlike := ", ".join(str(rank) for rank in subgroup.ranks if repr(told[rank]) != repr(told[first])):
        return Outcome(status="failed", reason=f"ranks disagree about what a step does: {unlike} unlike rank {first}")
    if wrong := _wrong(timing, "before", fresh=True):
        return wrong
    with background_load(background, timing.world):
        timed = timing.run()
    if wrong := _wrong(timing, "after", fresh=timing.many):
        return wrong
    outcome = Outcome(status="ok", check=Check(passed=True, wrong=0))
    return outcome if timed is None else _seen(outcome, timed, told[first], timing.world, list(subgroup.ranks))


def _wrong(timing: Timing, when: str, *, fresh: bool) -> Outcome | None:
    """Check the last step, or a fresh one; return the outcome of a wrong result, which has no time, None if right."""
    timing.progress.phase = "check"
    if fresh:
        timing.start_line()
        timing.subject.step()
        timing.world.sync()
    subject = timing.subject
    found = timing.world.gather((subject.check(), subject.differences() if isinstance(subject, Differing) else ()))
    counts = [count for count, _ in found]
    if not any(counts):
        return None
    told = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(counts) if count)
    named = list(dict.fromkeys(phrase for _, phrases in found for phrase in phrases))
    more = [f"and {len(named) - _MOST_NAMED} more"] if len(named) > _MOST_NAMED else []
    reason = "; ".join(
        [f"results differ from the reference {when} the timed region: {told}", *named[:_MOST_NAMED], *more]
    )
    return Outcome(status="wrong", reason=reason, check=Check(passed=False, wrong=sum(counts)))


def _seen(right: Outcome, timed: Timed, description: Description, world: World, ranks: list[int]) -> Outcome:
    samples, clock = timed.samples(description.hops), world.clock
    arrivals, exits, durations, issues = timed.stamps
    began = arrivals.min()  # every measured rank's samples are told in ns since then, on rank 0's clock
    arrays: dict[str, Any] = {"ranks": np.array(ranks, dtype=np.int64), "arrival_ns": arrivals - began}
    arrays |= {"exit_ns": exits - began, "duration_ns": durations, "issue_ns": issues}
    arrays |= {"steps_per_sample": np.int64(timed.steps_per_sample), "clock_offsets_ns": np.array(clock.offsets_ns)}
    with io.BytesIO() as file:
        np.savez_compressed(file, **arrays)
        raw = file.getvalue()
    last_in, last_out = ([ranks[place] for place in stamps.argmax(axis=0)] for stamps in (arrivals, exits))
    where = {} if len(ranks) == len(world.hosts) else {"group_size": len(ranks), "group_ranks": ranks}
    counts = {"warmup": timed.warmup, "steps_per_sample": timed.steps_per_sample}
    return replace(
        right,
        stop=timed.stop,
        headline=description.headline,
        **samples,
        arrival=blame(last_in, last_out, samples["skew_seconds"], clock.method, clock.uncertainty_ns / 1e9),
        work=list(description.work),
        details={**description.details, **where, **counts},
        notes=list(description.notes),
        raw=raw,
    )
