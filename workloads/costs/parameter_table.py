"""The parameters of a step as a table: what each rank holds of each, once every axis has taken its part. Pure.

``tp`` splits attention and FFN by heads and columns, but for gpt's biases of what comes out; ``ep`` deals out routed
experts and ``etp`` splits them; ``pp`` gives each rank the layers of its stages, the first stage the embeddings, the
last the norm and head.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from parbench.workloads.costs.step_spec import Position, StepSpec
from parbench.workloads.expert_parallel.moe_case import Moe
from parbench.workloads.model.shapes import Shape

Kind = Literal["split", "whole", "routed"]


@dataclass(frozen=True, kw_only=True)
class ParameterPart:
    """What one rank has of one parameter, before ``fsdp`` shards it: its size, and the axes that its gradient is of.

    Gradients of ``split`` parameters are sums over ``tp`` already; those of ``whole`` ones are each rank's own;
    ``routed`` ones are an expert's.
    """

    name: str
    size: tuple[int, ...]
    kind: Kind

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def padded(self, ranks: int) -> int:
        """Return the elements once FSDP has padded the first dimension to a multiple of ``ranks``."""
        return -(-self.size[0] // ranks) * ranks * math.prod(self.size[1:])

    def shard(self, ranks: int, rank: int) -> int:
        """Return the elements of a rank's shard, which is of rows; the last ranks may have fewer, or none."""
        rows = -(-self.size[0] // ranks)
        mine = max(0, min(rows, self.size[0] - rank * rows))
        return mine * math.prod(self.size[1:])


Parts = tuple[ParameterPart, ...]


def parts_of(at: Position) -> Iterator[ParameterPart]:
    """Yield what a rank holds of the parameters of its stages, layer by layer, in the model's order."""
    spec, tables = at.spec, tables_of(at)
    yield from tables.embeddings
    for stage in at.stages:
        first = sum(at.layers_by_stage[:stage])
        for i in range(first, first + at.layers_by_stage[stage]):
            dense = spec.moe is None or i < spec.moe.dense_layers
            for part in layer_parts(spec.shape, spec.size("tp"), None if dense else spec.moe):
                yield ParameterPart(name=f"layers.{i}.{part.name}", size=part.size, kind=part.kind)
    yield from tables.head


class Tables(NamedTuple):
    """What a rank holds of embeddings, of one layer of each kind with how many it has, and of the last norm and head.

    The first kind are all layers but a mixture's ``dense`` ones.
    """

    embeddings: Parts
    layers: tuple[tuple[int, Parts], ...]
    head: Parts

    @property
    def ends(self) -> Parts:
        return (*self.embeddings, *self.head)


def tables_of(at: Position) -> Tables:
    spec = at.spec
    shape, tp = spec.shape, spec.size("tp")
    split = tp if spec.ends == "vocabulary" else 1
    layers = [(at.layers - at.dense_layers, layer_parts(shape, tp, spec.moe))]
    if at.dense_layers:
        layers.append((at.dense_layers, layer_parts(shape, tp, None)))
    embeddings = _embeddings(shape, split) if at.embedding else ()
    head = _head(shape, split, shape.tied and at.embedding) if at.head else ()
    return Tables(embeddings, tuple(layers), head)


def elements_of(at: Position, *kinds: Kind, ranks: int = 1, rank: int = 0) -> int:
    """Return the elements of some kinds that a rank holds; all kinds if none is named.

    ``ranks`` shard each parameter, of which this is the ``rank``-th.
    """
    tables = tables_of(at)
    layers = sum(count * _elements(parts, kinds, ranks, rank) for count, parts in tables.layers)
    return layers + _elements(tables.ends, kinds, ranks, rank)


def ends_elements(at: Position, *kinds: Kind) -> int:
    """Return the elements of some kinds, or of all, that a rank holds outside of layers."""
    return _elements(tables_of(at).ends, kinds, 1, 0)


def layer_elements(at: Position, *kinds: Kind, dense: bool = False) -> int:
    """Return the elements of some kinds, or of all, that a rank holds of one layer, or of a mixture's dense one."""
    return _elements(tables_of(at).layers[-1 if dense else 0][1], kinds, 1, 0)


def num_parameters(shape: Shape, moe: Moe | None = None) -> int:
    """Return the parameters of a whole model, exactly: matrices, norms, biases, tables, head, all experts."""
    return elements_of(_alone(shape, moe))


def num_active_parameters(shape: Shape, moe: Moe | None = None) -> int:
    """Return those that a token meets: all but the experts that it is not sent to."""
    routed = elements_of(_alone(shape, moe), "routed")
    return num_parameters(shape, moe) - (routed - routed * moe.top_k // moe.experts if moe else 0)


def _alone(shape: Shape, moe: Moe | None) -> Position:
    return StepSpec(shape=shape, moe=moe and replace(moe, ep=1, etp=1)).at(0)


def layer_weights(shape: Shape, moe: Moe | None = None) -> float:
    """Return the weights of a layer's products that one token meets: of experts its top-k, the shared, the router."""
    parts = layer_parts(shape, 1, moe and replace(moe, ep=1, etp=1))
    weights = [
        (part.kind, part.numel)
        for part in parts
        if len(part.size) > 1 and not part.name.endswith("bias")
    ]
    return sum(
        numel * (moe.top_k / moe.experts if moe and kind == "routed" else 1)
        for kind, numel in weights
    )


@lru_cache(maxsize=4096)
def _elements(parts: Parts, kinds: tuple[Kind, ...], ranks: int, rank: int) -> int:
    return sum(part.shard(ranks, rank) for part in parts if not kinds or part.kind in kinds)


@lru_cache(maxsize=4096)
def padded_elements(parts: Parts, ranks: int) -> int:
    """Return the elements of all parameters but routed ones as FSDP sends them: each padded on its own."""
    return sum(part.padded(ranks) for part in parts if part.kind != "routed")


@lru_cache(maxsize=256)
def _embeddings(shape: Shape, tp: int) -> Parts:
    kind: Kind = "whole" if tp == 1 else "split"
    tokens = _part("tokens.weight", kind, -(-shape.vocabulary // tp), shape.hidden)
    if not shape.positions:
        return (tokens,)
    return (tokens, _part("positions.weight", kind, -(-shape.sequence // tp), shape.hidden))


@lru_cache(maxsize=256)
def _head(shape: Shape, tp: int, embedded: bool) -> Parts:
    """A tied head that is not ``embedded`` on the same rank is a copy of the embedding."""
    kind: Kind = "whole" if tp == 1 else "split"
    head = (
        () if embedded else (_part("head.weight", kind, -(-shape.vocabulary // tp), shape.hidden),)
    )
    return (*_norm(shape, "norm"), *head)


@lru_cache(maxsize=1024)
def layer_parts(shape: Shape, tp: int, moe: Moe | None) -> Parts:
    """Return what one of ``tp`` ranks holds of one layer; names begin within the layer."""
    return (
        *_norm(shape, "attention_norm"),
        *_attention(shape, tp),
        *_rows(
            "attention.out",
            shape.hidden,
            shape.heads * shape.value_size,
            tp,
            biased=shape.biased("out"),
        ),
        *_norm(shape, "ffn_norm"),
        *(_ffn(shape, "ffn", shape.ffn, tp) if moe is None else _mixture(shape, moe)),
    )


def _attention(shape: Shape, tp: int) -> Iterator[ParameterPart]:
    """Yield what makes queries, keys and values; what latent attention compresses to, every rank of ``tp`` has."""
    hidden, size, latent = shape.hidden, shape.head_size, shape.latent
    if latent is not None:
        if latent.q_lora_rank:
            yield _part("attention.q_a.weight", "whole", latent.q_lora_rank, hidden)
            yield _part("attention.q_a_norm.weight", "whole", latent.q_lora_rank)
        queries = latent.q_lora_rank or hidden
        yield from _columns("attention.q_b", shape.heads * size, queries, tp, biased=False)
        yield _part(
            "attention.kv_a.weight", "whole", latent.kv_lora_rank + latent.qk_rope_head_dim, hidden
        )
        yield _part("attention.kv_a_norm.weight", "whole", latent.kv_lora_rank)
        outer = shape.heads * (latent.qk_nope_head_dim + latent.v_head_dim)
        yield from _columns("attention.kv_b", outer, latent.kv_lora_rank, tp, biased=False)
    else:
        yield from _columns("attention.q", shape.heads * size, hidden, tp, biased=shape.biased("q"))
        yield from _columns(
            "attention.k", shape.kv_heads * size, hidden, tp, biased=shape.biased("k")
        )
        yield from _columns(
            "attention.v", shape.kv_heads * size, hidden, tp, biased=shape.biased("v")
        )
    for part in ("q", "k") if shape.qk_norm else ():
        yield _part(f"attention.{part}_norm.weight", "whole", size)
    if shape.sinks:
        yield _part("attention.sinks", "split", shape.heads // tp)


def _ffn(
    shape: Shape, name: str, wide: int, tp: int, kind: Kind = "split"
) -> Iterator[ParameterPart]:
    biased = shape.biased("ffn")
    if shape.recipe == "llama":
        yield from _columns(f"{name}.gate", wide, shape.hidden, tp, biased=biased, kind=kind)
    yield from _columns(f"{name}.up", wide, shape.hidden, tp, biased=biased, kind=kind)
    yield from _rows(f"{name}.down", shape.hidden, wide, tp, biased=biased, kind=kind)


def _mixture(shape: Shape, moe: Moe) -> Iterator[ParameterPart]:
    yield _part("ffn.router.weight", "whole", moe.experts, shape.hidden)
    if shape.biased("router"):
        yield _part("ffn.router.bias", "whole", moe.experts)
    mine, experts = moe.expert_ffn // moe.etp, moe.experts_per_rank
    for matrix in (*(() if shape.recipe == "gpt" else ("gate",)), "up"):
        yield _part(f"ffn.experts.{matrix}", "routed", experts, shape.hidden, mine)
        if shape.biased("experts"):
            yield _part(f"ffn.experts.{matrix}_bias", "routed", experts, mine)
    yield _part("ffn.experts.down", "routed", experts, mine, shape.hidden)
    if shape.biased("experts"):
        yield _part("ffn.experts.down_bias", "routed", experts, shape.hidden)
    if moe.shared:
        yield from _ffn(shape, "ffn.shared", moe.shared * moe.expert_ffn, 1, "whole")
    if moe.shared_gate:
        yield _part("ffn.shared_gate.weight", "whole", 1, shape.hidden)


def _columns(
    name: str, outer: int, inner: int, tp: int, *, biased: bool, kind: Kind = "split"
) -> Iterator[ParameterPart]:
    yield _part(f"{name}.weight", kind, outer // tp, inner)
    if biased:
        yield _part(f"{name}.bias", kind, outer // tp)


def _rows(
    name: str, outer: int, inner: int, tp: int, *, biased: bool, kind: Kind = "split"
) -> Iterator[ParameterPart]:
    yield _part(f"{name}.weight", kind, outer, inner // tp)
    if biased:
        yield _part(f"{name}.bias", kind, outer)


def _norm(shape: Shape, name: str) -> Iterator[ParameterPart]:
    yield _part(f"{name}.weight", "whole", shape.hidden)
    if shape.recipe == "gpt":
        yield _part(f"{name}.bias", "whole", shape.hidden)


def _part(name: str, kind: Kind, *size: int) -> ParameterPart:
    return ParameterPart(name=name, size=size, kind=kind)
