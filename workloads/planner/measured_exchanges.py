"""Calls of measured steps whose attention or experts exchange tokens, where parameters alone tell how many. Pure.

Attention's bytes are ``workloads.costs.cp_costs``'s, experts' those of ``workloads.costs.moe_costs`` at even loads:
the generator ``balanced`` gives every rank as many rows, other routes are known only once they were drawn.
"""

from collections.abc import Iterator

from workloads.context_parallel.context_case import ulysses_of
from workloads.costs.communication_pattern import state_bytes
from workloads.costs.moe_costs import COUNT_BYTES
from workloads.expert_parallel.moe_case import (
    Moe,
    moe_of,
    num_expert_parameters,
    num_ffn_matrices,
    num_moe_parameters,
    num_routed_parameters,
)
from workloads.expert_parallel.routing import BALANCED
from workloads.model.shapes import BUCKET_BYTES
from workloads.planner.link_time import Call
from workloads.planner.measured_step import Expected, Step, call_of

_FLOAT_BYTES = 4


def attention_calls(step: Step) -> tuple[Call, ...]:
    """Return what attention over parts of sequences sends, by its method, of every layer and microbatch of a step."""
    method = str(step.params["method"])
    inner = ulysses_of(method, int(step.params["ulysses"]), step.ranks)
    if method == "ulysses":
        return tuple(_exchanges(step, "cp", inner))
    if method == "allgather_kv":
        return tuple(_gathers(step))
    if method == "usp":
        return (*_around(step, "ring", step.ranks // inner, inner), *_exchanges(step, "ulysses", inner))
    return tuple(_around(step, "cp", step.ranks, 1))


def _passes(step: Step) -> tuple[int, int]:
    """Return the forward and the backward passes of layers in a step."""
    again = 1 if step.params["checkpointing"] == "none" else 2
    times = step.shape.layers * step.microbatches
    return again * times, times


def _part_elements(step: Step) -> int:
    """Return b s / c h: one rank's queries, or what attention gives."""
    shape = step.shape
    return int(step.params["microbatch"]) * (shape.sequence // step.ranks) * shape.hidden


def _around(step: Step, axis: str, hops: int, inner: int) -> Iterator[Call]:
    """Keys and values go round in each pass, in one message a hop; their gradients in float32, backward alone."""
    shape, (forward, backward) = step.shape, _passes(step)
    elements = 2 * _part_elements(step) * shape.kv_heads // shape.heads
    keys = (forward + backward) * (hops - 1)
    yield call_of(step, axis, "send", elements * step.element_bytes, keys, hops)
    yield call_of(step, axis, "send", elements * _FLOAT_BYTES, backward * (hops - 1), hops)


def _gathers(step: Step) -> Iterator[Call]:
    """Keys and values of all ranks, for each pass; backward scatters the sums of their gradients."""
    shape, (forward, backward) = step.shape, _passes(step)
    whole = 2 * _part_elements(step) * shape.kv_heads // shape.heads * step.ranks * step.element_bytes
    yield call_of(step, "cp", "all_gather", whole, forward + backward, step.ranks)
    yield call_of(step, "cp", "reduce_scatter", whole, backward, step.ranks)


def _exchanges(step: Step, axis: str, ranks: int) -> Iterator[Call]:
    """Queries, keys and values in one all_to_all, the result in another; backward the same against their direction."""
    shape, passes = step.shape, sum(_passes(step))
    whole = _part_elements(step) * step.element_bytes
    yield call_of(step, axis, "all_to_all", whole * (1 + 2 * shape.kv_heads / shape.heads), passes, ranks)
    yield call_of(step, axis, "all_to_all", whole, passes, ranks)


def expert_step(step: Step) -> Expected | str:
    """Return what a step with even loads sends and holds, or what of it is not known beforehand."""
    moe = moe_of(step.params, step.shape, step.ranks)
    reason = _unknown(step, moe)
    if reason is not None:
        return f"ep_step: {reason}"
    routed = num_routed_parameters(step.shape, moe)
    rest = num_moe_parameters(step.shape, moe) - routed
    return Expected(
        calls=tuple(_expert_calls(step, moe, rest)),
        state=state_bytes("ddp", rest + routed // moe.ep, 1, mixed=step.element_bytes < _FLOAT_BYTES),
    )


def _unknown(step: Step, moe: Moe) -> str | None:
    if moe.routing != BALANCED:
        return f"routing = {moe.routing}: who sends how much is known once routes were drawn, of balanced before"
    if moe.variant != "all_to_all" or moe.capacity or moe.chunks > 1:
        how = f"variant = {moe.variant}, capacity = {moe.capacity:g}, chunks = {moe.chunks}"
        return f"{how}: only dropless all_to_all in one part has a closed form"
    if moe.tp > 1 or moe.etp > 1 or step.params["fsdp"]:
        how = f"tp = {moe.tp}, etp = {moe.etp}, fsdp = {str(bool(step.params['fsdp'])).lower()}"
        return f"{how}: only whole experts inside DDP have a closed form"
    return None


def _expert_calls(step: Step, moe: Moe, rest: int) -> Iterator[Call]:
    """Four flights a layer and microbatch, T k h e each, and counts before them; gradients once a step."""
    shape, (forward, backward) = step.shape, _passes(step)
    rows = int(step.params["microbatch"]) * shape.sequence * moe.top_k
    flights = 2 * (forward + backward)
    yield call_of(step, "ep", "all_to_all", rows * shape.hidden * step.element_bytes, flights, moe.ep)
    yield call_of(step, "ep", "all_to_all", moe.experts * COUNT_BYTES, forward, moe.ep)
    whole = rest * step.element_bytes
    buckets = max(1, -(-whole // BUCKET_BYTES))
    yield call_of(step, "dp", "all_reduce", whole / buckets, buckets, step.ranks)
    matrices = num_ffn_matrices(shape)
    held = moe.experts_per_rank * num_expert_parameters(shape, moe) * step.element_bytes
    yield call_of(step, "edp", "all_reduce", held / matrices, matrices * shape.layers, step.ranks // moe.ep)
