"""The parameters of a step as a table: what each rank has of each parameter on the mesh. Pure.

``tp`` splits attention and FFN by heads and columns, and embedding and head by vocabulary. ``ep``
spreads routed experts and ``etp`` splits them. ``pp`` gives each rank the layers of its stages, the
first stage the embeddings, the last the final norm and the head.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Literal, NamedTuple

from parbench.workloads.costs.step_spec import RankView, StepSpec
from parbench.workloads.expert_parallel.moe_case import Moe
from parbench.workloads.model.shapes import Bias, Shape
from parbench.workloads.parallel.dims import compute_chunk_size

Kind = Literal["split", "replicated", "routed"]
"""The effect of ``tp`` on a parameter: split, replicated, or an expert of ``ep`` and ``etp``."""


@dataclass(frozen=True, kw_only=True)
class ParameterPart:
    """A rank's part of one parameter, before FSDP shards it."""

    name: str
    size: tuple[int, ...]
    kind: Kind

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def count_padded(self, ranks: int) -> int:
        """Return the number of elements after FSDP pads the rows to a multiple of ``ranks``."""
        return -(-self.size[0] // ranks) * ranks * math.prod(self.size[1:])

    def count_shard(self, ranks: int, index: int) -> int:
        """Return the number of elements in shard ``index`` of ``ranks`` shards of rows."""
        return compute_chunk_size(self.size[0], ranks, index) * math.prod(self.size[1:])


Parts = tuple[ParameterPart, ...]


def list_parts(view: RankView) -> Iterator[ParameterPart]:
    """Yield a rank's parts of the parameters of its stages, in the order of the model."""
    spec, units = view.spec, list_units(view)
    yield from units.embeddings
    for stage in view.stages:
        first = sum(view.layers_by_stage[:stage])
        for i in range(first, first + view.layers_by_stage[stage]):
            is_dense = spec.moe is None or i < spec.moe.dense_layers
            for part in layer_parts(spec.shape, spec.dims.tp, None if is_dense else spec.moe):
                yield replace(part, name=f"layers.{i}.{part.name}")
    yield from units.head


class Units(NamedTuple):
    """A rank's parameters by FSDP unit, before FSDP shards them."""

    embeddings: Parts
    """Empty without the first stage."""
    layers: tuple[tuple[int, Parts], ...]
    """For each kind of layer, the number of layers and the parameters of one of them."""
    head: Parts
    """The final norm and the head, empty without the last stage."""


def list_units(view: RankView) -> Units:
    """Return a rank's parameters by FSDP unit, before FSDP shards them.

    Layers of the same kind (see ``RankView.layer_kinds``) are one entry with their count.
    """
    shape, tp = view.spec.shape, view.spec.dims.tp
    layers = [(kind.layers, layer_parts(shape, tp, kind.moe)) for kind in view.layer_kinds]
    rows = compute_chunk_size(shape.vocabulary, tp, view.coordinate["tp"])
    embeddings = _embeddings(shape, rows) if view.has_embedding else ()
    is_tied_here = shape.tied and view.has_embedding
    head = _head(shape, rows, is_tied_here) if view.has_head else ()
    return Units(embeddings, tuple(layers), head)


def count_elements(view: RankView, *kinds: Kind) -> int:
    """Return the number of elements that a rank has of some kinds before FSDP shards them.

    Without ``kinds``, all parameters count.
    """
    return _count_in_units(view, kinds, 1, 0)


def count_shard(view: RankView, *kinds: Kind) -> int:
    """Return the number of elements of some kinds, or of all, in the rank's FSDP shard."""
    dims = view.spec.dims
    return _count_in_units(view, kinds, dims.shard_size, dims.index(view.rank, *dims.shard_axes))


def _count_in_units(view: RankView, kinds: tuple[Kind, ...], ranks: int, index: int) -> int:
    """Return the number of elements of ``kinds``, or of all, in shard ``index`` of ``ranks``."""
    units = list_units(view)
    layers = sum(count * _count_shard(parts, kinds, ranks, index) for count, parts in units.layers)
    return layers + _count_shard(units.embeddings + units.head, kinds, ranks, index)


def num_parameters(shape: Shape, moe: Moe | None = None) -> int:
    """Return the number of parameters of the full model, with all experts."""
    return count_elements(_full_model(shape, moe))


def num_active_parameters(shape: Shape, moe: Moe | None = None) -> int:
    """Return the number of parameters used for each token, of ``top_k`` experts only."""
    parameters = num_parameters(shape, moe)
    if moe is None:
        return parameters
    routed = count_elements(_full_model(shape, moe), "routed")
    return parameters - (routed - routed * moe.top_k // moe.experts)


def _full_model(shape: Shape, moe: Moe | None) -> RankView:
    """Return the view of a single rank that holds the whole model."""
    return StepSpec(shape=shape, moe=moe and moe.on_one_rank()).rank_view(0)


def count_matmul_weights(shape: Shape, moe: Moe | None = None) -> float:
    """Return the number of weights in a layer's GEMMs that are used for each token.

    Of routed experts, only the ``top_k`` of a token count.
    """
    weights = 0.0
    for part in layer_parts(shape, 1, moe and moe.on_one_rank()):
        if len(part.size) == 1 or part.name.endswith("bias"):
            continue
        is_expert = moe is not None and part.kind == "routed"
        weights += part.numel * (moe.top_k / moe.experts if moe and is_expert else 1)
    return weights


@lru_cache(maxsize=4096)
def _count_shard(parts: Parts, kinds: tuple[Kind, ...], ranks: int, index: int) -> int:
    """Return the number of elements of ``kinds``, or of all, in shard ``index`` of ``ranks``."""
    return sum(part.count_shard(ranks, index) for part in parts if not kinds or part.kind in kinds)


@lru_cache(maxsize=4096)
def count_padded(parts: Parts, ranks: int) -> int:
    """Return the number of elements of a unit that FSDP sends.

    FSDP pads the rows of each parameter to a multiple of ``ranks``. Routed experts are left out.
    """
    return sum(part.count_padded(ranks) for part in parts if part.kind != "routed")


@lru_cache(maxsize=256)
def _embeddings(shape: Shape, rows: int) -> Parts:
    """Return the embeddings: of tokens, which ``tp`` splits, and of learned positions."""
    tokens = _part("token_embedding.weight", "split", rows, shape.hidden)
    if not shape.has_learned_positions:
        return (tokens,)
    return (tokens, _part("position_embedding.weight", "replicated", shape.sequence, shape.hidden))


@lru_cache(maxsize=256)
def _head(shape: Shape, rows: int, is_tied_here: bool) -> Parts:
    """Return the final norm and the head. A head tied to the rank's embedding is left out."""
    norm = tuple(_list_norm_parts(shape, "norm"))
    if is_tied_here:
        return norm
    return (*norm, _part("head.weight", "split", rows, shape.hidden))


@lru_cache(maxsize=1024)
def layer_parts(shape: Shape, tp: int, moe: Moe | None) -> Parts:
    """Return a rank's parameters of one layer after ``tp``. Names are relative to the layer."""
    return (
        *_list_norm_parts(shape, "attention_norm"),
        *_attention(shape, tp),
        *_linear(
            "attention.out",
            shape.hidden,
            shape.heads * shape.value_size // tp,
            has_bias=shape.has_bias("out"),
        ),
        *_list_norm_parts(shape, "ffn_norm"),
        *(_ffn(shape, "ffn", shape.ffn // tp) if moe is None else _mixture(shape, moe)),
    )


def _attention(shape: Shape, tp: int) -> Iterator[ParameterPart]:
    """Yield the projections to queries, keys and values. Latent compressions are replicated."""
    hidden, size, latent = shape.hidden, shape.head_size, shape.latent
    if latent is not None:
        if latent.q_lora_rank:
            yield _part("attention.q_a.weight", "replicated", latent.q_lora_rank, hidden)
            yield _part("attention.q_a_norm.weight", "replicated", latent.q_lora_rank)
        queries = latent.q_lora_rank or hidden
        yield from _linear("attention.q_b", shape.heads * size // tp, queries)
        yield _part(
            "attention.kv_a.weight",
            "replicated",
            latent.kv_lora_rank + latent.qk_rope_head_dim,
            hidden,
        )
        yield _part("attention.kv_a_norm.weight", "replicated", latent.kv_lora_rank)
        outer = shape.heads * (latent.qk_nope_head_dim + latent.v_head_dim)
        yield from _linear("attention.kv_b", outer // tp, latent.kv_lora_rank)
    else:
        heads: dict[Bias, int] = {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads}
        for name, count in heads.items():
            has_bias = shape.has_bias(name)
            yield from _linear(f"attention.{name}", count * size // tp, hidden, has_bias=has_bias)
    for part in ("q", "k") if shape.qk_norm else ():
        yield _part(f"attention.{part}_norm.weight", "replicated", size)
    if shape.sinks:
        yield _part("attention.sinks", "split", shape.heads // tp)


def _ffn(shape: Shape, name: str, size: int, kind: Kind = "split") -> Iterator[ParameterPart]:
    """Yield the matrices and biases of an FFN whose inner size on this rank is ``size``."""
    linear = partial(_linear, has_bias=shape.has_bias("ffn"), kind=kind)
    if shape.recipe == "llama":
        yield from linear(f"{name}.gate", size, shape.hidden)
    yield from linear(f"{name}.up", size, shape.hidden)
    yield from linear(f"{name}.down", shape.hidden, size)


def _mixture(shape: Shape, moe: Moe) -> Iterator[ParameterPart]:
    """Yield the parameters of a router, the routed experts and the shared experts of a layer."""
    yield _part("ffn.router.weight", "replicated", moe.experts, shape.hidden)
    if shape.has_bias("router"):
        yield _part("ffn.router.bias", "replicated", moe.experts)
    rows, experts = moe.expert_ffn // moe.etp, moe.experts_per_rank
    for matrix in (*(() if shape.recipe == "gpt" else ("gate",)), "up"):
        yield _part(f"ffn.experts.{matrix}", "routed", experts, shape.hidden, rows)
        if shape.has_bias("experts"):
            yield _part(f"ffn.experts.{matrix}_bias", "routed", experts, rows)
    yield _part("ffn.experts.down", "routed", experts, rows, shape.hidden)
    if shape.has_bias("experts"):
        yield _part("ffn.experts.down_bias", "routed", experts, shape.hidden)
    if moe.shared:
        yield from _ffn(shape, "ffn.shared", moe.shared * moe.expert_ffn, "replicated")
    if moe.shared_gate:
        yield _part("ffn.shared_gate.weight", "replicated", 1, shape.hidden)


def _linear(
    name: str, outer: int, inner: int, *, has_bias: bool = False, kind: Kind = "split"
) -> Iterator[ParameterPart]:
    """Yield a rank's part (outer, inner) of a matrix, and its bias (outer).

    If ``tp`` splits ``inner``, every rank has the full bias and its full gradient, because the
    output is summed over ranks.
    """
    yield _part(f"{name}.weight", kind, outer, inner)
    if has_bias:
        yield _part(f"{name}.bias", kind, outer)


def _list_norm_parts(shape: Shape, name: str) -> Iterator[ParameterPart]:
    """Yield the weight of a norm and, for gpt, its bias."""
    yield _part(f"{name}.weight", "replicated", shape.hidden)
    if shape.recipe == "gpt":
        yield _part(f"{name}.bias", "replicated", shape.hidden)


def _part(name: str, kind: Kind, *size: int) -> ParameterPart:
    return ParameterPart(name=name, size=size, kind=kind)
