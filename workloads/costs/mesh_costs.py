"""Closed forms of a hybrid step: bytes that a rank sends by axis, and the state that it holds. Pure.

b s h are microbatch, sequence and hidden size, M the microbatches, e the bytes of an element; d f P c t E the ranks of
dp, fsdp, pp, cp, tp and ep. A rank holds L layers and their parameters: Psi_f padded and sharded over f, of which
``whole`` ones are alike on the ranks of tp, and ``routed`` ones, which f does not shard.

* tp: 8 L M b (s/c) h e (t-1)/t, half with mixtures of experts, and 2 whole/f e (t-1)/t for gradients. A layer that is
  computed again adds 3 to the 8, or 2 to the 4: torch stops before the FFN's own sum is scattered.
* cp: L M times its method's bytes, with heads / t (see ``cp_costs``), and those of forward again.
* pp: b s h e / (c t) per microbatch, boundary and direction.
* fsdp: 3 Psi_f e (f-1)/f, with M all-gathers forward and M backward; 2 Psi_f e (f-1)/f where a pipeline keeps stages.
* dp, over d c ranks: 2 Psi_f / f e (n-1)/n, once a step.
* ep: 4 L M T k h e (E-1)/E where routes are even, T = b s / (c t), and the counts told before, 6 where they are taken
  again; edp, over the copies of experts: 2 routed e (n-1)/n.
* etp: X ranks that split experts take each other's tokens, T = X b s / (c t), and gather what they lack:
  L M T (X-1)/X ((4 h + 2 k) e + 4 k), and forward's (2 h + k) e + 4 k again.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from workloads.costs.communication_pattern import sent_bytes as sent_in_call
from workloads.costs.cp_costs import AttentionSizes, attention_bytes
from workloads.costs.former import (
    Kind,
    ParameterPart,
    StateBytes,
    fsdp_sent_bytes,
    numel_by_kind,
    parts_of_rank,
    stages_of_rank,
    state_bytes,
    total_padded_numel,
)
from workloads.costs.moe_costs import COUNT_BYTES, Moved, Sizes, even_dispatch_bytes, sent_by
from workloads.expert_parallel.moe_case import Moe
from workloads.mesh.axes import DATA, coordinate_of, size_of
from workloads.model.shapes import Shape
from workloads.pipeline_parallel.pipeline_case import layers_of_stages
from workloads.pipeline_parallel.schedules import default_chunks

Mesh = Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class StateElements:
    """Parameters that one rank holds, gradients and moments as many: ``sharded`` by fsdp, and ``routed`` experts'."""

    sharded: int
    routed: int

    @property
    def total(self) -> int:
        """Both."""
        return self.sharded + self.routed

    def bytes(self, *, mixed: bool) -> StateBytes:
        """Return bytes of parameters, gradients and Adam's state (arXiv 1910.02054); mixed is 16-bit with masters."""
        return state_bytes("ddp", self.total, 1, mixed=mixed)


@dataclass(frozen=True, kw_only=True)
class Place:
    """One rank's part of a step, from which all its closed forms follow."""

    shape: Shape
    mesh: Mesh
    coordinate: Mesh
    stages: tuple[int, ...]
    layers_by_stage: tuple[int, ...]
    moe: Moe | None

    @property
    def layers(self) -> int:
        """Layers of this rank."""
        return sum(self.layers_by_stage[stage] for stage in self.stages)

    @property
    def parts(self) -> list[ParameterPart]:
        """What this rank has of each parameter before fsdp shards it."""
        return parts_of_rank(self.shape, self.stages, self.layers_by_stage, tp=self.size("tp"), moe=self.moe)

    def size(self, *axes: str) -> int:
        """Return the ranks of some axes together."""
        return size_of(self.mesh, *axes)


def place_of(
    shape: Shape,
    mesh: Mesh,
    coordinate: Mesh | None = None,
    *,
    schedule: str = "1f1b",
    chunks: int = 0,
    split: str = "",
    moe: Moe | None = None,
) -> Place:
    """Return the place of the rank at a coordinate, of rank 0 if none is given; ``UserError`` where layers do not fit.

    A coordinate names axes such as ``{"pp": 1}``; what it leaves out is 0.
    """
    pp = size_of(mesh, "pp")
    of_rank = (chunks or default_chunks(schedule)) if pp > 1 else 1
    at = {**coordinate_of(mesh, 0), **(coordinate or {})}
    return Place(
        shape=shape,
        mesh=mesh,
        coordinate=at,
        stages=stages_of_rank(schedule, pp, of_rank, at["pp"]) if pp > 1 else (0,),
        layers_by_stage=layers_of_stages(shape.layers, pp * of_rank, split) if pp > 1 else (shape.layers,),
        moe=moe,
    )


def sent_bytes(
    shape: Shape,
    mesh: Mesh,
    *,
    microbatch: int,
    microbatches: int,
    element_bytes: int,
    coordinate: Mesh | None = None,
    schedule: str = "1f1b",
    chunks: int = 0,
    split: str = "",
    cp_method: str = "ring",
    moe: Moe | None = None,
    checkpointing: str = "none",
) -> dict[str, float]:
    """Return the bytes that the rank at a coordinate sends in a step, by axis; axes of one rank are left out."""
    place = place_of(shape, mesh, coordinate, schedule=schedule, chunks=chunks, split=split, moe=moe)
    return sent_from(
        place,
        microbatch=microbatch,
        microbatches=microbatches,
        element_bytes=element_bytes,
        cp_method=cp_method,
        checkpointing=checkpointing,
    )


def sent_from(
    place: Place,
    *,
    microbatch: int,
    microbatches: int,
    element_bytes: int,
    cp_method: str = "ring",
    checkpointing: str = "none",
) -> dict[str, float]:
    """Return the bytes that the rank at a place sends in a step, by axis; axes of one rank are left out."""
    sizes, again = (microbatch, microbatches, element_bytes), checkpointing != "none"
    found = {
        "fsdp": _sharding(place, microbatches, element_bytes),
        "dp": _averaging(place, element_bytes),
        "pp": _boundaries(place, *sizes),
        "cp": _context(place, *sizes, method=cp_method, again=again),
        "tp": _splitting(place, *sizes, again=again),
        "ep": _dispatching(place, *sizes, again=again),
        "etp": _gathering(place, *sizes, again=again),
        "edp": _averaging_experts(place, element_bytes),
    }
    return {axis: found[axis] for axis in axes_of(place.mesh, place.moe)}


def axes_of(mesh: Mesh, moe: Moe | None = None) -> dict[str, int]:
    """Return the axes that carry something, and how many ranks take part in each: dp's are those of cp as well."""
    sizes = {
        "fsdp": size_of(mesh, "fsdp"),
        "dp": size_of(mesh, "dp", "cp"),
        "pp": size_of(mesh, "pp"),
        "cp": size_of(mesh, "cp"),
        "tp": size_of(mesh, "tp"),
        "ep": 1 if moe is None else moe.ep,
        "etp": 1 if moe is None else moe.etp,
        "edp": 1 if moe is None else size_of(mesh, *DATA, "tp") // (moe.ep * moe.etp),
    }
    return {axis: size for axis, size in sizes.items() if size > 1}


def state_elements(
    shape: Shape,
    mesh: Mesh,
    coordinate: Mesh | None = None,
    *,
    schedule: str = "1f1b",
    chunks: int = 0,
    split: str = "",
    moe: Moe | None = None,
) -> StateElements:
    """Return the parameters that the rank at a coordinate holds."""
    return state_of(place_of(shape, mesh, coordinate, schedule=schedule, chunks=chunks, split=split, moe=moe))


def state_of(place: Place) -> StateElements:
    """Return the parameters that a rank holds."""
    held = _held(place)
    return StateElements(sharded=held["split"] + held["whole"], routed=held["routed"])


def _held(place: Place) -> Mapping[Kind, int]:
    return numel_by_kind(place.parts, place.size("fsdp"), place.coordinate["fsdp"])


def _sharding(place: Place, microbatches: int, element_bytes: int) -> float:
    """A rank of a pipeline gathers its stages once a step and keeps them; else layers are gathered for each pass."""
    ranks = place.size("fsdp")
    padded = total_padded_numel([part.size for part in place.parts if part.kind != "routed"], ranks)
    kept = place.size("pp") > 1
    sent = fsdp_sent_bytes(
        padded,
        element_bytes,
        ranks,
        num_kept=padded if kept else 0,
        num_microbatches=1 if kept else microbatches,
        num_synchronisations=1,
    )
    return sent["dp"]


def _averaging(place: Place, element_bytes: int) -> float:
    held = _held(place)
    return sent_in_call("all_reduce", (held["split"] + held["whole"]) * element_bytes, place.size("dp", "cp"))


def _averaging_experts(place: Place, element_bytes: int) -> float:
    if place.moe is None:
        return 0.0
    copies = place.size(*DATA, "tp") // (place.moe.ep * place.moe.etp)
    return sent_in_call("all_reduce", _held(place)["routed"] * element_bytes, copies)


def _boundaries(place: Place, microbatch: int, microbatches: int, element_bytes: int) -> float:
    each = _activation(place, microbatch, element_bytes) / place.size("cp", "tp")
    return each * microbatches * sum(_neighbours(place, stage) for stage in place.stages)


def _neighbours(place: Place, stage: int) -> int:
    """Return how many of the stages before and after are another rank's."""
    last = len(place.layers_by_stage) - 1
    beside = [other for other in (stage - 1, stage + 1) if 0 <= other <= last]
    return sum(other not in place.stages for other in beside)


def _context(
    place: Place, microbatch: int, microbatches: int, element_bytes: int, *, method: str, again: bool
) -> float:
    shape, tp, cp = place.shape, place.size("tp"), place.size("cp")
    sizes = AttentionSizes(
        microbatch=microbatch,
        sequence=shape.sequence,
        heads=shape.heads // tp,
        kv_heads=shape.kv_heads // tp,
        head_size=shape.head_size,
        element_bytes=element_bytes,
    )
    each = attention_bytes(method, sizes, cp, cp if method == "ulysses" else 1)
    return each.step(place.layers, microbatches, forwards=2 if again else 1)["cp"]


def _splitting(place: Place, microbatch: int, microbatches: int, element_bytes: int, *, again: bool) -> float:
    tp = place.size("tp")
    activation = _activation(place, microbatch, element_bytes) / place.size("cp")
    flights = (8, 3) if place.moe is None else (4, 2)
    between = (
        sum(flights if again else flights[:1])
        * place.layers
        * microbatches
        * sent_in_call("all_gather", activation, tp)
    )
    return between + sent_in_call("all_reduce", _held(place)["whole"] * element_bytes, tp)


def _dispatching(place: Place, microbatch: int, microbatches: int, element_bytes: int, *, again: bool) -> float:
    if place.moe is None:
        return 0.0
    ranks, tokens = place.moe.ep, place.moe.etp * microbatch * place.shape.sequence // place.size("cp", "tp")
    flight = even_dispatch_bytes(tokens, place.moe.top_k, place.shape.hidden, element_bytes, ranks)
    told = (ranks - 1) * place.moe.experts_per_rank * COUNT_BYTES
    forwards = 2 if again else 1
    return place.layers * microbatches * (forwards * (2 * flight + told) + 2 * flight)


def _gathering(place: Place, microbatch: int, microbatches: int, element_bytes: int, *, again: bool) -> float:
    """Ranks that split experts gather tokens, their weights and routes, and scatter sums."""
    if place.moe is None:
        return 0.0
    tokens = microbatch * place.shape.sequence // place.size("cp", "tp")
    sizes = Sizes(
        hidden=place.shape.hidden,
        element_bytes=element_bytes,
        top_k=place.moe.top_k,
        tokens=tokens,
        experts_per_rank=place.moe.experts_per_rank,
    )
    alone = [[0] * place.moe.etp] * place.moe.etp
    one = sent_by("allgather", 0, Moved(pairs=alone, rows=alone), sizes)
    return place.layers * microbatches * ((2 if again else 1) * one.forward + one.backward)


def _activation(place: Place, microbatch: int, element_bytes: int) -> int:
    return microbatch * place.shape.sequence * place.shape.hidden * element_bytes
