"""The parameters of a step as a table: what each rank has of each parameter on the mesh. Pure.

``tp`` splits attention and FFN by heads and columns, and embedding and head by vocabulary. ``ep``
spreads routed experts and ``etp`` splits them. ``pp`` gives each rank the layers of its stages, the
first stage the embeddings, the last the final norm and the head.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal, NamedTuple

from parbench.workloads.costs.step_spec import RankView, StepSpec
from parbench.workloads.expert_parallel.moe_case import Moe
from parbench.workloads.mesh.dims import compute_chunk_size
from parbench.workloads.model.shapes import Bias, Shape

Kind = Literal["split", "replicated", "routed"]
"""The way in which the ranks of one stage hold a parameter.

"split": ``tp`` ranks have different parts, except that each has the full bias of a Linear whose
input features are split. "replicated": every ``tp`` rank has all of it.
"routed": it belongs to routed experts, which ``ep`` and ``etp`` distribute in place of ``tp``.
"""


@dataclass(frozen=True, kw_only=True)
class ParameterPart:
    """The part of one parameter that a rank has after tp, ep, etp and pp, before FSDP shards it."""

    name: str
    """The name of the parameter in its layer or, outside of layers, in the model."""
    size: tuple[int, ...]
    """The shape of the rank's part, such as (out_features / tp, in_features)."""
    kind: Kind
    """The way in which ranks hold the parameter: split, replicated or routed, see ``Kind``."""

    @property
    def numel(self) -> int:
        """The number of elements of the rank's part."""
        return math.prod(self.size)

    def count_shard(self, ranks: int, index: int) -> int:
        """Return the number of elements in the FSDP shard of the rank with this index.

        The rows are split over ``ranks`` ranks.
        """
        return compute_chunk_size(self.size[0], ranks, index) * math.prod(self.size[1:])


Parts = tuple[ParameterPart, ...]
"""Parameters of one rank, before FSDP shards them."""


class Units(NamedTuple):
    """The parameters of one rank by FSDP unit, before FSDP shards them.

    The units are the embeddings, each layer, and the final norm with the head.
    """

    embeddings: Parts
    """The embedding parameters, empty without the first pipeline stage."""
    layers: tuple[tuple[int, Parts], ...]
    """For equal layers, their number on the rank and the parameters of one of them.

    There are at most two entries: layers with experts and layers with an FFN.
    """
    head: Parts
    """The parameters of the final norm and the head, empty without the last pipeline stage."""


def list_units(view: RankView) -> Units:
    """Return the parameters of one rank by FSDP unit, before FSDP shards them.

    An FSDP unit is a set of parameters that are gathered together. Equal layers share an entry of
    ``Units.layers``: the number of these layers on the rank, and the parameters of one of them.
    Layers with experts are one entry, and layers with an FFN another. The parameters of a layer
    include its routed experts, although FSDP shards these in a separate unit, if at all.
    """
    shape, tp = view.spec.shape, view.spec.dims.tp
    layers = [(kind.layers, list_layer_parts(shape, tp, kind.moe)) for kind in view.layer_kinds]
    rows = compute_chunk_size(shape.vocabulary, tp, view.coordinate["tp"])
    embeddings: Parts = ()
    if view.has_embedding:
        embeddings = (_make_part("token_embedding.weight", "split", rows, shape.hidden),)
    if view.has_embedding and shape.recipe == "gpt":
        size = (shape.sequence, shape.hidden)
        embeddings += (_make_part("position_embedding.weight", "replicated", *size),)
    head: Parts = ()
    if view.has_head:
        head = tuple(_list_norm_parts(shape, "norm"))
    # A head with the weights of the embedding counts once on a rank that has both.
    if view.has_head and not (shape.tied and view.has_embedding):
        head += (_make_part("head.weight", "split", rows, shape.hidden),)
    return Units(embeddings, tuple(layers), head)


def count_elements(view: RankView, *kinds: Kind, ranks: int = 1, index: int = 0) -> int:
    """Return the number of elements of a rank's parameters, or of one FSDP shard of them.

    ``kinds`` selects parameters: "split" over ``tp``, "replicated" over ``tp``, or "routed" for
    those of routed experts. Without ``kinds`` all count. The rows of each parameter are split into
    ``ranks`` shards, of which only the one with number ``index`` counts. With ``ranks`` 1, the
    result is the number of elements before FSDP shards them.
    """
    units = list_units(view)
    layers = sum(count * _count_shard(parts, kinds, ranks, index) for count, parts in units.layers)
    return layers + _count_shard(units.embeddings + units.head, kinds, ranks, index)


def count_shard(view: RankView, *kinds: Kind) -> int:
    """Return the number of elements of the FSDP shard that one rank keeps of its parameters.

    ``kinds`` selects parameters as in ``count_elements``. Without FSDP, the shard is all that the
    rank holds.
    """
    dims = view.spec.dims
    index = dims.index(view.rank, *dims.shard_axes)
    return count_elements(view, *kinds, ranks=dims.shard_size, index=index)


def count_parameters(shape: Shape, moe: Moe | None = None) -> int:
    """Return the number of parameter elements of the full model, with all experts."""
    return count_elements(_view_full_model(shape, moe))


def count_active_parameters(shape: Shape, moe: Moe | None = None) -> int:
    """Return the number of parameter elements of the full model that one token uses.

    Of the routed experts only ``top_k`` count. For a dense model all parameters count.
    """
    parameters = count_parameters(shape, moe)
    if moe is None:
        return parameters
    routed = count_elements(_view_full_model(shape, moe), "routed")
    return parameters - (routed - routed * moe.top_k // moe.experts)


def _view_full_model(shape: Shape, moe: Moe | None) -> RankView:
    """Return the view of the only rank of a step without parallelism, which has the full model.

    The rank has all layers, the embedding, the head and all routed experts.
    """
    return StepSpec(shape=shape, moe=moe and moe.on_one_rank()).make_rank_view(0)


def count_layer_matmul_weights(shape: Shape, moe: Moe | None = None) -> float:
    """Return the number of weights in GEMMs of one layer by which one token is multiplied.

    They are the weights of attention, and of the FFN or, with ``moe``, of the router, the shared
    experts and ``top_k`` of the routed experts. Biases and norms do not count. The result is a
    float because the weights of all routed experts are multiplied by ``top_k / experts``.
    """
    weights = 0.0
    for part in list_layer_parts(shape, 1, moe and moe.on_one_rank()):
        if len(part.size) == 1 or part.name.endswith("bias"):
            continue
        is_expert = moe is not None and part.kind == "routed"
        weights += part.numel * (moe.top_k / moe.experts if moe and is_expert else 1)
    return weights


@lru_cache(maxsize=4096)
def _count_shard(parts: Parts, kinds: tuple[Kind, ...], ranks: int, index: int) -> int:
    """Return the number of elements of the parameters ``parts`` in one FSDP shard of them.

    Only parameters of ``kinds`` count, or all if ``kinds`` is empty. There are ``ranks`` shards,
    and ``index`` is the number of the counted one, from 0.
    """
    return sum(part.count_shard(ranks, index) for part in parts if not kinds or part.kind in kinds)


def count_padded(parts: Parts, ranks: int) -> int:
    """Return the number of elements of the output of an all_gather of one FSDP unit.

    The output has the parameters of the unit with padding: FSDP pads the rows of each parameter to
    a multiple of ``ranks``, the number of ranks of the all_gather. ``parts`` are the parameters of
    the unit, such as those of a layer. Routed experts do not count, because they are a separate
    unit.
    """
    largest_shard = _count_shard(parts, ("split", "replicated"), ranks, 0)
    return ranks * largest_shard


@lru_cache(maxsize=1024)
def list_layer_parts(shape: Shape, tp: int, moe: Moe | None) -> Parts:
    """Return the parameters of one layer on a rank, after ``tp`` has split them.

    With ``moe``, the layer has the rank's part of the experts, which ``ep`` and ``etp`` distribute.
    None means a layer with an FFN. Names are relative to the layer, such as ``attention.q.weight``.
    """
    return (
        *_list_norm_parts(shape, "attention_norm"),
        *_list_attention_parts(shape, tp),
        *_list_linear_parts(
            "attention.out",
            shape.hidden,
            shape.heads * shape.value_size // tp,
            has_bias=shape.has_bias("out"),
        ),
        *_list_norm_parts(shape, "ffn_norm"),
        *(
            _list_ffn_parts(shape, "ffn", shape.ffn // tp)
            if moe is None
            else _list_moe_parts(shape, moe)
        ),
    )


def _list_attention_parts(shape: Shape, tp: int) -> Iterator[ParameterPart]:
    """Yield a rank's parameters of attention except the output projection, after ``tp``.

    They are the projections to queries, keys and values, and the norms of queries and keys. The
    projections to the compressed queries, keys and values of latent attention are not split by
    ``tp``.
    """
    hidden, size, latent = shape.hidden, shape.head_size, shape.latent
    if latent is not None:
        if latent.q_lora_rank:
            yield _make_part("attention.q_a.weight", "replicated", latent.q_lora_rank, hidden)
            yield _make_part("attention.q_a_norm.weight", "replicated", latent.q_lora_rank)
        queries = latent.q_lora_rank or hidden
        yield from _list_linear_parts("attention.q_b", shape.heads * size // tp, queries)
        yield _make_part(
            "attention.kv_a.weight",
            "replicated",
            latent.kv_lora_rank + latent.qk_rope_head_dim,
            hidden,
        )
        yield _make_part("attention.kv_a_norm.weight", "replicated", latent.kv_lora_rank)
        outer = shape.heads * (latent.qk_nope_head_dim + latent.v_head_dim)
        yield from _list_linear_parts("attention.kv_b", outer // tp, latent.kv_lora_rank)
    else:
        heads: dict[Bias, int] = {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads}
        for name, count in heads.items():
            has_bias = shape.has_bias(name)
            yield from _list_linear_parts(
                f"attention.{name}", count * size // tp, hidden, has_bias=has_bias
            )
    for part in ("q", "k") if shape.qk_norm else ():
        yield _make_part(f"attention.{part}_norm.weight", "replicated", size)


def _list_ffn_parts(
    shape: Shape, name: str, size: int, kind: Kind = "split"
) -> Iterator[ParameterPart]:
    """Yield the weights and biases of one FFN, or of a layer's shared experts, on a rank.

    ``name`` is the prefix of the parameters' names, and ``size`` the inner size on this rank.
    ``kind`` is "replicated" for shared experts, which ``tp`` does not split.
    """
    linear = partial(_list_linear_parts, has_bias=shape.has_bias("ffn"), kind=kind)
    if shape.recipe == "llama":
        yield from linear(f"{name}.gate", size, shape.hidden)
    yield from linear(f"{name}.up", size, shape.hidden)
    yield from linear(f"{name}.down", shape.hidden, size)


def _list_moe_parts(shape: Shape, moe: Moe) -> Iterator[ParameterPart]:
    """Yield the parameters of one MoE block on a rank.

    They are the router, the rank's routed experts and the shared experts.
    """
    yield _make_part("ffn.router.weight", "replicated", moe.experts, shape.hidden)
    if shape.has_bias("router"):
        yield _make_part("ffn.router.bias", "replicated", moe.experts)
    rows, experts = moe.expert_ffn // moe.etp, moe.experts_per_rank
    for matrix in ("up",) if shape.recipe == "gpt" else ("gate", "up"):
        yield _make_part(f"ffn.experts.{matrix}", "routed", experts, shape.hidden, rows)
    yield _make_part("ffn.experts.down", "routed", experts, rows, shape.hidden)
    if moe.shared:
        yield from _list_ffn_parts(shape, "ffn.shared", moe.shared * moe.expert_ffn, "replicated")


def _list_linear_parts(
    name: str, outer: int, inner: int, *, has_bias: bool = False, kind: Kind = "split"
) -> Iterator[ParameterPart]:
    """Yield a rank's weight (outer, inner) of a Linear and, with ``has_bias``, its bias (outer).

    ``outer`` and ``inner`` are the numbers of output and input features of the rank's part. The
    caller has divided one of them by ``tp``, or none. The weight and the bias both get ``kind``.

    If ``tp`` splits the output features, each rank has the elements of the bias for its outputs. If
    ``tp`` splits the input features, every rank has the full bias and computes its full gradient,
    because the output is summed over ranks. The bias then has the kind "split" all the same.
    """
    yield _make_part(f"{name}.weight", kind, outer, inner)
    if has_bias:
        yield _make_part(f"{name}.bias", kind, outer)


def _list_norm_parts(shape: Shape, name: str) -> Iterator[ParameterPart]:
    """Yield the weight of the norm ``name`` and, for gpt, its bias."""
    yield _make_part(f"{name}.weight", "replicated", shape.hidden)
    if shape.recipe == "gpt":
        yield _make_part(f"{name}.bias", "replicated", shape.hidden)


def _make_part(name: str, kind: Kind, *size: int) -> ParameterPart:
    """Return the parameter ``name``, whose part on the rank has the shape ``size``."""
    return ParameterPart(name=name, size=size, kind=kind)
