"""The parameters of a step as a table: what each rank holds of each, once every axis has taken its part. Pure.

``tp`` splits attention and FFN by heads and columns, but for gpt's biases of what comes out; ``ep`` deals out routed
experts and ``etp`` splits them; ``pp`` gives each rank the layers of its stages, the first stage the embeddings, the
last the norm and head.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

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
        """Elements."""
        return math.prod(self.size)

    def shard(self, ranks: int, rank: int) -> int:
        """Return the elements of a rank's shard, which is of rows; the last ranks may have fewer, or none."""
        rows = -(-self.size[0] // ranks)
        mine = max(0, min(rows, self.size[0] - rank * rows))
        return mine * math.prod(self.size[1:])


def stages_of_rank(schedule: str, pp: int, chunks: int, rank: int) -> tuple[int, ...]:
    """Return the stages of a rank without its order of actions: every P-th, or both ends of a V."""
    if schedule in ("zb_v", "dualpipe_v"):
        return (rank, 2 * pp - 1 - rank)
    return tuple(range(rank, pp * chunks, pp))


def parts_of_rank(
    shape: Shape, stages: Sequence[int], layers_by_stage: Sequence[int], *, tp: int = 1, moe: Moe | None = None
) -> list[ParameterPart]:
    """Return what a rank holds of the parameters of its stages."""
    found: list[ParameterPart] = []
    if 0 in stages:
        found += _embeddings(shape)
    for stage in stages:
        first = sum(layers_by_stage[:stage])
        for layer in range(first, first + layers_by_stage[stage]):
            found += _layer(shape, f"layers.{layer}", tp, moe)
    if len(layers_by_stage) - 1 in stages:
        found += [*_norm(shape, "norm"), _part("head.weight", "whole", shape.vocabulary, shape.hidden)]
    return found


def numel_by_kind(parts: Sequence[ParameterPart], fsdp: int = 1, rank: int = 0) -> Mapping[Kind, int]:
    """Return the elements that a rank holds by kind; ``fsdp`` ranks shard all but routed ones, this is the rank-th."""
    found: dict[Kind, int] = {"split": 0, "whole": 0, "routed": 0}
    for part in parts:
        found[part.kind] += part.numel if part.kind == "routed" else part.shard(fsdp, rank)
    return found


def _embeddings(shape: Shape) -> Iterator[ParameterPart]:
    yield _part("tokens.weight", "whole", shape.vocabulary, shape.hidden)
    if shape.recipe == "gpt":
        yield _part("positions.weight", "whole", shape.sequence, shape.hidden)


def _layer(shape: Shape, name: str, tp: int, moe: Moe | None) -> Iterator[ParameterPart]:
    hidden, keys, biased = shape.hidden, shape.kv_heads * shape.head_size, shape.recipe == "gpt"
    yield from _norm(shape, f"{name}.attention_norm")
    yield from _columns(f"{name}.attention.q", hidden, hidden, tp, biased=biased)
    yield from _columns(f"{name}.attention.k", keys, hidden, tp, biased=False)
    yield from _columns(f"{name}.attention.v", keys, hidden, tp, biased=biased)
    yield from _rows(f"{name}.attention.out", hidden, hidden, tp, biased=biased)
    yield from _norm(shape, f"{name}.ffn_norm")
    if moe is None:
        yield from _ffn(shape, f"{name}.ffn", shape.ffn, tp)
    else:
        yield from _mixture(shape, f"{name}.ffn", moe)


def _ffn(shape: Shape, name: str, wide: int, tp: int, kind: Kind = "split") -> Iterator[ParameterPart]:
    biased = shape.recipe == "gpt"
    if not biased:
        yield from _columns(f"{name}.gate", wide, shape.hidden, tp, biased=False, kind=kind)
    yield from _columns(f"{name}.up", wide, shape.hidden, tp, biased=biased, kind=kind)
    yield from _rows(f"{name}.down", shape.hidden, wide, tp, biased=biased, kind=kind)


def _mixture(shape: Shape, name: str, moe: Moe) -> Iterator[ParameterPart]:
    yield _part(f"{name}.router.weight", "whole", moe.experts, shape.hidden)
    mine = moe.expert_ffn // moe.etp
    for matrix in (*(() if shape.recipe == "gpt" else ("gate",)), "up"):
        yield _part(f"{name}.experts.{matrix}", "routed", moe.experts_per_rank, shape.hidden, mine)
    yield _part(f"{name}.experts.down", "routed", moe.experts_per_rank, mine, shape.hidden)
    if moe.shared:
        yield from _ffn(shape, f"{name}.shared", moe.shared * moe.expert_ffn, 1, "whole")


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
