"""What to say of a request that no mesh can meet: what it lacks in numbers, and the fewest GPUs that would do. Pure."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from bench.text import UserError
from workloads.mesh.constraints import refuse_heads, refuse_sequence
from workloads.planner.dry_run import DryRun
from workloads.planner.hardware import Hardware
from workloads.planner.rank_memory import total_state_bytes
from workloads.planner.search import MOST_GPUS, Found, Wanted, divisors, meshes, search


def require_found(wanted: Wanted, hardware: Hardware, found: Found) -> None:
    """Refuse a search that found nothing: what memory or which rule stops, and the fewest GPUs that would do."""
    if not found.best:
        raise UserError(f"{_lack(wanted, hardware, found)}; {smallest_words(wanted, hardware)}")


def lack_of(run: DryRun, wanted: Wanted) -> str:
    """Return what a dry run that does not fit lacks, and the fewest GPUs that would do at its global batch."""
    hardware = run.hardware
    return f"{run.missing}; it has {_state_words(wanted, hardware)}; {smallest_words(wanted, hardware)}"


def smallest_feasible(wanted: Wanted, hardware: Hardware) -> DryRun | None:
    """Return the fastest step on the fewest GPUs that carry the model at its global batch; None where none do."""
    for gpus in counts(wanted, hardware):
        best = search(replace(wanted, gpus=gpus), hardware, top=1).best
        if best:
            return best[0]
    return None


def counts(wanted: Wanted, hardware: Hardware) -> Iterator[int]:
    """Yield how many GPUs could do, the fewest first: products of sizes that the axes can have one by one.

    Their memory holds the model's state at least once.
    """
    shape, experts = wanted.model.shape, wanted.model.num_experts > 0
    tensor = [size for size in divisors(shape.heads) if not refuse_heads(shape, {"tp": size}, experts=experts)]
    context = [
        size
        for size in divisors(shape.sequence)
        if not refuse_sequence(shape, {"cp": size}, cp_method=wanted.cp_method)
    ]
    stages, data = divisors(shape.layers), divisors(wanted.global_batch)
    least = total_state_bytes(wanted.model, wanted.element_bytes) / hardware.usable_bytes
    found = {math.prod(sizes) for sizes in product(tensor, stages, data)}
    both = {one * other for one in found for other in context}
    yield from sorted(count for count in both if least <= count <= MOST_GPUS)


def smallest_words(wanted: Wanted, hardware: Hardware) -> str:
    """Return the fewest GPUs that would do, and how."""
    best = smallest_feasible(wanted, hardware)
    if best is None:
        return f"no number of GPUs up to {MOST_GPUS} fits it at global batch {wanted.global_batch}"
    return f"smallest feasible: {best.ask.world} GPUs as {as_words(best)}"


def as_words(run: DryRun) -> str:
    """Return a step's mesh with what else was chosen for it."""
    ask = run.ask
    return f"{ask.mesh_text} with microbatch {ask.microbatch} and checkpointing {ask.checkpointing}"


def _state_words(wanted: Wanted, hardware: Hardware) -> str:
    state = total_state_bytes(wanted.model, wanted.element_bytes) / 1e9
    return f"{state:,.0f} GB of state over {wanted.gpus} x {hardware.memory_bytes / 1e9:,.0f} GB"


def _lack(wanted: Wanted, hardware: Hardware, found: Found) -> str:
    if found.nearest is not None:
        least = found.nearest.fullest.memory.total / 1e9
        return (
            f"{wanted.model.name} needs {_state_words(wanted, hardware)} ({hardware.usable_bytes / 1e9:,.1f} GB usable)"
            f": {least:,.1f} GB a GPU even as {as_words(found.nearest)}"
        )
    asked = f"{wanted.model.name} on {wanted.gpus} GPUs at global batch {wanted.global_batch}"
    if found.equations:
        return f"{asked}: every mesh breaks a rule, such as {', '.join(found.equations.values())}"
    return f"{asked}: {_batch_words(wanted)}"


def _batch_words(wanted: Wanted) -> str:
    """Return the equation of the mesh that asks for the fewest sequences."""
    mesh = min(meshes(wanted), key=lambda mesh: mesh["dp"] * mesh["fsdp"])
    data = f"dp({mesh['dp']}) * fsdp({mesh['fsdp']}) * microbatch({wanted.microbatch or 1})"
    return f"global batch({wanted.global_batch}) % ({data}) != 0 even with the fewest data ranks"
