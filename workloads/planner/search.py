"""The fastest steps among all candidates, how little memory others need, and why the best is the best. Pure.

Branch and bound: what a block's layers take bounds every pipeline of it from below, that and its bubble every way to
shard it, so that candidates are priced in the order of their bounds until no other could be among those asked for.
"""

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import chain, count, groupby, permutations

from bench.plan.groups import INSIDE
from bench.text import UserError
from workloads.costs.communication_pattern import calls
from workloads.costs.memory import (
    activations_of,
    buffers_equation,
    memory_of,
    state_bytes,
    state_of,
    updated_elements,
)
from workloads.costs.parameter_table import num_parameters
from workloads.costs.step_spec import Position, StepSpec
from workloads.mesh.axes import multiplied, refuse_heads, refuse_sequence
from workloads.pipeline_parallel.bubbles import closed_form
from workloads.planner.candidates import (
    CP_METHODS,
    SCHEDULES,
    Wanted,
    blocks,
    divisors,
    shards,
    stages,
    tokens_and_heads,
)
from workloads.planner.dry_run import SHARDING, DryRun, Work, dry_run, held_by, placed, work_of
from workloads.planner.hardware import Hardware
from workloads.planner.link_time import Seconds, by_hardware

MOST_GPUS = 1 << 17
FRONT = 1.4
"""How much longer than the fastest a step may take to be shown for the memory that it saves."""
_WITHOUT = 4.0  # and to be shown as the fastest without an axis
_TIE = 1.005  # times that agree to three digits
_REORDERED = 3
_SMALLER = 0.9  # of the memory of what is faster, to be on the front
# the axes in the order in which one would choose them by hand, and what each is for
_WHY = {
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


def search(wanted: Wanted, hardware: Hardware, *, top: int = 10, seconds: Seconds | None = None) -> Found:
    """Return the fastest candidates that their rules and the memory allow; the best ``top`` meshes, each once.

    ``seconds`` tells a call's time where ``hardware`` does not.
    """
    if not 1 <= wanted.gpus <= MOST_GPUS:
        raise UserError(f"--gpus({wanted.gpus}) is not within 1 and {MOST_GPUS}")
    seconds = seconds or by_hardware(hardware)
    kept = _Kept(wanted=wanted, hardware=hardware, seconds=seconds, top=top)
    works: dict[tuple[object, ...], Work] = {}
    number = count()
    heap: list[tuple[float, int, StepSpec, bool]] = []
    for block in blocks(wanted):
        bound = _least_seconds(wanted, block, works, hardware, seconds)
        heappush(heap, (bound, next(number), block, False))
    while heap:
        bound, _, step, whole = heappop(heap)
        if not kept.wants(bound, step, whole=whole):
            continue
        if not whole:
            for stage in stages(wanted, step):
                least = max(bound, _least_seconds(wanted, stage, works, hardware, seconds, dealt=False))
                if kept.wants(least, stage, whole=True):
                    heappush(heap, (least, next(number), stage, True))
        elif heap and (least := _least_seconds(wanted, step, works, hardware, seconds)) > max(bound, heap[0][0]):
            heappush(heap, (least, next(number), step, True))  # what sends tokens to experts comes later than it seemed
        else:
            kept.price(bound, step)
    return kept.found()


def _least_seconds(
    wanted: Wanted,
    step: StepSpec,
    works: dict[tuple[object, ...], Work],
    hardware: Hardware,
    seconds: Seconds,
    *,
    dealt: bool = True,
) -> float:
    """Return what a step takes at least: its share of all layers on one stage, and the bubble of a mean stage.

    ``dealt`` counts what it takes to deal out experts.
    """
    ep, etp, pp = step.size("ep") if dealt else 1, step.size("etp") if dealt else 1, step.size("pp")
    cp, tp = step.size("cp"), step.size("tp")
    key = (cp, tp, ep, etp, step.cp_method, step.microbatch, step.checkpointing_text)
    if key not in works:
        mesh = {"dp": 1, "pp": 1, "fsdp": wanted.gpus // cp // tp, "cp": cp, "tp": tp, "ep": ep, "etp": etp}
        works[key] = work_of(replace(step.on(mesh), microbatches=1, split="", chunks=0).at(0), hardware, seconds)
    work = works[key]
    if pp == 1:  # a block's microbatches are whatever its pipeline leaves
        return work.microbatch * wanted.global_batch * cp * tp / wanted.gpus / step.microbatch
    half = work.backward / 2 / pp
    form = closed_form(
        step.schedule,
        ranks=pp,
        microbatches=step.microbatches,
        chunks=step.stages_per_rank,
        f=work.forward / pp,
        i=half,
        w=half,
    )
    return work.microbatch * step.microbatches / pp + (form.makespan_bubble_seconds or 0.0)


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

    def wants(self, bound: float, step: StepSpec, *, whole: bool) -> bool:
        """Whether a step that takes no less could be among the best, on the front, or the fastest without an axis.

        One that is not ``whole`` has neither pipeline nor experts dealt out yet.
        """
        if len(self.best) < self.top or bound <= _TIE * self.best[-1].seconds:
            return True
        fastest = self.best[0]
        if bound <= FRONT * fastest.seconds:
            return True
        open_axes = ("dp", "fsdp") if whole else ("dp", "fsdp", "pp", "ep", "etp")
        lacks = [name for name, size in fastest.spec.mesh.items() if size > 1 and name not in self.without]
        return bound <= _WITHOUT * fastest.seconds and any(name in open_axes or step.size(name) == 1 for name in lacks)

    def price(self, bound: float, stage: StepSpec) -> None:
        """Take the ways to shard a stage's state, of each kind what holds least first, as far as they could matter."""
        key = (*stage.mesh.items(), stage.schedule, stage.chunks, stage.split, stage.cp_method)
        key += (stage.checkpointing_text,)
        if stage.shape.layers < stage.size("pp") * stage.stages_per_rank:
            self._refuse(stage, stage.refusal() or "")
            return
        activations = activations_of(stage.at_stage(0))  # whatever shards state
        for sharded, specs in enumerate(shards(self.wanted, stage)):
            for i, spec in enumerate(specs):
                if i == 0 and self._stops(bound, spec, activations, (*key, sharded)):
                    break
                self.tried += 1
                least = bound + self._sharding(spec)
                if not self.wants(least, spec, whole=True):
                    continue
                held = held_by(spec)
                largest = max(each.memory.total for each in held)
                if largest > self.hardware.usable_bytes:
                    self.too_large += 1
                elif not self._dominated(least, largest, spec):
                    run = dry_run(spec, self.hardware, seconds=self.seconds, exact=False, held=held)
                    bound = max(bound, run.seconds - run.update_seconds - run.sharding_seconds)
                    self._add(run)

    def _stops(self, bound: float, spec: StepSpec, activations: float, key: tuple[object, ...]) -> bool:
        """Whether memory or a rule stops what holds least of its kind, and so all others of it, or it cannot matter."""
        if spec.microbatch >= self.full.get(key, spec.microbatch + 1):
            return True
        needed = activations + self._state(spec.at_stage(0))
        fits = needed <= self.hardware.usable_bytes
        if fits and self._dominated(bound, needed, spec):
            return True
        nearer = not fits and (self.nearest is None or needed < self.nearest[0])
        reason = spec.refusal() if fits or nearer else None
        if fits and reason is None:
            return False
        if reason is not None:
            self._refuse(spec, reason)
            return True
        self.tried += 1
        self.too_large += 1
        self.full[key] = spec.microbatch
        if nearer:
            self.nearest = (max(memory_of(at).total for at in spec.positions), spec)
        return True

    def _refuse(self, spec: StepSpec, reason: str) -> None:
        rule = re.split(r"\W+", reason.lstrip("("), maxsplit=1)[0]
        self.tried += 1
        self.refused[rule] += 1
        self.equations.setdefault(rule, f"{spec.mesh_text}: {reason}")

    def _sharding(self, spec: StepSpec) -> float:
        """Return what the first rank's state adds at least: its update, and what hides of no sum or gathering."""
        at = spec.at_stage(0)
        key = (*spec.mesh.items(), spec.zero, at.kind, spec.microbatches)
        if key not in self.shardings:
            efficiency = self.hardware.efficiency
            seconds = updated_elements(at) * at.spec.widths.updated / self.hardware.memory_bytes_per_second
            self.shardings[key] = seconds / efficiency.memory_rate + sum(
                call.times
                * (1 - efficiency.overlap.get(call.axis, 0.0))
                * self.seconds(placed(call, self.hardware, spec))
                for call in calls(at)
                if call.axis in SHARDING
            )
        return self.shardings[key]

    def _state(self, at: Position) -> float:
        key = (*at.spec.mesh.items(), at.spec.zero, at.kind)
        if key not in self.states:
            self.states[key] = state_of(at).state + buffers_equation(at).value
        return self.states[key]

    def _dominated(self, bound: float, largest: float, spec: StepSpec) -> bool:
        """Whether something found is as fast and as small, and this could be no better elsewhere."""
        if len(self.best) < self.top or bound <= _TIE * self.best[-1].seconds:
            return False
        fastest = self.best[0]
        for name, size in fastest.spec.mesh.items():
            other = self.without.get(name)
            if size > 1 and spec.size(name) == 1 and (other is None or bound < other.seconds):
                return False
        return bound > FRONT * fastest.seconds or any(
            run.seconds <= bound and _SMALLER * run.fullest.memory.total <= largest for run in self.front
        )

    def _add(self, run: DryRun) -> None:
        for name in _WHY:
            if run.spec.size(name) == 1 and (name not in self.without or run.seconds < self.without[name].seconds):
                self.without[name] = run
        text = run.spec.mesh_text
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
        used = [name for name, size in best[0].spec.mesh.items() if size > 1] if best else []
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
        inside = {name: spec.mesh[name] for name in spec.mesh if name in INSIDE}
        long = [name for name, size in multiplied(spec.mesh).items() if size > 1]
        runs = [run]
        for order in permutations(long):
            if list(order) != long:
                mesh = {**{name: spec.mesh[name] for name in order}, **inside}
                each = replace(spec, mesh=mesh)
                runs.append(dry_run(each, self.hardware, seconds=self.seconds, exact=False, held=run.ranks))
        fastest = min(runs, key=lambda each: each.seconds)
        if run.seconds <= _TIE * fastest.seconds:
            fastest = run
        return (fastest, *sorted((each for each in runs if each is not fastest), key=lambda each: each.seconds))


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
    num_axes = sum(size > 1 for size in spec.mesh.values())
    again = (spec.checkpointing != "none", spec.forwards)
    plain = (spec.split != "", spec.schedule != "1f1b", spec.stages_per_rank, spec.zero)
    return (float(f"{run.seconds:.3g}"), num_axes, *again, *plain, run.fullest.memory.total)


def require_found(wanted: Wanted, hardware: Hardware, found: Found) -> None:
    """Refuse a search that found nothing: what memory or which rule stops, and the fewest GPUs that would do."""
    if found.best:
        return
    model = wanted.step.name
    lack = f"{model} on {wanted.gpus} GPUs at global batch {wanted.global_batch}: "
    if found.nearest is not None:
        least = found.nearest.fullest.memory.total / 1e9
        lack = (
            f"{model} needs {_state(wanted, hardware)} ({hardware.usable_bytes / 1e9:,.1f} GB usable)"
            f": {least:,.1f} GB a GPU even as {_chosen(found.nearest)}"
        )
    elif found.equations:
        lack += f"every mesh breaks a rule, such as {', '.join(found.equations.values())}"
    else:
        others = (wanted.gpus // tp // cp for tp, cp, _ in tokens_and_heads(wanted))
        fewest = min(ranks // max(pp for pp in divisors(ranks) if pp <= wanted.step.shape.layers) for ranks in others)
        data = f"dp({fewest}) * fsdp(1) * microbatch({wanted.microbatch or 1})"
        lack += f"global batch({wanted.global_batch}) % ({data}) != 0 even with the fewest data ranks"
    raise UserError(f"{lack}; {smallest_words(wanted, hardware)}")


def lack_of(run: DryRun) -> str:
    """Return what a dry run that does not fit lacks, and the fewest GPUs that would do at its global batch."""
    spec = run.spec
    wanted = Wanted(
        step=replace(spec, split=""),
        gpus=spec.world,
        global_batch=spec.global_batch,
        schedule=spec.schedule if spec.size("pp") > 1 else "",
        cp_method=spec.cp_method,
    )
    return f"{run.missing}; it has {_state(wanted, run.hardware)}; {smallest_words(wanted, run.hardware)}"


def smallest_words(wanted: Wanted, hardware: Hardware) -> str:
    best = smallest_feasible(wanted, hardware)
    if best is None:
        return f"no number of GPUs up to {MOST_GPUS} fits it at global batch {wanted.global_batch}"
    return f"smallest feasible: {best.spec.world} GPUs as {_chosen(best)}"


def smallest_feasible(wanted: Wanted, hardware: Hardware) -> DryRun | None:
    """Return the fastest step on the fewest GPUs that carry the model at its global batch; None where none do.

    Numbers of GPUs are products of sizes that the axes can have one by one, whose memory holds the state at least once.
    """
    step, shape = wanted.step, wanted.step.shape
    method = wanted.cp_method or CP_METHODS[0]
    tensor = [
        size for size in divisors(shape.heads) if not refuse_heads(shape, {"tp": size}, experts=step.moe is not None)
    ]
    context = [size for size in divisors(shape.sequence) if not refuse_sequence(shape, {"cp": size}, cp_method=method)]
    sizes = {1}
    for axis in (tensor, range(1, shape.layers + 1), divisors(wanted.global_batch), context):
        sizes = {one * size for one in sizes for size in axis if one * size <= MOST_GPUS}
    least = _state_bytes(step) / hardware.usable_bytes
    for gpus in sorted(size for size in sizes if least <= size):
        asked = replace(wanted, gpus=gpus)
        if _could_fit(asked, hardware) and (best := search(asked, hardware, top=1).best):
            return best[0]
    return None


def _could_fit(wanted: Wanted, hardware: Hardware) -> bool:
    """Whether the first of a pipeline's ranks holds its part somewhere; the smallest microbatch holds least."""
    least = replace(wanted, microbatch=wanted.microbatch or 1, schedule=wanted.schedule or SCHEDULES[0][0])
    return any(
        not spec.refusal() and memory_of(spec.at_stage(0)).total <= hardware.usable_bytes
        for block in blocks(least)
        for stage in stages(least, block)
        for spec in chain(*shards(least, stage))
        if spec.zero < 2 or spec.size("dp") == 1
    )


def _state(wanted: Wanted, hardware: Hardware) -> str:
    state = _state_bytes(wanted.step) / 1e9
    return f"{state:,.0f} GB of state over {wanted.gpus} x {hardware.memory_bytes / 1e9:,.0f} GB"


def _state_bytes(spec: StepSpec) -> float:
    return state_bytes(num_parameters(spec.shape, spec.moe), spec.widths).state


def settings_of(spec: StepSpec) -> str:
    """Return what is chosen beside the mesh."""
    found = [f"microbatch {spec.microbatch}", f"checkpointing {spec.checkpointing_text}"]
    if spec.size("dp", "fsdp") > 1:
        found.append(f"ZeRO {spec.zero}")
    if spec.size("cp") > 1:
        found.append(f"cp by {spec.cp_method}")
    if spec.size("pp") > 1:
        found.append(spec.schedule + (f" of {spec.stages_per_rank} chunks" if spec.stages_per_rank > 1 else ""))
    if spec.split:
        found.append(f"layers {split_words(spec.split)}")
    return ", ".join(found)


def split_words(split: str) -> str:
    """Return the layers of each stage, stages that have as many in a row counted: 7+14x8+7."""
    found = []
    for layers, run in groupby(split.split("+")):
        alike = len(list(run))
        found.append(f"{alike}x{layers}" if alike > 1 else layers)
    return "+".join(found)


def _chosen(run: DryRun) -> str:
    return f"{run.spec.mesh_text} with {settings_of(run.spec)}"


def binding_of(run: DryRun) -> str:
    """Return ``compute``, ``memory``, ``bubble``, ``batch`` or ``link`` with the axis, and the share that says so.

    Compute binds where it is 85 % of the step. A bubble is the batch's where a microbatch is one sequence already, so
    that only a larger batch would fill the pipeline. Memory binds where layers are computed again to fit into it.
    """
    losses = {f"link {axis.name}": axis.exposed_seconds for axis in run.axes if axis.exposed_seconds}
    if run.bubble_seconds:
        losses["batch" if run.spec.microbatch == 1 else "bubble"] = run.bubble_seconds
    if run.spec.checkpointing == "full":
        losses["memory"] = run.compute_seconds / (1 + 3 * run.spec.every)  # the share that is executed twice
    losses["update"] = run.update_seconds
    worst, lost = max(losses.items(), key=lambda each: each[1])
    if worst != "memory" and run.compute_seconds >= 0.85 * run.seconds:
        worst, lost = "compute", run.compute_seconds
    full = run.fullest.memory.total / run.hardware.usable_bytes
    return f"{worst} ({lost / run.seconds:.0%} of the step{f', memory {full:.0%} full' if full >= 0.9 else ''})"


def _order(spec: StepSpec) -> str:
    return ",".join(name for name, size in multiplied(spec.mesh).items() if size > 1)


def _order_words(run: DryRun, seconds: float) -> str:
    return f"{_order(run.spec)}, {run.seconds / seconds - 1:+.1%}"


def rationale(found: Found) -> list[str]:
    """Return why the best mesh is the best: what fits, each axis in the order of choosing, a simpler mesh, what binds.

    Each sentence has the numbers of this model on this machine.
    """
    best = found.best[0]
    spec, memory, seconds, usable = best.spec, best.fullest.memory, best.seconds, best.hardware.usable_bytes
    size = spec.size
    lines = [
        f"fit: {_state_bytes(spec) / 1e9:,.0f} GB of state over pp({size('pp')}) * tp({size('tp')}) * "
        f"fsdp({size('fsdp')}){' and ep(' + str(size('ep')) + ')' if size('ep') > 1 else ''} "
        f"leave {memory.state / 1e9:,.1f} GB; with {memory.activations / 1e9:,.1f} GB of activations "
        f"({settings_of(spec)}) and {memory.buffers / 1e9:,.1f} GB of "
        f"buffers that is {memory.total / usable:.0%} of {usable / 1e9:,.1f} GB usable"
    ]
    axes = {axis.name: axis for axis in best.axes}
    for name in (name for name in _WHY if spec.mesh.get(name, 1) > 1):
        if name not in axes:
            continue
        cost = f"{axes[name].exposed_seconds / seconds:.1%} of the step is exposed"
        if name == "pp":
            cost = f"its bubble is {best.bubble_seconds / seconds:.1%} of the step"
        other = found.without[name]
        instead = f"without {name} nothing fits, no rule allows it, or it takes {_WITHOUT:g} times as long"
        if other is not None:
            instead = f"without it the fastest is {other.spec.mesh_text}, {other.seconds / seconds - 1:+.1%}"
        lines.append(f"{name}={spec.mesh[name]} {_WHY[name]}, {axes[name].where}: {cost}; {instead}")
    if len(found.orders) > 1:
        first, slowest = (_order_words(run, seconds) for run in (found.orders[1], found.orders[-1]))
        lines.append(f"order {_order(spec)}: another is {first}, the worst {slowest}")
    num_axes = len(spec.mesh_text.split(","))
    simpler = next((run for run in found.best if len(run.spec.mesh_text.split(",")) < num_axes), None)
    if simpler is not None and simpler.seconds <= 1.03 * seconds:
        slower = f"{simpler.seconds / seconds - 1:.1%} slower, less than a prediction can tell"
        lines.append(f"simpler: {simpler.spec.mesh_text} has fewer axes and is {slower}")
    lines.append(
        f"bound by {binding_of(best)}: {seconds:.3g} s a step, {best.tokens_per_second:,.0f} tokens/s, MFU "
        f"{best.mfu:.1%}, as predicted under the assumptions below"
    )
    return lines
