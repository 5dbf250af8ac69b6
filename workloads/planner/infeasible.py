"""The reason why no step fits, and the fewest GPUs on which one does. Pure."""

from dataclasses import replace

from parbench.bench.text import UserError, pluralize
from parbench.workloads.planner.candidates import SearchRequest
from parbench.workloads.planner.describe import compute_state_bytes, describe_step
from parbench.workloads.planner.dry_run import GIGA, DryRun, dry_run
from parbench.workloads.planner.hardware import Hardware
from parbench.workloads.planner.search import MAX_GPUS, SearchResult, search


def require_candidates(request: SearchRequest, hardware: Hardware, result: SearchResult) -> None:
    """Raise ``UserError`` with the reason if no step of a search fits in memory.

    The message also has the fewest GPUs, in powers of two, on which a step fits.
    """
    if result.runs:
        return
    step, gpus = request.step, pluralize(request.gpus, "GPU")
    if result.smallest is not None:
        peak, spec = result.smallest
        problem = (
            f"{step.name} does not fit on {gpus} of {hardware.memory_bytes / GIGA:,.0f} GB: the "
            f"smallest step ({describe_step(spec)}) needs {peak / GIGA:,.1f} GB per GPU, and "
            f"{hardware.usable_bytes / GIGA:,.1f} GB are usable"
        )
    elif result.broken_rules:
        rule, mesh = next(iter(result.broken_rules.items()))
        problem = f"every mesh of {gpus} breaks a rule, such as {mesh}: {rule}"
    else:
        problem = (
            f"no mesh of {gpus} allows global batch {request.global_batch} of {step.name}: it must "
            "be a multiple of the data-parallel ranks times the microbatch, with at least one "
            "microbatch per pipeline rank. Set a multiple, such as --global-batch "
            f"{request.gpus * (request.microbatch or 1)}"
        )
    raise UserError(f"{problem}. {describe_fewest_gpus(request, hardware)}")


def explain_too_large(run: DryRun) -> str:
    """Return the message for a step that does not fit, with the needed and the usable memory.

    It has the stage of ZeRO with which the step fits, if there is one.
    """
    spec, hardware, memory = run.spec, run.hardware, run.fullest.memory
    sharded = replace(spec, zero1="" if spec.dims.is_sharded else "distributed", reshard=True)
    hint = "Find steps that fit: parbench plan search"
    if dry_run(sharded, hardware, exact=False).fits:
        hint = f"It fits with --set zero={sharded.zero_stage}"
    return (
        f"{spec.name} with {spec.dims.label} needs {memory.total / GIGA:,.1f} GB on "
        f"{run.fullest.view.label} ({memory.state / GIGA:,.1f} GB of state, "
        f"{memory.activations / GIGA:,.1f} GB of activations, {memory.buffers / GIGA:,.1f} GB of "
        f"buffers), and {hardware.usable_bytes / GIGA:,.1f} of {hardware.memory_bytes / GIGA:,.0f} "
        f"GB are usable. {hint}"
    )


def describe_fewest_gpus(request: SearchRequest, hardware: Hardware) -> str:
    """Return a sentence with the fewest GPUs on which a step of the request fits in memory.

    Only powers of two up to ``MAX_GPUS`` are tried. The sentence has the best mesh on these GPUs,
    or says that no step fits on ``MAX_GPUS``.
    """
    gpus = 1
    while gpus <= MAX_GPUS:
        # Fewer GPUs do not even hold the state once.
        if compute_state_bytes(request.step) <= gpus * hardware.usable_bytes:
            result = search(replace(request, gpus=gpus), hardware)
            if result.runs:
                step = describe_step(result.best.spec)
                return f"The fewest GPUs that fit, in powers of two, are {gpus}: {step}"
        gpus *= 2
    return (
        f"On no power of two up to {MAX_GPUS:,} GPUs does a step with global batch "
        f"{request.global_batch} fit in memory"
    )
