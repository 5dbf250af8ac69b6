"""What each rank of a mesh holds: state and activations by closed form, as counted, and as measured in a whole step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bench.results.details import COMPONENTS
from bench.world.subject import Explanation
from bench.world.world import World
from workloads.costs.activations import Kept, activations_from
from workloads.costs.mesh_costs import Place, state_of
from workloads.expert_parallel.routing import BALANCED
from workloads.mesh.mesh_stages import mixtures_in
from workloads.pipeline_parallel.pipeline_probe import counted_state, measured_memory, saved_bytes
from workloads.pipeline_parallel.schedules import Schedule, peak_held
from workloads.pipeline_parallel.stages import Chunk
from workloads.step.layout import Layout
from workloads.step.memory import Batch, largest_of

_HOW = {
    "memory": "between steps, activations of a step above its start",
    "memory_counted": "activations: what the microbatches in flight saved for backward",
    "memory_formula": "activations where routes are even",
}
_EVEN = "memory: the closed form of activations is of even routes, what is counted of those that were taken"
_UNCOUNTED = "selective checkpointing: what is kept of activations is torch's own, and not counted"


@dataclass(frozen=True, kw_only=True)
class Look:
    """What there is to look at on this rank; ``tokens`` are its positions of a sequence."""

    layout: Layout
    place: Place
    chunks: Mapping[int, Chunk]
    schedule: Schedule | None
    batch: Batch
    tokens: int
    timed_seconds: float | None = None


def footprint(world: World, look: Look, train: Callable[[], object], begin: Callable[[], None]) -> Explanation:
    """Return what each component takes on the rank with most of it; every rank takes part, after all other looks.

    ``train`` is a step without its update.
    """
    mine = {
        "memory": dict(measured_memory(look.layout, world, train, begin)),
        "memory_counted": counted(look),
        "memory_formula": formula(look.place, look.schedule, look.batch, fused_norms=world.device.type == "cuda"),
    }
    if _without_formula(look):
        del mine["memory_formula"]["activations"]
    told = world.gather(mine)
    by_rank = {name: [one["memory"][name] for one in told] for name in COMPONENTS}
    return Explanation(metrics=largest_of(told, _HOW), details={"memory_by_rank": by_rank}, notes=_notes(look))


def _without_formula(look: Look) -> str | None:
    """Return why a step's activations have no closed form, None if they have."""
    if look.timed_seconds is not None:
        return "timed compute: activations have no closed form, as attention keeps none of its own"
    if look.batch.checkpointing == "selective" and look.place.size("cp") > 1:
        return "selective checkpointing with cp: activations have no closed form, as every block's output is kept"
    return None


def _notes(look: Look) -> tuple[str, ...]:
    moe, how, without = look.place.moe, look.batch.checkpointing, _without_formula(look)
    uneven = moe is not None and moe.routing != BALANCED and how == "none" and without is None
    notes = {_UNCOUNTED: how == "selective", without: without is not None, _EVEN: uneven}
    return tuple(note for note, holds in notes.items() if note is not None and holds)


def formula(place: Place, schedule: Schedule | None, batch: Batch, *, fused_norms: bool = False) -> dict[str, float]:
    """Return the closed forms of a rank's state and activations."""
    state = state_of(place).bytes(mixed=batch.element_bytes < 4)
    held = {"parameters": state.parameters, "gradients": state.gradients, "optimizer": state.optimizer}
    kept = Kept(
        shape=place.shape,
        mesh=place.mesh,
        microbatch=batch.microbatch,
        element_bytes=batch.element_bytes,
        checkpointing=batch.checkpointing,
        moe=place.moe,
        fused_norms=fused_norms,
    )
    return {**held, "activations": activations_from(place, schedule, kept)}


def counted(look: Look) -> dict[str, float]:
    """Return the bytes of this rank's tensors, and of what the microbatches in flight have saved for backward.

    What selective checkpointing keeps is not saved as other tensors are: activations are left out then.
    """
    # state first: the forward passes that are counted leave FSDP's parameters gathered
    state = counted_state(look.layout)
    if look.batch.checkpointing == "selective":
        return state
    saved = {stage: _saved(chunk, look) for stage, chunk in look.chunks.items()}
    return {**state, "activations": _in_flight(look.place, look.schedule, lambda stage: saved[stage])}


def _in_flight(place: Place, schedule: Schedule | None, of_stage: Callable[[int], float]) -> float:
    return of_stage(0) if schedule is None else peak_held(schedule, place.coordinate["pp"], of_stage)


def _saved(chunk: Chunk, look: Look) -> int:
    for mixture in mixtures_in(chunk).values():
        mixture.given = mixture.chosen[max(mixture.chosen)]  # of such tokens a router would send all to one expert
    return saved_bytes(chunk, (look.batch.microbatch, look.tokens), look.place.shape.hidden)
