"""What is lacking where no step fits or follows its rules, and the fewest GPUs that would do."""

from dataclasses import replace

from parbench.bench.text import UserError
from parbench.workloads.costs.divisibility import (
    find_indivisible_heads,
    find_indivisible_sequence,
)
from parbench.workloads.costs.memory import rank_memory
from parbench.workloads.parallel.dims import ParallelDims
from parbench.workloads.planner.candidates import (
    CP_METHODS,
    SCHEDULES,
    Wanted,
    candidates,
    divisors,
    tokens_and_heads,
)
from parbench.workloads.planner.dry_run import DryRun
from parbench.workloads.planner.hardware import Hardware
from parbench.workloads.planner.rationale import chosen_of, state_bytes_of
from parbench.workloads.planner.search import MOST_GPUS, Found, search


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
            f": {least:,.1f} GB a GPU even as {chosen_of(found.nearest)}"
        )
    elif found.equations:
        lack += f"every mesh breaks a rule, such as {', '.join(found.equations.values())}"
    else:
        others = (wanted.gpus // tp // cp for tp, cp, _ in tokens_and_heads(wanted))
        fewest = min(
            ranks // max(pp for pp in divisors(ranks) if pp <= wanted.step.shape.layers)
            for ranks in others
        )
        data = f"dp({fewest}) * fsdp(1) * microbatch({wanted.microbatch or 1})"
        lack += (
            f"global batch({wanted.global_batch}) % ({data}) != 0 even with the fewest data ranks"
        )
    raise UserError(f"{lack}; {smallest_words(wanted, hardware)}")


def lack_of(run: DryRun) -> str:
    """Return what a dry run that does not fit lacks, and the fewest GPUs that would do at its global batch."""
    spec = run.spec
    wanted = Wanted(
        step=spec.with_pipeline(split=""),
        gpus=spec.ranks,
        global_batch=spec.global_batch,
        schedule=spec.pipeline_options.schedule if spec.dims.size("pp") > 1 else "",
        cp_method=spec.cp_method,
    )
    return f"{run.missing}; it has {_state(wanted, run.hardware)}; {smallest_words(wanted, run.hardware)}"


def smallest_words(wanted: Wanted, hardware: Hardware) -> str:
    best = smallest_feasible(wanted, hardware)
    if best is None:
        return f"no number of GPUs up to {MOST_GPUS} fits it at global batch {wanted.global_batch}"
    return f"smallest feasible: {best.spec.ranks} GPUs as {chosen_of(best)}"


def smallest_feasible(wanted: Wanted, hardware: Hardware) -> DryRun | None:
    """Return the fastest step on the fewest GPUs that carry the model at its global batch; None where none do.

    Numbers of GPUs are products of sizes that the axes can have one by one, whose memory holds the state at least once.
    """
    step, shape = wanted.step, wanted.step.shape
    method = wanted.cp_method or CP_METHODS[0]
    tensor = [
        size
        for size in divisors(shape.heads)
        if not find_indivisible_heads(shape, size, has_experts=step.moe is not None)
    ]
    context = [
        size
        for size in divisors(shape.sequence)
        if not find_indivisible_sequence(shape, ParallelDims(cp=size), method)
    ]
    sizes = {1}
    for axis in (tensor, range(1, shape.layers + 1), divisors(wanted.global_batch), context):
        sizes = {one * size for one in sizes for size in axis if one * size <= MOST_GPUS}
    least = state_bytes_of(step) / hardware.usable_bytes
    for gpus in sorted(size for size in sizes if least <= size):
        asked = replace(wanted, gpus=gpus)
        if _could_fit(asked, hardware) and (best := search(asked, hardware, top=1).best):
            return best[0]
    return None


def _could_fit(wanted: Wanted, hardware: Hardware) -> bool:
    """Whether every rank of a pipeline holds its part somewhere; the smallest microbatch holds least."""
    least = replace(
        wanted, microbatch=wanted.microbatch or 1, schedule=wanted.schedule or SCHEDULES[0][0]
    )
    return any(
        not spec.find_broken_rule()
        and all(rank_memory(at).total <= hardware.usable_bytes for at in spec.distinct_views)
        for spec in candidates(least)
        if spec.zero_stage < 2 or spec.dims.size("dp") == 1
    )


def _state(wanted: Wanted, hardware: Hardware) -> str:
    state = state_bytes_of(wanted.step) / 1e9
    return f"{state:,.0f} GB of state over {wanted.gpus} x {hardware.memory_bytes / 1e9:,.0f} GB"
