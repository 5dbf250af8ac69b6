"""The parameters of a step as a table: what each rank holds of each, once every axis has taken its part. Pure.

``tp`` splits attention and FFN by heads and columns, but for gpt's biases of what comes out; ``ep`` deals out routed
experts and ``etp`` splits them; ``pp`` gives each rank the layers of its stages, the first stage the embeddings, the
last the norm and head.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from workloads.costs.step_spec import Position
from workloads.expert_parallel.moe_case import Moe
from workloads.model.shapes import Shape

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
    embeddings, layer, head = tables_of(at)
    yield from embeddings
    for stage in at.stages:
        first = sum(at.layers_by_stage[:stage])
        for i in range(first, first + at.layers_by_stage[stage]):
            for part in layer:
                yield ParameterPart(name=f"layers.{i}.{part.name}", size=part.size, kind=part.kind)
    yield from head


def tables_of(at: Position) -> tuple[Parts, Parts, Parts]:
    """Return what a rank holds of embeddings, of one layer, and of the last norm and head."""
    spec = at.spec
    tp = spec.size("tp")
    return (
        _embeddings(spec.shape, tp if spec.ends == "vocabulary" else 1) if at.embedding else (),
        layer_parts(spec.shape, tp, spec.moe),
        _head(spec.shape, tp if spec.ends == "vocabulary" else 1) if at.head else (),
    )


def elements_of(at: Position, *kinds: Kind, ranks: int = 1, rank: int = 0) -> int:
    """Return the elements of some kinds that a rank holds; all kinds if none is named.

    ``ranks`` shard each parameter, of which this is the ``rank``-th.
    """
    embeddings, layer, head = tables_of(at)
    return _elements(layer, kinds, ranks, rank) * at.layers + _elements((*embeddings, *head), kinds, ranks, rank)


def layer_elements(at: Position, *kinds: Kind) -> int:
    """Return the elements of some kinds, or of all, that a rank holds of one layer."""
    return _elements(tables_of(at)[1], kinds, 1, 0)


def num_parameters(shape: Shape, moe: Moe | None = None) -> int:
    """Return the parameters of a whole model, exactly: matrices, norms, biases, tables, untied head, all experts."""
    alone = None if moe is None else replace(moe, ep=1, etp=1)
    ends = (*_embeddings(shape, 1), *_head(shape, 1))
    return shape.layers * _elements(layer_parts(shape, 1, alone), (), 1, 0) + _elements(ends, (), 1, 0)


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
    if shape.recipe == "llama":
        return (tokens,)
    return (tokens, _part("positions.weight", kind, -(-shape.sequence // tp), shape.hidden))


@lru_cache(maxsize=256)
def _head(shape: Shape, tp: int) -> Parts:
    kind: Kind = "whole" if tp == 1 else "split"
    return (*_norm(shape, "norm"), _part("head.weight", kind, -(-shape.vocabulary // tp), shape.hidden))


@lru_cache(maxsize=1024)
def layer_parts(shape: Shape, tp: int, moe: Moe | None) -> Parts:
    """Return what one of ``tp`` ranks holds of one layer; names begin within the layer."""
    hidden, keys, biased = shape.hidden, shape.kv_heads * shape.head_size, shape.recipe == "gpt"
    return (
        *_norm(shape, "attention_norm"),
        *_columns("attention.q", hidden, hidden, tp, biased=biased),
        *_columns("attention.k", keys, hidden, tp, biased=False),
        *_columns("attention.v", keys, hidden, tp, biased=biased),
        *_rows("attention.out", hidden, hidden, tp, biased=biased),
        *_norm(shape, "ffn_norm"),
        *(_ffn(shape, "ffn", shape.ffn, tp) if moe is None else _mixture(shape, moe)),
    )


def _ffn(shape: Shape, name: str, wide: int, tp: int, kind: Kind = "split") -> Iterator[ParameterPart]:
    biased = shape.recipe == "gpt"
    if not biased:
        yield from _columns(f"{name}.gate", wide, shape.hidden, tp, biased=False, kind=kind)
    yield from _columns(f"{name}.up", wide, shape.hidden, tp, biased=biased, kind=kind)
    yield from _rows(f"{name}.down", shape.hidden, wide, tp, biased=biased, kind=kind)


def _mixture(shape: Shape, moe: Moe) -> Iterator[ParameterPart]:
    yield _part("ffn.router.weight", "whole", moe.experts, shape.hidden)
    mine = moe.expert_ffn // moe.etp
    for matrix in (*(() if shape.recipe == "gpt" else ("gate",)), "up"):
        yield _part(f"ffn.experts.{matrix}", "routed", moe.experts_per_rank, shape.hidden, mine)
    yield _part("ffn.experts.down", "routed", moe.experts_per_rank, mine, shape.hidden)
    if moe.shared:
        yield from _ffn(shape, "ffn.shared", moe.shared * moe.expert_ffn, 1, "whole")


def _columns(
    name: str, outer: int, inner: int, tp: int, *, biased: bool, kind: Kind = "split"
) -> Iterator[ParameterPart]:
    yield _part(f"{name}.weight", kind, outer // tp, inner)
    if biased:
        yield _part(f"{name}.bias", kind, outer // tp)


def _rows(name: str, outer: int, inner: int, tp: int, *, biased: bool, kind: Kind = "split") -> Iterator[ParameterPart]:
    yield _part(f"{name}.weight", kind, outer, inner // tp)
    if biased:
        yield _part(f"{name}.bias", kind, outer)


def _norm(shape: Shape, name: str) -> Iterator[ParameterPart]:
    yield _part(f"{name}.weight", "whole", shape.hidden)
    if shape.recipe == "gpt":
        yield _part(f"{name}.bias", "whole", shape.hidden)


def _part(name: str, kind: Kind, *size: int) -> ParameterPart:
    return ParameterPart(name=name, size=size, kind=kind)
