"""What keeps a step from being faster: memory, or the largest part that is no arithmetic. Pure."""

from workloads.planner.dry_run import DryRun

FULL = 0.9
_COMPUTE = 0.85


def binding_of(run: DryRun) -> str:
    """Return ``compute``, ``memory``, ``bubble``, ``batch`` or ``link`` with the axis, and the share that says so.

    Compute binds where it is 85 % of the step. A bubble is the batch's where a microbatch is one sequence already, so
    that only a larger batch would fill the pipeline. Memory binds where layers are computed again to fit into it.
    """
    time = run.time
    share = time.compute_seconds / time.seconds
    full = run.fullest.memory.total / run.hardware.usable_bytes
    losses = {f"link {axis.name}": axis.exposed_seconds for axis in time.axes if axis.exposed_seconds}
    if time.bubble_seconds:
        losses["batch" if run.ask.microbatch == 1 else "bubble"] = time.bubble_seconds
    if run.ask.checkpointing == "full":
        losses["memory"] = time.compute_seconds / 4  # a fourth of what is executed is executed twice
    losses["update"] = time.update_seconds
    worst = max(losses, key=lambda name: losses[name])
    if worst != "memory" and share >= _COMPUTE:
        return f"compute ({share:.0%} of the step" + (f", memory {full:.0%} full)" if full >= FULL else ")")
    return f"{worst} ({losses[worst] / time.seconds:.0%} of the step" + (
        f", memory {full:.0%} full)" if full >= FULL else ")"
    )
