"""One case on the ranks: prepare, check, warm up, time, check again. Every subject goes the same way."""

import importlib
import io
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import numpy as np
import torch.distributed as dist
from msgspec.structs import replace

from bench.launch.control_channel import Outcome
from bench.operations.background_load import NOTHING, background_load
from bench.plan.cases import Case
from bench.plan.catalogue import OF_THE_RUNNER
from bench.plan.plan import FaultSpec, Measure
from bench.rank.timing import Progress, Timed, Timing, start_line, time_steps
from bench.results.records import Check, Status, blame, encode_timeline
from bench.text import UserError
from bench.world.subgroups import StandBy, Subgroup, Subgroups
from bench.world.subject import Description, Explained, Subject
from bench.world.world import World


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
            corrupt = getattr(self._subject, "corrupt", None)
            if corrupt is None:
                raise UserError(f"--inject {self._fault.text}: this subject has no corrupt()")
            corrupt()

    def issue(self) -> Sequence[dist.Work]:
        """Refuse to be slow or wrong: issued apart, a step can only come late."""
        raise UserError(f"--inject {self._fault.text}: mode async knows only late")


Prepare = Callable[..., Subject]
_EXPLAIN_SHARE = 0.4


def run_case(
    case: Case,
    world: World,
    measure: Measure,
    budget_seconds: float,
    progress: Progress,
    *,
    subgroups: Subgroups | None = None,
    fault: FaultSpec | None = None,
) -> Outcome:
    """Measure a case; every rank takes part, and rank 0's outcome is the one that counts.

    ``subgroups`` keeps process groups from case to case.
    """
    began = time.perf_counter()
    progress.enter("prepare")
    subject, refusal, subgroup = _prepare(case, subgroups or Subgroups(world), fault)
    refusals = world.gather(refusal)
    reason = _common_refusal(refusals, subgroup)
    if subject is None or subgroup is None or reason is not None:
        if subject is not None:
            subject.close()
        status: Status = "skipped" if reason in refusals else "failed"
        return Outcome(status=status, reason=reason or "", wall_seconds=time.perf_counter() - began)
    # a disturbed rank cannot explain itself, and the others wait for nobody
    explains = all(world.gather(isinstance(subject, Explained)))
    # what explains itself is a step, whose preparing takes a noticeable part of its share
    share = (1 - _EXPLAIN_SHARE) * budget_seconds - (time.perf_counter() - began) if explains else budget_seconds
    timing = Timing(
        measure=measure,
        mode=str(case.whole.get("mode", "blocking")),
        ranks=subgroup.ranks,
        budget_seconds=max(share, 0.0),
        late_seconds=fault.amount if fault and fault.kind == "late" and fault.rank == world.global_rank else 0.0,
    )
    try:
        outcome = _measure(subject, world, subgroup, timing, progress, str(case.whole.get("background", NOTHING)))
        if explains and outcome.status == "ok":
            progress.enter("explain")
            begin = partial(start_line, subject, world, timing, progress)
            left = world.decide([max(budget_seconds - (time.perf_counter() - began), 0.0)])[0]
            found = cast(Explained, subject).explain(begin, left)
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


def _prepare(
    case: Case, subgroups: Subgroups, fault: FaultSpec | None
) -> tuple[Subject | None, str | None, Subgroup | None]:
    """Return the subject, or the words in which it refuses these parameters or this machine; and who takes part."""
    params = {name: value for name, value in case.whole.items() if name not in OF_THE_RUNNER}
    subgroup = None
    try:
        subgroup = subgroups.of(case.whole)
        if subgroup.world is None:
            return StandBy(), None, subgroup
        subject = load_target(case.target)(subgroup.world, **params)
    except UserError as error:
        return None, str(error), subgroup
    if fault is not None and fault.kind != "late" and fault.rank == subgroup.world.global_rank:
        return Disturbed(subject, fault, subgroup.world.sync), None, subgroup
    return subject, None, subgroup


def _common_refusal(refusals: list[object], subgroup: Subgroup | None) -> str | None:
    """Return why the case cannot be measured: all ranks refuse, or they disagree; None if no rank refuses."""
    if not any(refusals):
        return None
    active = range(len(refusals)) if subgroup is None else subgroup.active
    if len({refusals[rank] for rank in active}) == 1:
        return str(refusals[active[0]])
    told = "; ".join(f"rank {rank}: {refusals[rank] or 'ready'}" for rank in active)
    return f"ranks disagree about whether this can run: {told}"


def _measure(
    subject: Subject, world: World, subgroup: Subgroup, timing: Timing, progress: Progress, beside: str
) -> Outcome:
    told = world.gather(subject.describe())
    description = cast(Description, told[subgroup.ranks[0]])
    unlike = ", ".join(str(rank) for rank in subgroup.ranks if repr(told[rank]) != repr(description))
    if unlike:
        reason = f"ranks disagree about what a step does: {unlike} unlike rank {subgroup.ranks[0]}"
        return Outcome(status="failed", reason=reason)
    if wrong := _check(subject, world, progress, fresh=True):
        return _wrong(wrong, "before the timed region")
    with background_load(beside, world):
        timed = time_steps(subject, world, timing, progress)
    if wrong := _check(subject, world, progress, fresh=timing.many):
        return _wrong(wrong, "after the timed region")
    return _outcome(description, world, subgroup, timed)


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
    """A wrong result has no time."""
    told = ", ".join(f"{count} on rank {rank}" for rank, count in counts.items())
    return Outcome(
        status="wrong",
        reason=f"results differ from the reference {when}: {told}",
        check=Check(passed=False, wrong=sum(counts.values())),
    )


def _outcome(description: Description, world: World, subgroup: Subgroup, timed: Timed | None) -> Outcome:
    passed = Check(passed=True, wrong=0)
    if timed is None:
        return Outcome(status="ok", check=passed)
    hops = description.hops
    whole = len(subgroup.ranks) == len(world.hosts)
    where = {} if whole else {"group_size": len(subgroup.ranks), "group_ranks": list(subgroup.ranks)}
    counts = {"warmup": timed.warmup, "steps_per_sample": timed.steps_per_sample}
    return Outcome(
        status="ok",
        stop=timed.stop,
        check=passed,
        headline=description.headline,
        seconds=[value / hops for value in timed.seconds()],
        skew_seconds=timed.skew_seconds(),
        transfer_seconds=[] if timed.steps_per_sample > 1 else [value / hops for value in timed.transfer_seconds()],
        issue_seconds=timed.issue_seconds(),
        arrival=blame(
            [subgroup.ranks[place] for place in timed.last_in()],
            [subgroup.ranks[place] for place in timed.last_out()],
            timed.skew_seconds(),
            world.clock.method,
            world.clock.uncertainty_ns / 1e9,
        ),
        work=list(description.work),
        details={**description.details, **where, **counts},
        notes=list(description.notes),
        raw=_pack(timed, world, subgroup),
    )


def _pack(timed: Timed, world: World, subgroup: Subgroup) -> bytes:
    """Return every measured rank's samples as a compressed npz: ns since the first arrival, on rank 0's clock."""
    arrivals, exits, durations, issues = timed.stamps
    first = arrivals.min()
    with io.BytesIO() as file:
        np.savez_compressed(
            file,
            ranks=np.array(subgroup.ranks, dtype=np.int64),
            arrival_ns=arrivals - first,
            exit_ns=exits - first,
            duration_ns=durations,
            issue_ns=issues,
            steps_per_sample=np.int64(timed.steps_per_sample),
            clock_offsets_ns=np.array(world.clock.offsets_ns, dtype=np.int64),
        )
        return file.getvalue()
