"""One case on the ranks: prepare, check, warm up, time, check again. Every benchmark goes the same way."""

import importlib
import io
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from msgspec.structs import replace

from parbench.bench.launch.control_channel import Outcome
from parbench.bench.operations.local import NOTHING, background_load
from parbench.bench.plan.cases import EXPLAINER, Case
from parbench.bench.plan.catalogue import MODES, OF_THE_RUNNER, bytes_needed
from parbench.bench.plan.plan import FaultSpec, Measure
from parbench.bench.rank.device_timer import HOST_NS
from parbench.bench.rank.timing import Progress, Timed, Timing
from parbench.bench.results.records import Check, SkipReason, blame, encode_timeline
from parbench.bench.text import UserError, format_size, listed
from parbench.bench.world.benchmark import Benchmark, Description, Differing, Explained
from parbench.bench.world.world import IdleBenchmark, World, select_subgroup

_MOST_NAMED = 3
"""Wrong results that a reason names; of more it says how many."""


class Disturbed:
    """A benchmark whose step takes longer, or whose result is wrong; ``sync`` waits for what it has launched."""

    def __init__(self, benchmark: Benchmark, fault: FaultSpec, sync: Callable[[], None]) -> None:
        if fault.kind == "corrupt" and not hasattr(benchmark, "corrupt"):
            raise UserError(f"--inject {fault.text}: this benchmark has no corrupt()")
        self._benchmark, self._fault, self._sync = benchmark, fault, sync
        self.reset, self.check = benchmark.reset, benchmark.check
        self.describe, self.close = benchmark.describe, benchmark.close
        self.gathered = getattr(benchmark, "gathered", False)

    def step(self) -> None:
        began = time.perf_counter()
        self._benchmark.step()
        if self._fault.kind == "slow":
            self._sync()  # a share of the step, not of its launch
            time.sleep(self._fault.amount * (time.perf_counter() - began))
        elif self._fault.kind == "corrupt":
            cast(Any, self._benchmark).corrupt()

    def issue(self) -> Sequence[dist.Work]:
        """Refuse to be slow or wrong: issued apart, a step can only come late."""
        raise UserError(f"--inject {self._fault.text}: mode async knows only late")


class CaseRun:
    """A case on the ranks, in one visit or in several with other cases between them; every rank takes part."""

    def __init__(self, case: Case, world: World, measure: Measure, progress: Progress, fault: FaultSpec | None) -> None:
        self._case, self._world, self._measure = case, world, measure
        self._progress, self._fault, self._injected = progress, fault, fault.text if fault else ""
        self._benchmark: Benchmark | None = None
        self._held = ExitStack()
        self._repeatable = False
        self._wall_seconds = 0.0

    def visit(self, seconds: float, left: int = 0, *, alone: bool = True) -> Outcome:
        """Measure for about so many seconds; return what was seen in all visits, of which ``left`` are to come.

        A case that is visited once, ``alone``, is measured until it is known well enough. What is not well has no more
        visits. Rank 0's outcome is the one that counts.
        """
        began, outcome = time.perf_counter(), None
        try:
            if self._benchmark is None:
                outcome = self._prepare()
            if outcome is None:
                explains = alone and self._explains
                # what explains itself is a step, whose preparing takes a noticeable part of its share
                share = 0.6 * seconds - (time.perf_counter() - began) if explains else seconds
                outcome = self._measured(max(share, 0.0), left, alone)
                if explains and outcome.status == "ok":
                    outcome = self._explained(outcome, seconds - (time.perf_counter() - began))
        except BaseException:
            self.close()
            raise
        if not outcome.more:
            self.close()
        self._wall_seconds += time.perf_counter() - began
        return replace(outcome, wall_seconds=self._wall_seconds)

    def end(self) -> Outcome:
        """Return what was seen, as there is no time for more visits."""
        self.close()
        outcome = self._outcome(left=0)
        return replace(outcome, stop="budget" if outcome.stop == "visits" else outcome.stop)

    def close(self) -> None:
        self._benchmark = None
        self._held.close()

    def _prepare(self) -> Outcome | None:
        """Make the benchmark and check its first step; return the outcome of a case that cannot be measured."""
        world, fault, case = self._world, self._fault, self._case
        self._progress.phase, self._progress.steps = "prepare", 0
        subgroup = refusal = None
        try:
            subgroup = select_subgroup(world, case.whole)
            _refuse_too_large(case, world)
            self._benchmark = make_benchmark(case, subgroup.world, fault)
            self._held.callback(self._benchmark.close)
        except UserError as error:
            refusal = str(error)
        refusals = world.gather(refusal)
        if self._benchmark is None or subgroup is None or any(refusals):
            return _refused(refusals, range(len(refusals)) if subgroup is None else subgroup.active)
        if fault is not None and fault.kind != "corrupt" and fault.rank not in subgroup.ranks:
            return self._skip_fault(fault, f"rank {fault.rank} is not measured in this case")
        # a disturbed rank cannot explain itself, and the others wait for nobody
        can = world.gather(None if isinstance(self._benchmark, Disturbed) else isinstance(self._benchmark, Explained))
        self._explains = all(can)
        if case.is_own and all(one is False for one in can):
            self._benchmark = load_target(EXPLAINER)(world, self._benchmark)
            self._explains = True
        self._ranks = subgroup.ranks
        self._checks = any(world.gather(getattr(self._benchmark.check, "__func__", None) is not Benchmark.check))
        self._graph = case.whole.get("mode") == "graph"
        has_load = case.whole.get("background", NOTHING) != NOTHING
        self._timing = Timing(
            self._benchmark,
            world,
            self._progress,
            self._measure,
            subgroup,
            mode=str(case.whole.get("mode", "blocking")),
            late_seconds=fault.amount if fault and fault.kind == "late" and fault.rank == world.global_rank else 0.0,
            beside=has_load,
        )
        self._held.callback(self._timing.close)
        first = self._ranks[0]
        told = world.gather(self._benchmark.describe())
        if unlike := ", ".join(str(rank) for rank in self._ranks if repr(told[rank]) != repr(told[first])):
            reason = f"ranks disagree about what a step does: {unlike} unlike rank {first}"
            return Outcome(status="failed", reason=reason, injected=self._injected)
        self._description = told[first]
        wrong = _wrong(self._timing, "before the timed region", self._benchmark.step)
        if wrong is None and fault is not None and fault.kind == "corrupt":
            return self._skip_fault(fault, f"rank {fault.rank} has no result in this case that can be wrong")
        if wrong is None and self._graph:
            self._benchmark.step()  # a result that a second step leaves right can be checked after many
            world.sync()
            self._repeatable = not any(world.gather(self._benchmark.check()))
            wrong = _wrong(self._timing, "in a replay before the timed region", self._timing.replay)
        if wrong is None and has_load:
            # CUDA may wait for an idle device to load a kernel, and none is idle next to a load.
            self._timing.start_line(1)
        return None if wrong is None else replace(wrong, injected=self._injected)

    def _skip_fault(self, fault: FaultSpec, reason: str) -> Outcome:
        """Return the outcome of a case in which the injected fault would have no effect."""
        return Outcome(status="skipped", reason=f"--inject {fault.text}: {reason}", injected=fault.text)

    def _measured(self, seconds: float, left: int, alone: bool) -> Outcome:
        timing = self._timing
        with background_load(str(self._case.whole.get("background", NOTHING)), self._world):
            timing.run(seconds) if alone else timing.visit(seconds, left)
        left = 0 if timing.full else left
        wrong = _wrong(timing, "in the last replay of the timed region") if self._repeatable else None
        fresh = timing.replay if self._graph else timing.benchmark.step if timing.many else None
        if wrong := wrong or _wrong(timing, "after the timed region", fresh):
            return replace(wrong, injected=self._injected)
        return self._outcome(left)

    def _outcome(self, left: int) -> Outcome:
        check, more = Check(passed=True, wrong=0) if self._checks else Check(), left > 0
        right = Outcome(status="ok", check=check, more=more, wall_seconds=self._wall_seconds, injected=self._injected)
        seen, world = self._timing.timed, self._timing.world
        if seen is None:
            return right
        outcome = _seen(right, seen, self._description, world, list(self._ranks))
        return replace(outcome, notes=[*outcome.notes, *_notes(self._case, world, len(self._ranks), seen.hidden)])

    def _explained(self, outcome: Outcome, seconds: float) -> Outcome:
        self._progress.phase = "explain"
        [left] = self._timing.world.decide([max(seconds, 0.0)])
        found = cast(Explained, self._benchmark).explain(self._timing.start_line, left)
        return replace(
            outcome,
            explained=found.metrics,
            details={**outcome.details, **found.details},
            notes=[*outcome.notes, *found.notes],
            timeline=b"" if found.timeline is None else encode_timeline(found.timeline),
        )


def _refuse_too_large(case: Case, world: World) -> None:
    """Raise the same ``UserError`` on all ranks where an operation needs more than is free on a device; collective."""
    if world.device.type != "cuda" or not {"size_bytes", "dtype", "mode"} <= case.whole.keys():
        return
    cached = torch.cuda.memory_reserved(world.device) - torch.cuda.memory_allocated(world.device)
    free = min(world.gather(torch.cuda.mem_get_info(world.device)[0] + cached))
    size = int(case.whole["size_bytes"])
    if (needed := bytes_needed(size)) > free:
        amounts = f"about {needed / 1e9:.1f} GB a rank; {free / 1e9:.1f} GB of the device are free"
        raise UserError(f"size {format_size(size)} needs {amounts}")


def _notes(case: Case, world: World, num_ranks: int, hidden: float | None) -> list[str]:
    """Return what a time on a device cannot claim."""
    mode, notes = case.whole.get("mode"), []
    if hidden is None or mode not in MODES:
        return []
    if mode == "blocking":
        notes.append("each alone from a start line on the device: mode pipelined or graph compares with nccl-tests")
    if mode != "async" and hidden < 0.9:
        notes.append(
            f"{1 - hidden:.0%} of iterations hold time of the host's launch, too long to hide before the start"
        )
    if num_ranks == 1 and world.backend == "nccl":
        notes.append("one rank: nothing moves, and NCCL launches nothing in place")
    return notes


def load_target(target: str) -> Callable[..., Benchmark]:
    """Return the function that ``package.module:function`` names; ``UserError`` if there is none."""
    module, _, name = target.partition(":")
    try:
        found: Callable[..., Benchmark] | None = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        raise UserError(f"target {target!r} cannot be loaded: {error}") from error
    if not callable(found):
        raise UserError(f"target {target!r} cannot be loaded: {module} has no function {name!r}")
    return found


def make_benchmark(case: Case, world: World | None, fault: FaultSpec | None) -> Benchmark:
    """Return what a rank does for a case: with ``world`` None, nothing; ``fault`` disturbs the rank that it names."""
    if world is None:
        return IdleBenchmark()
    params = {name: value for name, value in case.whole.items() if name not in OF_THE_RUNNER}
    if world.backend == "nccl" and case.name.startswith(("collective.", "p2p.")):
        refuse_float8(str(params.get("dtype")), torch.cuda.get_device_capability(world.device))
    benchmark = load_target(case.target)(world, **params)
    if isinstance(benchmark, type):
        raise TypeError(
            f"target {case.target!r} returned the class {benchmark.__name__}: return a benchmark made of it"
        )
    if lacks := [name for name in ("step", "reset", "check", "describe", "close") if not hasattr(benchmark, name)]:
        found = type(benchmark).__name__
        raise TypeError(f"target {case.target!r} returned {found}, which is no benchmark: it has no {listed(lacks)}")
    if fault is not None and fault.kind != "late" and fault.rank == world.global_rank:
        return Disturbed(benchmark, fault, world.sync_stream)
    return benchmark


def refuse_float8(dtype: str, capability: tuple[int, int]) -> None:
    """Refuse float8 where NCCL would, by ending the launch: below compute capability 9.0."""
    if dtype.startswith("float8") and capability < (9, 0):
        found = ".".join(map(str, capability))
        raise UserError(f"nccl carries {dtype} from compute capability 9.0 on; this GPU's is {found}")


def _refused(refusals: Sequence[str | None], active: Sequence[int]) -> Outcome:
    """Say that all active ranks refuse these parameters or this machine in the same words, or that they disagree."""
    if len({refusals[rank] for rank in active}) == 1:
        reason = str(refusals[active[0]])
        return Outcome(status="skipped", reason=reason, skip_reason=SkipReason.IMPOSSIBLE)
    told = "; ".join(f"rank {rank}: {refusals[rank] or 'ready'}" for rank in active)
    return Outcome(status="failed", reason=f"ranks disagree about whether this can run: {told}")


def _wrong(timing: Timing, when: str, take: Callable[[], object] | None = None) -> Outcome | None:
    """Check the last step, or one taken now; return the outcome of a wrong result, which has no time; None if right."""
    timing.progress.phase = "check"
    if take is not None:
        timing.start_line()
        take()
        timing.world.sync()
    benchmark = timing.benchmark
    found = timing.world.gather(
        (benchmark.check(), benchmark.differences() if isinstance(benchmark, Differing) else ())
    )
    counts = [count for count, _ in found]
    if not any(counts):
        return None
    wrong_by_rank = {rank: count for rank, count in enumerate(counts) if count}
    told = ", ".join(f"{count} on rank {rank}" for rank, count in wrong_by_rank.items())
    named = list(dict.fromkeys(phrase for _, phrases in found for phrase in phrases))
    more = [f"and {len(named) - _MOST_NAMED} more"] if len(named) > _MOST_NAMED else []
    reason = "; ".join([f"results differ from the reference {when}: {told}", *named[:_MOST_NAMED], *more])
    check = Check(passed=False, wrong=sum(counts))
    return Outcome(status="wrong", reason=reason, check=check, wrong_by_rank=wrong_by_rank)


def _seen(right: Outcome, timed: Timed, description: Description, world: World, ranks: list[int]) -> Outcome:
    samples, clock = timed.samples(description.hops), world.clock
    arrivals, exits, durations, issues = timed.stamps
    began = arrivals.min()  # every measured rank's samples are told in ns since then, on rank 0's clock
    arrays: dict[str, Any] = {"ranks": np.array(ranks, dtype=np.int64), "arrival_ns": arrivals - began}
    arrays |= {"exit_ns": exits - began, "duration_ns": durations, "issue_ns": issues}
    arrays |= {"steps_per_sample": np.int64(timed.steps_per_sample), "clock_offsets_ns": np.array(clock.offsets_ns)}
    raw = b""
    if not right.more:
        with io.BytesIO() as file:
            np.savez_compressed(file, **arrays)
            raw = file.getvalue()
    last_in, last_out = ([ranks[place] for place in stamps.argmax(axis=0)] for stamps in (arrivals, exits))
    where = {} if len(ranks) == len(world.hosts) else {"group_size": len(ranks), "group_ranks": ranks}
    counts: dict[str, Any] = {"warmup": timed.warmup, "steps_per_sample": timed.steps_per_sample}
    method, uncertainty_ns = clock.method, clock.uncertainty_ns
    if timed.hidden is not None:
        counts["launch_hidden"] = round(timed.hidden, 4)
        method, uncertainty_ns = f"{method}; a device's events by its host", uncertainty_ns + HOST_NS
    return replace(
        right,
        stop=timed.stop,
        visits=list(timed.visits),
        headline=description.headline,
        **samples,
        arrival=blame(last_in, last_out, samples["skew_seconds"], method, uncertainty_ns / 1e9),
        work=list(description.work),
        details={**description.details, **where, **counts},
        notes=list(description.notes),
        raw=raw,
    )
