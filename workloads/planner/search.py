"""Every mesh that could carry a step by predicted time: what stops some of them, and why the best is the best. Pure.

At a fixed global batch the axes leave each data rank a number of microbatches; sizes are the divisors of the world, in
the order dp, pp, fsdp, cp, tp, outermost first, so that what talks most talks inside a node.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from bench.text import UserError
from workloads.costs.memory import memory_of, state_bytes
from workloads.costs.parameter_table import num_parameters
from workloads.costs.step_spec import StepSpec
from workloads.mesh.axes import refuse_experts, refuse_heads, refuse_sequence
from workloads.model.shapes import CHECKPOINTINGS, Checkpointing
from workloads.planner.dry_run import DryRun, dry_run
from workloads.planner.hardware import Hardware
from workloads.planner.link_time import Seconds

ORDER = ("dp", "pp", "fsdp", "cp", "tp")
MOST_GPUS = 1 << 17
_MICROBATCHES = (1, 2, 4, 8)
# the axes in the order in which one would choose them by hand, and what each is for
_WHY = {
    "tp": "splits layers' state, work and activations",
    "pp": "splits layers between stages and sends only activations at the boundaries",
    "fsdp": "shards state and gathers parameters a layer ahead",
    "cp": "splits each sequence, and with it activations",
    "ep": "lets each rank hold some experts only",
    "dp": "replicates what fits, and sums gradients once a step",
}


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is searched for: a step but for its mesh and batch, on how many GPUs, and the sequences of all together.

    ``microbatch`` 0 and ``checkpointing`` None try all.
    """

    step: StepSpec
    gpus: int
    global_batch: int
    microbatch: int = 0
    checkpointing: Checkpointing | None = None


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best candidates in order, and what became of the others.

    ``without`` has, for each axis that the best one uses, the fastest candidate that does not. ``tried`` counts meshes
    with a microbatch and as much checkpointing as they need; ``refused`` those that break a rule, by its first word,
    ``equations`` one of each with its numbers; ``too_large`` those that memory stops, of which ``nearest`` lacks least.
    """

    best: tuple[DryRun, ...]
    without: dict[str, DryRun | None]
    tried: int
    refused: dict[str, int]
    equations: dict[str, str]
    too_large: int
    nearest: DryRun | None


def search(wanted: Wanted, hardware: Hardware, *, top: int = 10, seconds: Seconds | None = None) -> Found:
    """Return the fastest candidates that their rules and the memory allow; the best ``top`` meshes, each once.

    ``seconds`` tells a call's time where ``hardware`` does not.
    """
    if not 1 <= wanted.gpus <= MOST_GPUS:
        raise UserError(f"--gpus({wanted.gpus}) is not within 1 and {MOST_GPUS}")
    refused: Counter[str] = Counter()
    equations: dict[str, str] = {}
    fitting: list[DryRun] = []
    nearest: tuple[float, StepSpec] | None = None
    tried = too_large = 0
    for spec in candidates(wanted):
        last = fitting[-1].spec if fitting else None
        if last is not None and spec.mesh is last.mesh and spec.microbatch == last.microbatch:
            continue  # which fits already with less that is computed again
        tried += 1
        reason = spec.refusal()
        if reason is not None:
            rule = re.split(r"\W+", reason.lstrip("("), maxsplit=1)[0]
            refused[rule] += 1
            equations.setdefault(rule, f"{spec.mesh_text}: {reason}")
            continue
        needed = max(memory_of(at).total for at in spec.positions)
        if needed > hardware.usable_bytes:
            too_large += 1
            if nearest is None or needed < nearest[0]:
                nearest = (needed, spec)
            continue
        fitting.append(dry_run(spec, hardware, seconds=seconds, exact=False))
    fitting.sort(key=_rank)
    fastest: dict[str, DryRun] = {}
    for run in fitting:
        fastest.setdefault(run.spec.mesh_text, run)
    best = tuple(fastest.values())[:top]
    used = [name for name, size in best[0].spec.mesh.items() if size > 1] if best else []
    return Found(
        best=best,
        without={name: next((run for run in fitting if run.spec.mesh.get(name, 1) == 1), None) for name in used},
        tried=tried,
        refused=dict(refused),
        equations=equations,
        too_large=too_large,
        nearest=dry_run(nearest[1], hardware, exact=False) if nearest else None,
    )


def _rank(run: DryRun) -> tuple[float, int, int, float]:
    """Order by step time to three digits, then by axes, then by what is computed again, then by memory."""
    num_axes = sum(size > 1 for size in run.spec.mesh.values())
    again = CHECKPOINTINGS.index(run.spec.checkpointing)
    return float(f"{run.seconds:.3g}"), num_axes, again, run.fullest.memory.total


def candidates(wanted: Wanted) -> Iterator[StepSpec]:
    """Yield every mesh with every microbatch and checkpointing that makes the global batch; rules are yet to be asked.

    What the model's own sizes forbid whatever else is chosen is left out at once: heads over tp, tokens over cp.
    """
    microbatches = (wanted.microbatch,) if wanted.microbatch else _MICROBATCHES
    hows = CHECKPOINTINGS if wanted.checkpointing is None else (wanted.checkpointing,)
    for mesh, microbatch in product(meshes(wanted), microbatches):
        count, rest = divmod(wanted.global_batch, mesh["dp"] * mesh["fsdp"] * microbatch)
        for how in hows if not rest else ():
            step = wanted.step.on(mesh)
            yield replace(step, microbatch=microbatch, microbatches=count, checkpointing=how)


def meshes(wanted: Wanted) -> Iterator[dict[str, int]]:
    """Yield the meshes whose product is the GPUs, with every ``ep`` that divides the experts."""
    shape, moe = wanted.step.shape, wanted.step.moe
    experts = moe.experts if moe else 0
    for tp in divisors(wanted.gpus):
        if refuse_heads(shape, {"tp": tp}, experts=experts > 0):
            continue
        for cp in divisors(wanted.gpus // tp):
            if refuse_sequence(shape, {"cp": cp, "tp": tp}, cp_method=wanted.step.cp_method):
                continue
            for pp in divisors(math.gcd(wanted.gpus // tp // cp, shape.layers)):
                data = wanted.gpus // tp // cp // pp
                for fsdp in divisors(data):
                    mesh = {"dp": data // fsdp, "pp": pp, "fsdp": fsdp, "cp": cp, "tp": tp}
                    dealt = [{**mesh, "ep": ep} for ep in divisors(experts)] if experts else [mesh]
                    yield from (each for each in dealt if not refuse_experts(each, experts))


def divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


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
        mesh = min(meshes(wanted), key=lambda mesh: mesh["dp"] * mesh["fsdp"])
        data = f"dp({mesh['dp']}) * fsdp({mesh['fsdp']}) * microbatch({wanted.microbatch or 1})"
        lack += f"global batch({wanted.global_batch}) % ({data}) != 0 even with the fewest data ranks"
    raise UserError(f"{lack}; {smallest_words(wanted, hardware)}")


def lack_of(run: DryRun) -> str:
    """Return what a dry run that does not fit lacks, and the fewest GPUs that would do at its global batch."""
    wanted = Wanted(step=replace(run.spec, split=""), gpus=run.spec.world, global_batch=run.spec.global_batch)
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
    tensor = [
        size for size in divisors(shape.heads) if not refuse_heads(shape, {"tp": size}, experts=step.moe is not None)
    ]
    context = [
        size for size in divisors(shape.sequence) if not refuse_sequence(shape, {"cp": size}, cp_method=step.cp_method)
    ]
    sizes = {1}
    for axis in (tensor, divisors(shape.layers), divisors(wanted.global_batch), context):
        sizes = {one * size for one in sizes for size in axis}
    least = _state_bytes(step) / hardware.usable_bytes
    for gpus in sorted(size for size in sizes if least <= size <= MOST_GPUS):
        if best := search(replace(wanted, gpus=gpus), hardware, top=1).best:
            return best[0]
    return None


def _state(wanted: Wanted, hardware: Hardware) -> str:
    state = _state_bytes(wanted.step) / 1e9
    return f"{state:,.0f} GB of state over {wanted.gpus} x {hardware.memory_bytes / 1e9:,.0f} GB"


def _state_bytes(spec: StepSpec) -> float:
    return state_bytes(num_parameters(spec.shape, spec.moe), mixed=spec.mixed).state


def _chosen(run: DryRun) -> str:
    return f"{run.spec.mesh_text} with microbatch {run.spec.microbatch} and checkpointing {run.spec.checkpointing}"


def binding_of(run: DryRun) -> str:
    """Return ``compute``, ``memory``, ``bubble``, ``batch`` or ``link`` with the axis, and the share that says so.

    Compute binds where it is 85 % of the step. A bubble is the batch's where a microbatch is one sequence already, so
    that only a larger batch would fill the pipeline. Memory binds where layers are computed again to fit into it.
    """
    losses = {f"link {axis.name}": axis.exposed_seconds for axis in run.axes if axis.exposed_seconds}
    if run.bubble_seconds:
        losses["batch" if run.spec.microbatch == 1 else "bubble"] = run.bubble_seconds
    if run.spec.checkpointing == "full":
        losses["memory"] = run.compute_seconds / 4  # a fourth of what is executed is executed twice
    losses["update"] = run.update_seconds
    worst, lost = max(losses.items(), key=lambda each: each[1])
    if worst != "memory" and run.compute_seconds >= 0.85 * run.seconds:
        worst, lost = "compute", run.compute_seconds
    full = run.fullest.memory.total / run.hardware.usable_bytes
    return f"{worst} ({lost / run.seconds:.0%} of the step{f', memory {full:.0%} full' if full >= 0.9 else ''})"


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
        f"(microbatch {spec.microbatch}, checkpointing {spec.checkpointing}) and {memory.buffers / 1e9:,.1f} GB of "
        f"buffers that is {memory.total / usable:.0%} of {usable / 1e9:,.1f} GB usable"
    ]
    axes = {axis.name: axis for axis in best.axes}
    for name in (name for name in _WHY if spec.mesh.get(name, 1) > 1):
        cost = f"{axes[name].exposed_seconds / seconds:.1%} of the step is exposed"
        if name == "pp":
            cost = f"its bubble is {best.bubble_seconds / seconds:.1%} of the step"
        other = found.without[name]
        instead = f"without {name} nothing fits or no rule allows it"
        if other is not None:
            instead = f"without it the fastest is {other.spec.mesh_text}, {other.seconds / seconds - 1:+.1%}"
        lines.append(f"{name}={spec.mesh[name]} {_WHY[name]}, {axes[name].where}: {cost}; {instead}")
    num_axes = len(spec.mesh_text.split(","))
    simpler = next((run for run in found.best if len(run.spec.mesh_text.split(",")) < num_axes), None)
    if simpler is not None and simpler.seconds <= 1.03 * seconds:
        slower = f"{simpler.seconds / seconds - 1:.1%} slower, less than a prediction can tell"
        lines.append(f"simpler: {simpler.spec.mesh_text} has fewer axes and is {slower}")
    lines.append(
        f"bound by {binding_of(best)}: {seconds:.3g} s a step, {best.tokens_per_second:,.0f} tokens/s, MFU "
        f"{best.mfu:.1%}, as predicted under the assumptions above"
    )
    return lines
