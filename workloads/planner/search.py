"""The fastest steps among all candidates, how little memory others need, and why the best is the best. Pure.

Branch and bound: what a block's layers take bounds every pipeline of it from below, that and its bubble every way to
shard it, so that candidates are priced in the order of their bounds until no other could be among those asked for.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count, permutations
from typing import Literal

from parbench.bench.text import UserError
from parbench.workloads.costs.communication_pattern import list_calls
from parbench.workloads.costs.memory import (
    activations_equation,
    buffers_equation,
    rank_memory,
    state_memory,
    updated_elements,
)
from parbench.workloads.costs.step_spec import StageKind, StepSpec, find_broken_pipeline
from parbench.workloads.parallel.dims import ParallelDims
from parbench.workloads.pipeline_parallel.schedule import PassSeconds
from parbench.workloads.pipeline_parallel.schedules import DEFAULT_SCHEDULE, find_schedule
from parbench.workloads.planner.candidates import (
    Wanted,
    blocks,
    dealt_out,
    pipelines,
    place_step,
    shards,
)
from parbench.workloads.planner.dry_run import (
    SHARDING,
    DryRun,
    Work,
    dry_run,
    held_by,
    placed,
    work_of,
)
from parbench.workloads.planner.hardware import Hardware
from parbench.workloads.planner.link_time import Seconds, by_hardware

MOST_GPUS = 1 << 17
FRONT = 1.4
"""How much longer than the fastest a step may take to be shown for the memory that it saves."""
WITHOUT = 4.0  # and to be shown as the fastest without an axis
_TIE = 1.005  # times that agree to three digits
_REORDERED = 3
_Decided = Literal["block", "pipeline", "stage"]
_OPEN = {
    "block": ("dp", "fsdp", "pp", "ep", "etp"),
    "pipeline": ("dp", "fsdp", "ep", "etp"),
    "stage": ("dp", "fsdp"),
}
"""The axes whose size is still to be decided."""
_SMALLER = 0.9  # of the memory of what is faster, to be on the front
# the axes in the order in which one would choose them by hand, and what each is for
PURPOSES = {
    "tp": "splits layers' state, work and activations",
    "pp": "splits layers between stages and sends only activations at the boundaries",
    "fsdp": "shards state and gathers parameters a layer ahead",
    "cp": "splits each sequence, and with it activations",
    "ep": "lets each rank hold some experts only",
    "etp": "splits each expert",
    "dp": "replicates what fits, and sums gradients once a step",
}


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best candidates in order, and what became of the others.

    ``front`` are those that need a tenth less memory than any faster one, the fastest first. ``without`` has,
    for each axis that the best one uses, the fastest candidate that does not. ``tried`` counts candidates that were
    looked at; ``refused`` those that break a rule, by its first word, ``equations`` one of each with its numbers;
    ``too_large`` those that memory stops, of which ``nearest`` lacks least. ``orders`` are the best one's other orders
    of axes, the fastest first.
    """

    best: tuple[DryRun, ...]
    front: tuple[DryRun, ...]
    without: dict[str, DryRun | None]
    tried: int
    refused: dict[str, int]
    equations: dict[str, str]
    too_large: int
    nearest: DryRun | None
    orders: tuple[DryRun, ...] = ()


def search(
    wanted: Wanted, hardware: Hardware, *, top: int = 10, seconds: Seconds | None = None
) -> Found:
    """Return the fastest candidates that their rules and the memory allow; the best ``top`` meshes, each once.

    ``seconds`` tells a call's time where ``hardware`` does not.
    """
    if not 1 <= wanted.gpus <= MOST_GPUS:
        raise UserError(f"--gpus({wanted.gpus}) is not within 1 and {MOST_GPUS}")
    seconds = seconds or by_hardware(hardware)
    kept = _Kept(wanted=wanted, hardware=hardware, seconds=seconds, top=top)
    works: dict[tuple[object, ...], Work] = {}
    number = count()
    heap: list[tuple[float, int, StepSpec, _Decided]] = []

    def push(bound: float, steps: Iterable[StepSpec], decided: _Decided) -> None:
        for step in steps:
            least = max(bound, _least_seconds(wanted, step, works, hardware, seconds))
            if kept.wants(least, step, decided):
                heappush(heap, (least, next(number), step, decided))

    push(0.0, blocks(wanted), "block")
    while heap:
        bound, _, step, decided = heappop(heap)
        if not kept.wants(bound, step, decided):
            continue
        if decided == "block":
            push(bound, pipelines(wanted, step), "pipeline")
        elif decided == "pipeline":
            push(bound, dealt_out(step), "stage")
        else:
            kept.price(bound, step)
    return kept.found()


def _least_seconds(
    wanted: Wanted,
    step: StepSpec,
    works: dict[tuple[object, ...], Work],
    hardware: Hardware,
    seconds: Seconds,
) -> float:
    """Return what a step takes at least: its share of all layers on one stage, and the bubble of a mean stage."""
    ep, etp, pp, cp, tp = (step.dims.size(name) for name in ("ep", "etp", "pp", "cp", "tp"))
    key = (cp, tp, ep, etp, step.cp_method, step.microbatch, step.checkpointing_label)
    if key not in works:
        order = tuple(name for name in step.dims.order if name != "pp")
        dims = ParallelDims(
            fsdp=wanted.gpus // cp // tp, cp=cp, tp=tp, ep=ep, etp=etp, order=(*order, "pp")
        )
        single_stage = replace(place_step(step, dims), microbatches=1)
        works[key] = work_of(single_stage.rank_view(0), hardware, seconds)
    work = works[key]
    if pp == 1:  # a block's microbatches are whatever its pipeline leaves
        return work.microbatch * wanted.global_batch * cp * tp / wanted.gpus / step.microbatch
    chunks, forward, half = step.stages_per_rank, work.forward / pp, work.backward / 2 / pp
    passes = PassSeconds(forward, half, half)
    bubble = (
        find_schedule(step.pipeline_options.schedule)
        .compute_bubble(step.pipeline_size, passes)
        .seconds
    )
    if bubble is None:  # until the last rank's first microbatch has come through the others
        bubble = (pp - 1) * forward / chunks
    return work.microbatch * step.microbatches / pp + bubble


@dataclass(kw_only=True)
class _Kept:
    """What a search has found so far, and whether something could still add to it."""

    wanted: Wanted
    hardware: Hardware
    seconds: Seconds
    top: int
    by_mesh: dict[str, DryRun] = field(default_factory=dict)
    best: list[DryRun] = field(default_factory=list)
    front: list[DryRun] = field(default_factory=list)
    without: dict[str, DryRun] = field(default_factory=dict)
    tried: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    equations: dict[str, str] = field(default_factory=dict)
    too_large: int = 0
    nearest: tuple[float, StepSpec] | None = None
    # the smallest microbatch that is too large, by all that is not the microbatch
    full: dict[tuple[object, ...], int] = field(default_factory=dict)
    states: dict[tuple[object, ...], float] = field(default_factory=dict)
    shardings: dict[tuple[object, ...], float] = field(default_factory=dict)

    def wants(self, bound: float, step: StepSpec, decided: _Decided = "stage") -> bool:
        """Whether a step that takes no less could be among the best, on the front, or the fastest without an axis."""
        if len(self.best) < self.top or bound <= _TIE * self.best[-1].seconds:
            return True
        fastest = self.best[0]
        if bound <= FRONT * fastest.seconds:
            return True
        open_axes = _OPEN[decided]
        lacks = [
            name
            for name, size in fastest.spec.dims.sizes.items()
            if size > 1 and name not in self.without
        ]
        return bound <= WITHOUT * fastest.seconds and any(
            name in open_axes or step.dims.size(name) == 1 for name in lacks
        )

    def price(self, bound: float, stage: StepSpec) -> None:
        """Take the ways to shard a stage's state, of each kind what holds least first, as far as they could matter."""
        key = (stage.dims, stage.pipeline_options, stage.cp_method, stage.checkpointing_label)
        broken_rule = find_broken_pipeline(stage)
        if broken_rule is not None:
            self._refuse(stage, broken_rule)
            return
        first = stage.stage_view(0)
        activations = activations_equation(first).value  # the same however state is sharded
        for sharded, specs in enumerate(shards(self.wanted, stage)):
            for i, spec in enumerate(specs):
                if i == 0 and self._stops(bound, spec, first.kind, activations, (*key, sharded)):
                    break
                self.tried += 1
                least = bound + self._sharding(spec, first.kind)
                if not self.wants(least, spec):
                    continue
                held = held_by(spec)
                largest = max(each.memory.total for each in held)
                if largest > self.hardware.usable_bytes:
                    self.too_large += 1
                elif not self._dominated(least, largest, spec):
                    run = dry_run(spec, self.hardware, seconds=self.seconds, exact=False, held=held)
                    bound = max(bound, run.seconds - run.update_seconds - run.sharding_seconds)
                    self._add(run)

    def _stops(
        self,
        bound: float,
        spec: StepSpec,
        kind: StageKind,
        activations: float,
        key: tuple[object, ...],
    ) -> bool:
        """Whether memory or a rule stops what holds least of its kind, and so all others of it, or it cannot matter."""
        if spec.microbatch >= self.full.get(key, spec.microbatch + 1):
            return True
        needed = activations + self._state(spec, kind)
        fits = needed <= self.hardware.usable_bytes
        if fits and self._dominated(bound, needed, spec):
            return True
        nearer = not fits and (self.nearest is None or needed < self.nearest[0])
        reason = spec.find_broken_rule() if fits or nearer else None
        if fits and reason is None:
            return False
        if reason is not None:
            self._refuse(spec, reason)
            return True
        self.tried += 1
        self.too_large += 1
        self.full[key] = spec.microbatch
        if nearer:
            self.nearest = (max(rank_memory(at).total for at in spec.distinct_views), spec)
        return True

    def _refuse(self, spec: StepSpec, reason: str) -> None:
        rule = re.split(r"\W+", reason.lstrip("("), maxsplit=1)[0]
        self.tried += 1
        self.refused[rule] += 1
        self.equations.setdefault(rule, f"{spec.dims.label}: {reason}")

    def _sharding(self, spec: StepSpec, kind: StageKind) -> float:
        """Return what the first rank's state adds at least: its update, and what hides of no sum or gathering."""
        key = (spec.dims, spec.zero_stage, kind, spec.microbatches)
        if key not in self.shardings:
            at = spec.stage_view(0)
            efficiency = self.hardware.efficiency
            seconds = (
                updated_elements(at)
                * at.spec.widths.updated
                / self.hardware.memory_bytes_per_second
            )
            self.shardings[key] = seconds / efficiency.memory_rate + sum(
                call.times
                * (1 - efficiency.overlap.get(call.axis, 0.0))
                * self.seconds(placed(call, self.hardware, spec))
                for call in list_calls(at)
                if call.axis in SHARDING
            )
        return self.shardings[key]

    def _state(self, spec: StepSpec, kind: StageKind) -> float:
        key = (spec.dims, spec.zero_stage, kind)
        if key not in self.states:
            at = spec.stage_view(0)
            self.states[key] = state_memory(at).state + buffers_equation(at).value
        return self.states[key]

    def _dominated(self, bound: float, largest: float, spec: StepSpec) -> bool:
        """Whether something found is as fast and as small, and this could be no better elsewhere."""
        if len(self.best) < self.top or bound <= _TIE * self.best[-1].seconds:
            return False
        fastest = self.best[0]
        for name, size in fastest.spec.dims.sizes.items():
            other = self.without.get(name)
            if size > 1 and spec.dims.size(name) == 1 and (other is None or bound < other.seconds):
                return False
        return bound > FRONT * fastest.seconds or any(
            run.seconds <= bound and _SMALLER * run.fullest.memory.total <= largest
            for run in self.front
        )

    def _add(self, run: DryRun) -> None:
        for name in PURPOSES:
            if run.spec.dims.size(name) == 1 and (
                name not in self.without or run.seconds < self.without[name].seconds
            ):
                self.without[name] = run
        text = run.spec.dims.label
        near = len(self.best) < self.top or run.seconds <= _TIE * self.best[-1].seconds
        if near and (text not in self.by_mesh or _rank(run) < _rank(self.by_mesh[text])):
            self.by_mesh[text] = run
            self.best = sorted(self.by_mesh.values(), key=_rank)[: self.top]
        if run.seconds <= FRONT * self.best[0].seconds:
            self.front = _front([*self.front, run])

    def found(self) -> Found:
        best = self.best
        orders: tuple[DryRun, ...] = ()
        if best:
            others = [self._ordered(run) for run in best[:_REORDERED]]
            best = sorted([*(runs[0] for runs in others), *best[_REORDERED:]], key=_rank)
            orders = next(runs for runs in others if runs[0] is best[0])
        used = list(best[0].spec.dims.sizes) if best else []
        near = self.nearest[1] if self.nearest and not best else None
        return Found(
            best=tuple(best),
            front=tuple(run for run in self.front if run.seconds <= FRONT * best[0].seconds),
            without={name: self.without.get(name) for name in used},
            tried=self.tried,
            refused=dict(self.refused),
            equations=self.equations,
            too_large=self.too_large,
            nearest=dry_run(near, self.hardware, exact=False) if near else None,
            orders=orders,
        )

    def _ordered(self, run: DryRun) -> tuple[DryRun, ...]:
        """Return a step with its axes in each order, the fastest first, and itself before any that is as fast."""
        spec = run.spec
        dims = spec.dims
        long = [name for name in dims.order if dims.size(name) > 1]
        short = [name for name in dims.order if dims.size(name) == 1]
        runs = [run]
        for order in permutations(long):
            if list(order) != long:
                each = replace(spec, dims=replace(dims, order=(*order, *short)))
                runs.append(
                    dry_run(each, self.hardware, seconds=self.seconds, exact=False, held=run.ranks)
                )
        fastest = min(runs, key=lambda each: each.seconds)
        if run.seconds <= _TIE * fastest.seconds:
            fastest = run
        return (
            fastest,
            *sorted((each for each in runs if each is not fastest), key=lambda each: each.seconds),
        )


def _front(runs: list[DryRun]) -> list[DryRun]:
    """Return those of which each is enough smaller than any that is faster, the fastest first."""
    kept: list[DryRun] = []
    for run in sorted(runs, key=lambda each: (each.seconds, each.fullest.memory.total)):
        if not kept or run.fullest.memory.total < _SMALLER * kept[-1].fullest.memory.total:
            kept.append(run)
    return kept


def _rank(run: DryRun) -> tuple[float | int | bool, ...]:
    """Order by step time to three digits, then by axes, by what is computed again, by schedule and ZeRO, by memory."""
    spec = run.spec
    num_axes = len(spec.dims.sizes)
    again = (spec.checkpointing != "none", spec.forward_passes)
    plain = (
        spec.pipeline_options.split != "",
        spec.pipeline_options.schedule != DEFAULT_SCHEDULE,
        spec.stages_per_rank,
        spec.zero_stage,
    )
    return (float(f"{run.seconds:.3g}"), num_axes, *again, *plain, run.fullest.memory.total)
