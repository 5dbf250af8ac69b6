"""Every call that a rank makes in a step: operation, size, count and group of ranks. Pure.

Sizes are nccl-tests': an all_gather's output, a reduce_scatter's input, the data of one rank in an
all_to_all. The symbols of equations are the keys of ``RankView.symbols``. The expected bytes of a
measured step and the planner read the same calls.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import Protocol

from parbench.bench.plan.catalogue import OPERATIONS as CATALOGUE
from parbench.bench.plan.catalogue import compute_unit_factor
from parbench.workloads.costs.equation import Equation
from parbench.workloads.costs.parameter_table import (
    Kind,
    count_elements,
    count_padded,
    count_shard,
    list_units,
)
from parbench.workloads.costs.step_spec import RankView, StepSpec
from parbench.workloads.expert_parallel.moe_case import list_exchange_calls
from parbench.workloads.model.layer_call import LayerCall
from parbench.workloads.model.shapes import DEFAULT_BUCKET_BYTES

_FACTORS: Mapping[str, Callable[[int], float]] = {
    **{spec.short_name: spec.busbw for spec in CATALOGUE if spec.busbw},
    "send": compute_unit_factor,
    "recv": lambda n: 0.0,  # the sender counts it
    "barrier": lambda n: 0.0,
}
"""Functions of a group's number of ranks that return sent bytes over size, by operation."""
_SHARED = dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all"), "(ranks - 1) / ranks")
_FACTOR_TEXTS = {"all_reduce": "2 * (ranks - 1) / ranks", **_SHARED}
"""The factors of a training step's operations as texts of equations. A missing factor is 1."""
LOSS_BYTES = 4
"""The bytes of one float32 number per token in the all_reduces of a loss split by vocabulary."""
COUNT_BYTES = 8
"""The bytes of the number of tokens with a loss, an int64."""
SOURCES = {
    "tp": "arXiv 1909.08053, 2205.05198",
    "cp": "arXiv 2310.01889 (ring), 2309.14509 (Ulysses)",
    "ring": "arXiv 2310.01889",
    "ulysses": "arXiv 2309.14509",
    "ep": "arXiv 2006.16668",
    "etp": "parbench",
    "pp": "arXiv 2104.04473",
    "fsdp": "arXiv 1910.02054",
    "efsdp": "arXiv 1910.02054",
    "dp": "arXiv 2006.15704",
    "edp": "arXiv 2006.15704",
}
"""The publication that describes the communication on an axis, by name of the axis."""


def sent_bytes(operation: str, num_bytes: float, n: int) -> float:
    """Return the bytes that the busiest rank sends in one ring-optimal call on ``n`` ranks.

    ``num_bytes`` is the size of the call as nccl-tests counts it, and the factors are nccl-tests'
    (doc/PERFORMANCE.md). For broadcast and reduce the result is ``num_bytes``, although the last
    rank of a chain sends nothing. For recv and barrier, and on one rank, the result is 0.
    """
    return _FACTORS[operation](n) * num_bytes if n > 1 else 0.0


@dataclass(frozen=True, kw_only=True)
class Call:
    """All calls of one rank in a step that have the same operation, process group and size.

    One object stands for ``times`` calls, over all layers and microbatches of the step.
    """

    axis: str
    """The name of the mesh axis under which metrics count the calls."""
    op: str
    """The name of the operation, such as ``all_reduce`` or ``send``."""
    group: tuple[str, ...]
    """The axes along which the ranks of the process group differ, such as dp and cp."""
    ranks: int
    """The number of ranks in the process group."""
    size: Equation
    """The equation of the bytes of one call, as nccl-tests counts them."""
    count: Equation
    """The equation of the number of these calls in a step, whose value is ``times``."""
    purpose: str
    """The tensors that the calls move, such as ``gradients``, for reports."""
    peer: int | None = None
    """The position along ``pp`` of the rank that receives a message, None for a collective."""

    @cached_property
    def num_bytes(self) -> float:
        """The bytes of one call as nccl-tests counts them: the value of the equation ``size``."""
        return self.size.value

    @cached_property
    def times(self) -> float:
        """The number of these calls in a step: the value of the equation ``count``."""
        return self.count.value

    @cached_property
    def sent(self) -> float:
        """The bytes that this rank sends in all of these calls of a step, ring-optimal."""
        return self.times * sent_bytes(self.op, self.num_bytes, self.ranks)


def list_calls(view: RankView) -> tuple[Call, ...]:
    """Return all communication calls that one rank makes in a step, from analytical formulas.

    Each element stands for several equal calls. Calls on groups of one rank are left out, and so
    are calls of no bytes.
    """
    calls: list[Call] = []
    for list_axis_calls in (
        _list_tensor_calls,
        _list_vocabulary_calls,
        _list_context_calls,
        _list_expert_calls,
        _list_pipeline_calls,
        _list_shard_calls,
        _list_gradient_calls,
        _list_token_count_calls,
    ):
        calls += list_axis_calls(view)
    return tuple(call for call in calls if call.ranks > 1 and call.times and call.num_bytes)


def list_busiest_calls(
    views: Iterable[RankView], axes: Collection[str] | None = None
) -> Sequence[Call]:
    """Return the communication calls in a step of the rank that sends most bytes.

    ``views`` are the ranks to compare. Only calls on ``axes`` are compared and returned. None means
    all axes.
    """
    calls_by_rank = [
        [call for call in list_calls(view) if axes is None or call.axis in axes] for view in views
    ]
    return max(calls_by_rank, key=lambda calls: sum(call.sent for call in calls))


class SentBytes(Protocol):
    """One or several communication calls of a rank, with their mesh axis and sent bytes.

    It is a recorded ``SentCall`` or an analytical ``Call``.
    """

    @property
    def axis(self) -> str:
        """The name of the mesh axis of the calls."""
        ...

    @property
    def sent(self) -> float:
        """The bytes that the rank sends in all of these calls together, ring-optimal."""
        ...


def bytes_by_axis(calls: Iterable[SentBytes], axes: Iterable[str] = ()) -> dict[str, float]:
    """Return the bytes that a rank sends in ``calls`` together, keyed by mesh axis.

    The result also has an entry of 0 bytes for each of ``axes`` without calls.
    """
    sent: defaultdict[str, float] = defaultdict(float, dict.fromkeys(axes, 0.0))
    for call in calls:
        sent[call.axis] += call.sent
    return dict(sent)


def sum_calls(calls: Iterable[Call]) -> Equation:
    """Return one equation for the bytes that a rank sends in a step, in ``calls`` together.

    It has one term for each element of ``calls``: the number of calls, times the bytes of one call,
    times the bytes that a ring sends per byte (the bus bandwidth factor of nccl-tests). All
    ``calls`` are on groups of equally many ranks, as those of one mesh axis are.
    """
    terms: list[str] = []
    symbols: dict[str, float] = {}
    for call in calls:
        factor = _FACTOR_TEXTS.get(call.op, "1")
        terms.append(_multiply(call.count.text, call.size.text, factor))
        symbols |= {**call.size.symbols, **call.count.symbols, "ranks": float(call.ranks)}
    return Equation(text=" + ".join(terms), symbols=symbols)


def _make_call(
    view: RankView,
    axis: str,
    op: str,
    size: str,
    count: str,
    purpose: str,
    *,
    group: tuple[str, ...] = (),
    ranks: int = 0,
    peer: int | None = None,
    symbols: Mapping[str, float] = MappingProxyType({}),
) -> Call:
    """Build a ``Call`` of one rank, whose ``size`` and ``count`` are given as texts of equations.

    ``size`` gives the bytes of one call and ``count`` the number of calls in a step. The texts may
    use the symbols of the rank (``RankView.symbols``) and those in ``symbols``. The other arguments
    are fields of ``Call``. An empty ``group`` means that the group has only the axis ``axis``.
    ``ranks`` 0 means the number of ranks in ``group``.
    """
    values = {**view.symbols, **symbols}
    group = group or (axis,)
    return Call(
        axis=axis,
        op=op,
        group=group,
        ranks=ranks or count_group_ranks(view.spec, group),
        size=Equation(text=size, symbols=values),
        count=Equation(text=count, symbols=values),
        purpose=purpose,
        peer=peer,
    )


def count_group_ranks(spec: StepSpec, group: tuple[str, ...]) -> int:
    """Return the number of ranks in a process group along these axes.

    ``efsdp`` and ``edp`` are the axes along which routed experts are sharded and replicated. They
    are possible only as the single axis of a group.
    """
    if group == ("efsdp",):
        return spec.dims.expert_shards
    if group == ("edp",):
        return spec.dims.expert_replicas
    return spec.dims.size(*group)


ACTIVATIONS = "tokens * hidden * bytes_per_element"
"""The equation of the bytes of one activation (b, s, hidden) inside blocks, on one rank."""


def _list_tensor_calls(view: RankView) -> Iterator[Call]:
    """Yield a rank's ``tp`` calls inside layers in a step: sums after attention and after FFN.

    The calls sum activations. With sequence parallelism, each sum is a reduce_scatter after the
    block, and an all_gather precedes the block. MoE blocks have no such calls, because ``tp``
    splits neither routed nor shared experts. The recomputation of a layer stops before the layer's
    last sum.
    """
    spec = view.spec
    if spec.dims.tp == 1:
        return
    for layers, _, moe in view.layer_kinds:
        gathers = sums = f"(2 * {layers} + recomputed_{layers}) * microbatches"
        if moe is None:
            gathers = f"2 * {gathers}"
            # Torch stops a recomputation when it has the last tensor that backward needs.
            sums = f"(4 * {layers} + recomputed_{layers}) * microbatches"
        if spec.sequence_parallel:
            yield _make_call(view, "tp", "all_gather", ACTIVATIONS, gathers, "activations")
        yield _make_call(view, "tp", _get_sum(spec), ACTIVATIONS, sums, "activations")


def _get_sum(spec: StepSpec) -> str:
    """Return the operation by which ``tp`` ranks sum the activations after a block.

    It is ``reduce_scatter`` with sequence parallelism, otherwise ``all_reduce``.
    """
    return "reduce_scatter" if spec.sequence_parallel else "all_reduce"


def _list_vocabulary_calls(view: RankView) -> Iterator[Call]:
    """Yield a rank's ``tp`` calls in a step outside of layers: at embedding, head and loss.

    The embedding and the head are split by vocabulary. The loss is computed from the ranks' parts
    of the logits: three all_reduces of a number per token, the maximum, the sum of exponentials and
    the target's logit (arXiv 1909.08053). With sequence parallelism, one more all_reduce per step
    sums the gradients of all weights that ``tp`` does not split.
    """
    spec = view.spec
    if spec.dims.tp == 1:
        return
    call = partial(_make_call, view, "tp")
    if view.has_embedding:
        yield call(_get_sum(spec), ACTIVATIONS, "microbatches", "embedding")
    if view.has_embedding and spec.sequence_parallel:
        yield call("all_gather", ACTIVATIONS, "microbatches", "gradient of embedding")
    if view.has_head and spec.sequence_parallel:
        yield call("all_gather", ACTIVATIONS, "microbatches", "input of head")
    if view.has_head:
        yield call(_get_sum(spec), ACTIVATIONS, "microbatches", "gradient of head's input")
        yield call("all_reduce", f"tokens * {LOSS_BYTES}", "3 * microbatches", "loss")
    if spec.sequence_parallel:
        replicated = count_shard(view, "replicated")
        size = "replicated_parameters * reduce_bytes"
        yield call(
            "all_reduce", size, "1", "gradients", symbols={"replicated_parameters": replicated}
        )


def _list_context_calls(view: RankView) -> Iterator[Call]:
    """Yield a rank's calls over ``cp`` in a step, by which ranks exchange keys or heads.

    Their operations depend on the method of context parallelism, such as a ring or Ulysses.
    """
    spec = view.spec
    if spec.dims.cp == 1:
        return
    for call in spec.context_method.list_calls(spec.shape, spec.dims.cp, spec.ulysses_ranks):
        yield _count_layer_call(view, call, "layers", group=("cp",))


def _count_layer_call(
    view: RankView,
    call: LayerCall,
    layers: str,
    *,
    group: tuple[str, ...] = (),
    is_repeated: bool = True,
) -> Call:
    """Return a rank's calls in a step, from the ``call`` of one layer for one microbatch.

    ``layers`` is the symbol for the number of layers that make this call, such as ``moe_layers``.
    With ``is_repeated``, layers that backward recomputes make their forward calls once more.
    ``group`` has the axes of the process group, empty for the axis of ``call``.
    """
    terms = [f"{call.forward + call.backward} * {layers}"]
    if call.forward and is_repeated:
        terms.append(f"{call.forward} * recomputed_{layers}")
    count = f"({' + '.join(terms)}) * microbatches"
    return _make_call(
        view, call.axis, call.op, call.size, count, call.purpose, group=group, ranks=call.ranks
    )


def _list_expert_calls(view: RankView) -> Iterator[Call]:
    """Yield a rank's calls over ``ep`` and ``etp`` in a step: tokens to experts and back.

    Their operations depend on the token dispatcher, all_to_all or allgather. Their bytes are those
    with balanced routing.
    """
    spec, moe = view.spec, view.spec.moe
    if moe is None:
        return
    for call in list_exchange_calls(moe):
        # Selective checkpointing keeps the results of experts, so that only full repeats them.
        is_repeated = spec.checkpointing == "full" and moe.is_recomputed(call)
        yield _count_layer_call(view, call, "moe_layers", is_repeated=is_repeated)


def _list_pipeline_calls(view: RankView) -> Iterator[Call]:
    """Yield a rank's sends over ``pp`` in a step: activations, and gradients of activations.

    For each microbatch, a stage sends activations to the rank of the next stage, and gradients to
    the rank of the stage before. Stages on the same rank send nothing to each other. There is one
    ``Call`` for each receiving rank.
    """
    pipeline = view.spec.pipeline
    if pipeline is None:
        return
    rank_by_stage = {
        stage: rank for rank in range(view.spec.dims.pp) for stage in pipeline.list_stages(rank)
    }
    boundaries: Counter[int] = Counter()
    for stage in view.stages:
        for neighbor in (stage - 1, stage + 1):
            if neighbor in rank_by_stage:
                boundaries[rank_by_stage[neighbor]] += 1
    for peer in sorted(boundaries.keys() - {view.pp_rank}):
        yield _make_call(
            view,
            "pp",
            "send",
            "sharded_tokens * hidden * bytes_per_element",
            "boundaries * microbatches",
            "activations",
            peer=peer,
            symbols={"boundaries": boundaries[peer]},
        )


def _list_shard_calls(view: RankView) -> Iterator[Call]:
    """Yield a rank's FSDP calls in a step: all_gathers of parameters, reduce_scatters of gradients.

    Each FSDP unit has its own calls: the embeddings, each layer, each layer's routed experts, and
    the final norm with the head. Parameters are padded, and gathered for each forward and each
    backward pass of a microbatch. Norm and head are gathered once for both passes. With pipeline
    ranks, each unit is gathered and reduced once per step. HSDP also all-reduces the shards of
    gradients over ``dp``.
    """
    spec = view.spec
    if not spec.dims.is_sharded:
        return
    shards, units = spec.dims.shard_size, list_units(view)
    shard = partial(_list_unit_calls, view, "fsdp")
    yield from shard("embedding", "1", count_padded(units.embeddings, shards))
    yield from shard("norm_and_head", "1", count_padded(units.head, shards), is_kept=True)
    for (layers, _, moe), (_, parts) in zip(view.layer_kinds, units.layers, strict=True):
        yield from shard(layers.removesuffix("s"), layers, count_padded(parts, shards))
        if moe is not None:
            experts = sum(part.numel for part in parts if part.kind == "routed")
            yield from _list_unit_calls(view, "efsdp", "experts_of_layer", layers, experts)


def _list_unit_calls(
    view: RankView,
    axis: str,
    unit: str,
    count: str,
    elements: int,
    *,
    is_kept: bool = False,
) -> Iterator[Call]:
    """Yield a rank's FSDP calls in a step for equal FSDP units, such as all MoE layers.

    An FSDP unit is a set of parameters that are gathered together. ``unit`` is the name of these
    units. ``count`` is their number on the rank, as the text of an equation, such as "1" or
    "layers". ``elements`` is the number of parameter elements in one unit. In equations, this
    number has the symbol ``unit`` + "_parameters". ``axis`` is "efsdp" for units of routed experts,
    otherwise "fsdp". With ``is_kept``, units stay gathered from forward to backward.
    """
    spec = view.spec
    group = spec.dims.shard_axes if axis == "fsdp" else (axis,)
    symbol = f"{unit}_parameters"
    call = partial(_make_call, view, symbols={symbol: elements})
    if spec.dims.pp > 1:
        gathers = "1"
    elif is_kept or not spec.reshard:
        gathers = "microbatches"
    else:
        gathers = "2 * microbatches"
    parameters = f"{symbol} * bytes_per_element"
    gradients = f"{symbol} * reduce_bytes"
    syncs = f"{spec.gradient_syncs}"
    yield call(axis, "all_gather", parameters, _multiply(gathers, count), "parameters", group=group)
    yield call(axis, "reduce_scatter", gradients, _multiply(syncs, count), "gradients", group=group)
    shards = count_group_ranks(spec, group)
    shard = f"{gradients} / {shards}"
    yield call("dp", "all_reduce", shard, _multiply(syncs, count), "gradients of shards")


def _multiply(*factors: str) -> str:
    """Return the product of factors as the text of an equation. Factors of "1" are left out.

    No factor may be a sum without parentheses.
    """
    return " * ".join(factor for factor in factors if factor != "1") or "1"


def _list_gradient_calls(view: RankView) -> Iterator[Call]:
    """Yield a rank's calls in a step that reduce gradients over data ranks without FSDP.

    They are all_reduces of buckets over ``dp x cp``, and over ``edp`` for routed experts. With
    ZeRO-1, reduce_scatters of gradients and all_gathers of updated parameters replace them. Torch's
    ZeroRedundancyOptimizer keeps the all_reduces and broadcasts each parameter after the update.
    """
    spec = view.spec
    if spec.dims.is_sharded:
        return
    for axis, group, kinds in _GRADIENT_GROUPS:
        elements = count_elements(view, *kinds)
        if not elements:
            continue
        if spec.zero1 == "distributed":
            yield from _list_zero1_calls(view, axis, group, elements)
            continue
        buckets = spec.count_buckets(elements * spec.reduce_bytes)
        yield _make_call(
            view,
            axis,
            "all_reduce",
            "parameters * reduce_bytes / buckets",
            _multiply(str(spec.gradient_syncs), "buckets"),
            "gradients",
            group=group,
            symbols={"parameters": elements, "buckets": buckets},
        )
    if spec.zero1 == "zero_redundancy":
        yield from _list_broadcasts(view)


def _list_token_count_calls(view: RankView) -> Iterator[Call]:
    """Yield a rank's all_reduces in a step of the number of tokens with a loss.

    There are none if batches have no padding.
    """
    dims = view.spec.dims
    if not view.spec.padding:
        return
    for axis, group in (("fsdp", dims.shard_axes), ("dp", dims.replica_axes)):
        yield _make_call(
            view, axis, "all_reduce", f"{COUNT_BYTES}", "1", "numbers of tokens", group=group
        )


_GRADIENT_GROUPS: tuple[tuple[str, tuple[str, ...], tuple[Kind, ...]], ...] = (
    ("dp", ("dp", "cp"), ("replicated", "split")),
    ("edp", ("edp",), ("routed",)),
)
"""The groups that reduce gradients without FSDP, with the parameters whose gradients they reduce.

Each entry has the axis in metrics, the axes of the process group, and the kinds of parameters.
"""


def _list_zero1_calls(
    view: RankView, axis: str, group: tuple[str, ...], elements: int
) -> Iterator[Call]:
    """Yield a rank's ZeRO-1 calls in a step: reduce_scatters of gradients, then all_gathers.

    The all_gathers collect the updated parameters. ``elements`` is the number of parameter
    elements, which are padded to a multiple of the ranks in ``group`` (arXiv 1910.02054). ``axis``
    is the axis under which metrics count the calls.
    """
    ranks = count_group_ranks(view.spec, group)
    padded = -(-elements // ranks) * ranks
    bucket_bytes = view.spec.bucket_bytes or DEFAULT_BUCKET_BYTES
    buckets = math.ceil(padded * view.spec.bytes_per_element / bucket_bytes)
    symbols = {"parameters": padded, "buckets": buckets}
    call = partial(_make_call, view, axis, group=group, symbols=symbols)
    syncs = _multiply(str(view.spec.gradient_syncs), "buckets")
    yield call("reduce_scatter", "parameters * reduce_bytes / buckets", syncs, "gradients")
    size = "parameters * bytes_per_element / buckets"
    yield call("all_gather", size, "buckets", "updated parameters")


def _list_broadcasts(view: RankView) -> Iterator[Call]:
    """Yield a rank's broadcasts of updated parameters in a step with ZeroRedundancyOptimizer.

    Each parameter tensor is broadcast once. Tensors of equal size share one ``Call``.
    """
    units = list_units(view)
    counts: Counter[int] = Counter()
    for count, parts in ((1, units.embeddings), *units.layers, (1, units.head)):
        for part in parts:
            counts[part.numel] += count
    for numel, count in counts.items():
        yield _make_call(
            view,
            "dp",
            "broadcast",
            "parameters * bytes_per_element",
            "tensors",
            "updated parameters",
            group=("dp", "cp"),
            symbols={"parameters": numel, "tensors": count},
        )
