"""Why the best mesh is the best, in the order in which one would choose it by hand. Pure.

Fit first; tensor parallel inside the node; then a pipeline or FSDP across nodes; replicas outside; context parallel for
long sequences; expert parallel for experts. Each sentence has the numbers of this model on this machine.
"""

from workloads.planner.dry_run import DryRun
from workloads.planner.placement import place_of
from workloads.planner.rank_memory import total_state_bytes
from workloads.planner.search import Found

_AS_FAST = 1.03
_WHY = {
    "tp": "splits layers' state, work and activations",
    "pp": "splits layers between stages and sends only activations at the boundaries",
    "fsdp": "shards state and gathers parameters a layer ahead",
    "cp": "splits each sequence, and with it activations",
    "ep": "lets each rank hold some experts only",
    "dp": "replicates what fits, and sums gradients once a step",
}


def rationale(found: Found) -> tuple[str, ...]:
    """Return the sentences about the best candidate."""
    best = found.best[0]
    return (
        _fit(best),
        *(
            _axis(best, found, name)
            for name in ("tp", "pp", "fsdp", "cp", "ep", "dp")
            if best.ask.mesh.get(name, 1) > 1
        ),
        *_simpler(best, found),
        _time(best, found),
    )


def _fit(best: DryRun) -> str:
    ask, hardware = best.ask, best.hardware
    state = best.fullest.memory.state
    return (
        f"fit: {total_state_bytes(ask.model, ask.element_bytes) / 1e9:,.0f} GB of state over pp({ask.pp}) * "
        f"tp({ask.tp}) * fsdp({ask.fsdp}){f' and ep({ask.ep})' if ask.ep > 1 else ''} leave {state / 1e9:,.1f} GB; "
        f"with {best.fullest.memory.activations / 1e9:,.1f} GB of activations (microbatch {ask.microbatch}, "
        f"checkpointing {ask.checkpointing}) and {best.fullest.memory.buffers / 1e9:,.1f} GB of buffers that is "
        f"{best.fullest.memory.total / hardware.usable_bytes:.0%} of {hardware.usable_bytes / 1e9:,.1f} GB usable"
    )


def _axis(best: DryRun, found: Found, name: str) -> str:
    size = best.ask.mesh[name]
    place = place_of(best.ask.mesh, (name,), best.hardware.gpus_per_node)
    axis = next((axis for axis in best.time.axes if axis.name == name), None)
    where = axis.where if axis is not None else place.words
    words = f"{name}={size} {_WHY[name]}, {where}"
    if name == "pp":
        words += f": its bubble is {best.time.bubble_seconds / best.time.seconds:.1%} of the step"
    elif axis is not None:
        words += f": {axis.exposed_seconds / best.time.seconds:.1%} of the step is exposed"
    return f"{words}; {_without(best, found, name)}"


def _without(best: DryRun, found: Found, name: str) -> str:
    other = found.without.get(name)
    if other is None:
        return f"without {name} nothing fits or no rule allows it"
    change = other.time.seconds / best.time.seconds - 1
    return f"without it the fastest is {other.ask.mesh_text}, {change:+.1%}"


def _simpler(best: DryRun, found: Found) -> tuple[str, ...]:
    """Name a candidate of fewer axes that is as fast, as far as such a prediction can tell."""
    num_axes = len(best.ask.mesh_text.split(","))
    fewer = [run for run in found.best if len(run.ask.mesh_text.split(",")) < num_axes]
    if not fewer or fewer[0].time.seconds > _AS_FAST * best.time.seconds:
        return ()
    slower = fewer[0].time.seconds / best.time.seconds - 1
    return (
        f"simpler: {fewer[0].ask.mesh_text} has fewer axes and is {slower:.1%} slower, less than a prediction can tell",
    )


def _time(best: DryRun, found: Found) -> str:
    return (
        f"bound by {found.bindings[0]}: {best.time.seconds:.3g} s a step, {best.tokens_per_second:,.0f} tokens/s, "
        f"MFU {best.mfu:.1%}, as predicted under the assumptions above"
    )
