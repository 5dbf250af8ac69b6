"""Why the best step is the best, in the numbers of this model on this machine, and what bounds it."""

from itertools import groupby

from parbench.workloads.costs.memory import state_bytes
from parbench.workloads.costs.parameter_table import num_parameters
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.planner.dry_run import DryRun
from parbench.workloads.planner.search import PURPOSES, WITHOUT, Found


def settings_of(spec: StepSpec) -> str:
    """Return what is chosen beside the mesh."""
    found = [f"microbatch {spec.microbatch}", f"checkpointing {spec.checkpointing_label}"]
    if spec.dims.size("dp", "fsdp") > 1:
        found.append(f"ZeRO {spec.zero_stage}")
    if spec.dims.size("cp") > 1:
        found.append(f"cp by {spec.cp_method}")
    if spec.dims.size("pp") > 1:
        found.append(
            spec.pipeline_options.schedule
            + (f" of {spec.stages_per_rank} chunks" if spec.stages_per_rank > 1 else "")
        )
    if spec.pipeline_options.split:
        found.append(f"layers {split_words(spec.pipeline_options.split)}")
    return ", ".join(found)


def split_words(split: str) -> str:
    """Return the layers of each stage, stages that have as many in a row counted: 7+14x8+7."""
    found = []
    for layers, run in groupby(split.split("+")):
        alike = len(list(run))
        found.append(f"{alike}x{layers}" if alike > 1 else layers)
    return "+".join(found)


def chosen_of(run: DryRun) -> str:
    return f"{run.spec.dims.label} with {settings_of(run.spec)}"


def binding_of(run: DryRun) -> str:
    """Return ``compute``, ``memory``, ``bubble``, ``batch`` or ``link`` with the axis, and the share that says so.

    Compute binds where it is 85 % of the step. A bubble is the batch's where a microbatch is one sequence already, so
    that only a larger batch would fill the pipeline. Memory binds where layers are computed again to fit into it.
    """
    losses = {
        f"link {axis.name}": axis.exposed_seconds for axis in run.axes if axis.exposed_seconds
    }
    if run.bubble_seconds:
        losses["batch" if run.spec.microbatch == 1 else "bubble"] = run.bubble_seconds
    if run.spec.checkpointing == "full":
        losses["memory"] = run.compute_seconds / (
            1 + 3 * run.spec.checkpoint_every
        )  # the share that is executed twice
    losses["update"] = run.update_seconds
    worst, lost = max(losses.items(), key=lambda each: each[1])
    if worst != "memory" and run.compute_seconds >= 0.85 * run.seconds:
        worst, lost = "compute", run.compute_seconds
    full = run.fullest.memory.total / run.hardware.usable_bytes
    return f"{worst} ({lost / run.seconds:.0%} of the step{f', memory {full:.0%} full' if full >= 0.9 else ''})"


def _order(spec: StepSpec) -> str:
    return ",".join(name for name in spec.dims.order if spec.dims.size(name) > 1)


def rationale(found: Found) -> list[str]:
    """Return why the best mesh is the best: what fits, each axis in the order of choosing, a simpler mesh, what binds.

    Each sentence has the numbers of this model on this machine.
    """
    best = found.best[0]
    spec, memory, seconds, usable = (
        best.spec,
        best.fullest.memory,
        best.seconds,
        best.hardware.usable_bytes,
    )
    size = spec.dims.size
    lines = [
        f"fit: {state_bytes_of(spec) / 1e9:,.0f} GB of state over pp({size('pp')}) * tp({size('tp')}) * "
        f"fsdp({size('fsdp')}){' and ep(' + str(size('ep')) + ')' if size('ep') > 1 else ''} "
        f"leave {memory.state / 1e9:,.1f} GB; with {memory.activations / 1e9:,.1f} GB of activations "
        f"({settings_of(spec)}) and {memory.buffers / 1e9:,.1f} GB of "
        f"buffers that is {memory.total / usable:.0%} of {usable / 1e9:,.1f} GB usable"
    ]
    axes = {axis.name: axis for axis in best.axes}
    for name in (name for name in PURPOSES if spec.dims.size(name) > 1):
        if name not in axes:
            continue
        cost = f"{axes[name].exposed_seconds / seconds:.1%} of the step is exposed"
        if name == "pp":
            cost = f"its bubble is {best.bubble_seconds / seconds:.1%} of the step"
        other = found.without[name]
        instead = (
            f"without {name} nothing fits, no rule allows it, or it takes {WITHOUT:g} times as long"
        )
        if other is not None:
            instead = f"without it the fastest is {other.spec.dims.label}, {other.seconds / seconds - 1:+.1%}"
        lines.append(
            f"{name}={spec.dims.size(name)} {PURPOSES[name]}, {axes[name].where}: {cost}; {instead}"
        )
    if len(found.orders) > 1:
        others = (found.orders[1], found.orders[-1])
        first, slowest = (f"{_order(run.spec)}, {run.seconds / seconds - 1:+.1%}" for run in others)
        lines.append(f"order {_order(spec)}: another is {first}, the worst {slowest}")
    num_axes = len(spec.dims.label.split(","))
    simpler = next(
        (run for run in found.best if len(run.spec.dims.label.split(",")) < num_axes), None
    )
    if simpler is not None and simpler.seconds <= 1.03 * seconds:
        slower = f"{simpler.seconds / seconds - 1:.1%} slower, less than a prediction can tell"
        lines.append(f"simpler: {simpler.spec.dims.label} has fewer axes and is {slower}")
    lines.append(
        f"bound by {binding_of(best)}: {seconds:.3g} s a step, {best.tokens_per_second:,.0f} tokens/s, MFU "
        f"{best.mfu:.1%}, as predicted under the assumptions below"
    )
    return lines


def state_bytes_of(spec: StepSpec) -> float:
    return state_bytes(num_parameters(spec.shape, spec.moe), spec.widths).state
