"""Every call that a rank makes in a step, axis by axis: what, how large, how often. Pure.

Sizes are nccl-tests': an all_gather's output, a reduce_scatter's input. b s h e are microbatch, a cp rank's tokens of a
sequence, hidden size and bytes of an element; the closed forms are those of ``workloads.costs`` and its neighbours.
"""

from collections.abc import Iterator

from workloads.costs.cp_costs import AttentionSizes, attention_bytes
from workloads.model.shapes import BUCKET_BYTES
from workloads.planner.ask import Ask
from workloads.planner.link_time import Call
from workloads.planner.placement import Place, expert_places, expert_shards, place_of
from workloads.planner.stage_parts import Part, elements_of, sends_of, summed_elements

_COLLECTIVE_CP = ("ulysses", "allgather_kv")


def calls_of(ask: Ask, part: Part, gpus_per_node: int) -> tuple[Call, ...]:
    """Return the calls of a rank of the pipeline, in a whole step; axes of one rank make none."""
    return tuple(
        call
        for make in (_tensor, _context, _experts, _pipeline, _shards, _replicas)
        for call in make(ask, part, gpus_per_node)
        if call.place.ranks > 1 and call.count
    )


def _activation(ask: Ask) -> float:
    return float(ask.local_tokens * ask.model.shape.hidden * ask.element_bytes)


def forwards_of(ask: Ask) -> int:
    """Return how often a layer's forward pass communicates: ``full`` checkpointing repeats it."""
    return 2 if ask.checkpointing == "full" else 1


def split_blocks(ask: Ask) -> int:
    """Return the blocks of a layer that ``tp`` splits: attention, and the FFN unless it is a mixture's."""
    return 1 if ask.model.num_experts else 2


def ended_scatters(ask: Ask) -> int:
    """Return the scatters of a layer that ``stops_early`` does not repeat: the FFN's, which a mixture has not."""
    return 1 if ask.stops_early and ask.checkpointing == "full" and not ask.model.num_experts else 0


def _tensor(ask: Ask, part: Part, gpus_per_node: int) -> Iterator[Call]:
    """TP with sequence parallelism: 2 gathers and 2 scatters a layer each way, 8 b s h e (t-1)/t.

    Experts are not split, which halves it. A split embedding and head gather and scatter once each way; what is whole
    on every rank sums its gradients.
    """
    place = place_of(ask.mesh, ("tp",), gpus_per_node)
    ends = part.embedding + part.head if ask.sharded_vocabulary else 0
    count = (split_blocks(ask) * (forwards_of(ask) + 1) * part.layers + ends) * ask.microbatches
    ended = ended_scatters(ask) * part.layers * ask.microbatches
    for op, times in (("all_gather", count), ("reduce_scatter", count - ended)):
        yield Call(axis="tp", op=op, num_bytes=_activation(ask), count=times, place=place, why="activations")
    whole = summed_elements(ask, part) / ask.fsdp * ask.element_bytes
    yield Call(axis="tp", op="all_reduce", num_bytes=whole, count=1, place=place, why="gradients of norms")


def _context(ask: Ask, part: Part, gpus_per_node: int) -> Iterator[Call]:
    """CP: ``cp_costs``'s bytes; rings as messages of one hop, the others as the one collective that carries them."""
    if ask.cp == 1:
        return
    shape, place = ask.model.shape, place_of(ask.mesh, ("cp",), gpus_per_node)
    sizes = AttentionSizes(
        microbatch=ask.microbatch,
        sequence=shape.sequence,
        heads=shape.heads // ask.tp,
        kv_heads=shape.kv_heads // ask.tp,
        head_size=shape.head_size,
        element_bytes=ask.element_bytes,
    )
    method = ask.cp_method if ask.cp_method in _COLLECTIVE_CP else "ring"
    sent = attention_bytes(method, sizes, ask.cp, 1).step(part.layers, ask.microbatches, forwards=forwards_of(ask))[
        "cp"
    ]
    passes = part.layers * ask.microbatches * (forwards_of(ask) + 1)
    if method == "ring":
        hops = passes * (ask.cp - 1)
        yield Call(axis="cp", op="send", num_bytes=sent / hops, count=hops, place=place, why="keys and values")
    else:
        op = "all_to_all" if method == "ulysses" else "all_gather"
        whole = sent / passes * ask.cp / (ask.cp - 1)
        yield Call(axis="cp", op=op, num_bytes=whole, count=passes, place=place, why=method)


def _experts(ask: Ask, part: Part, gpus_per_node: int) -> Iterator[Call]:
    """EP: dispatch and combine, each direction T k h e (EP-1)/EP if experts are equally liked."""
    tokens = ask.local_tokens / ask.tp
    count = 2 * (forwards_of(ask) + 1) * part.layers * ask.microbatches
    yield Call(
        axis="ep",
        op="all_to_all",
        num_bytes=tokens * ask.model.top_k * ask.model.shape.hidden * ask.element_bytes,
        count=count,
        place=expert_places(ask.mesh, gpus_per_node).dealt,
        why="tokens to their experts and back",
    )


def _pipeline(ask: Ask, part: Part, gpus_per_node: int) -> Iterator[Call]:
    """PP: b s h e / t a microbatch, boundary and direction, sequence parallel ranks each sending their part."""
    yield Call(
        axis="pp",
        op="send",
        num_bytes=_activation(ask) / ask.tp,
        count=sends_of(ask, part) * ask.microbatches,
        place=place_of(ask.mesh, ("pp",), gpus_per_node),
        why="activations and their gradients",
    )


def _shards(ask: Ask, part: Part, gpus_per_node: int) -> Iterator[Call]:
    """FSDP: 3 Psi e (n-1)/n a microbatch, layer by layer; a pipeline gathers and reduces once a step, 2 Psi e (n-1)/n.

    Without a pipeline gradients are reduced after every microbatch, so that no rank holds them whole, or else once.
    """
    place = place_of(ask.mesh, ("fsdp",), gpus_per_node)
    once = ask.pp > 1
    rounds = 1 if once else ask.microbatches
    scatters = rounds if ask.reduces_each_microbatch else 1
    dense, experts = elements_of(ask, part)
    units = part.layers + (part.embedding or part.head)
    whole = [(dense, place)]
    if experts:
        whole.append((experts, expert_places(ask.mesh, gpus_per_node).shards))
    for elements, where in whole:
        each = elements * ask.element_bytes / units
        gathers = units * rounds * (1 if once else 2)
        yield Call(axis="fsdp", op="all_gather", num_bytes=each, count=gathers, place=where, why="parameters")
        yield Call(
            axis="fsdp", op="reduce_scatter", num_bytes=each, count=units * scatters, place=where, why="gradients"
        )


def _replicas(ask: Ask, part: Part, gpus_per_node: int) -> Iterator[Call]:
    """DP: an all_reduce of the gradients that a rank holds, once a step in DDP's buckets; cp's ranks sum theirs too.

    Experts have replicas of their own, wherever other ranks hold the same ones.
    """
    dense, experts = elements_of(ask, part)
    place = place_of(ask.mesh, ("dp", "cp"), gpus_per_node)
    yield _summed("dp", dense / ask.fsdp * ask.element_bytes, place)
    if experts:
        held = experts / expert_shards(ask.mesh) * ask.element_bytes
        yield _summed("edp", held, expert_places(ask.mesh, gpus_per_node).copies)


def _summed(axis: str, num_bytes: float, place: Place) -> Call:
    buckets = max(1, -(-int(num_bytes) // BUCKET_BYTES))
    return Call(axis=axis, op="all_reduce", num_bytes=num_bytes / buckets, count=buckets, place=place, why="gradients")
