"""Closed forms of the activations that a rank of a mesh keeps for backward, term by term. Pure.

b s h V are microbatch, sequence, hidden size and vocabulary, a heads of size d, g = a_kv / a, f the FFN's inner size, e
the bytes of an element; c t the ranks of cp and tp. A rank has n = b s / (c t) tokens, its blocks G = b s / c.

* norm: n (h + 2) e for LayerNorm, input and two values a token; n (h e + 4) for a fused RMSNorm, n (8 h + 4) for one
  composed of elementary operations in float32, which keeps what it makes of its input, too.
* attention: G h e of its input; G h e (2 + 2g) / t of q, k, v and output; G h e / t of the output as the next product
  wants it, where it lies otherwise: for turned queries (llama), or c > 1, of several heads, but where c = 1 not in
  float32 on CUDA, whose kernel lays it out by token; 4 G a / t of log-sum-exps; 8 (s/c) d of llama's angles.
* FFN: G h e of its input; G f e / t twice (before and after GELU), or four times (gate, its SiLU, up, their product).
* mixture of E experts of f' inside, k a token, E' on a rank: n (4 h + 4 E + 8 k) of router and scores, and 4 E h of its
  weights where e < 4; n k ((3 h + m f' + 1) e + 16) + 4 E' of experts where routes are even, m as for FFN, and 16 n k
  where they travel; m n f' e of each shared one, and n h e of their input where e < 4. Where X ranks split experts,
  rows are of X n tokens and f' / X.
* ends: 8 n of tokens, 8 n / b of positions; a norm and n h e before the head; n V e + 8 n + e of the loss.

``full`` checkpointing keeps n h e of a layer, its input; ``selective`` that, G e (h (2 + 2g) / t + m/2 f / t + 2 h) of
products and attention and 4 G a / t. Where c > 1 a ring keeps the outputs of its blocks too, of which nothing is said.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from workloads.costs.mesh_costs import Place, place_of
from workloads.expert_parallel.moe_case import Moe
from workloads.mesh.axes import size_of
from workloads.model.shapes import Shape
from workloads.pipeline_parallel.schedules import Schedule, make_schedule, peak_held

_INDEX_BYTES = 8
_WIDE_BYTES = 4
_ENDS_BYTES = 4
_INDICES_AT_HOME = 2
"""Of a row: its token, and which of the token's choices it is."""
_INDICES_AWAY = 2
"""Of a row: where it is among those that came, and where among those that go back."""


@dataclass(frozen=True, kw_only=True)
class StageActivations:
    """Bytes that backward needs of one microbatch in one stage; ends are 0 where another stage has them."""

    layers: float
    embeddings: float
    head: float
    loss: float

    @property
    def total(self) -> float:
        """All terms."""
        return self.layers + self.embeddings + self.head + self.loss


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The sizes from which the terms follow; ``fused_norms`` is whether an RMSNorm is one kernel, which means CUDA."""

    shape: Shape
    mesh: Mapping[str, int]
    microbatch: int
    element_bytes: int
    checkpointing: str = "none"
    moe: Moe | None = None
    fused_norms: bool = False

    @property
    def sequence(self) -> int:
        """Positions of a sequence that a block has: s / c."""
        return self.shape.sequence // size_of(self.mesh, "cp")

    @property
    def gathered(self) -> int:
        """Tokens that a block has: G."""
        return self.microbatch * self.sequence

    @property
    def tokens(self) -> int:
        """Tokens of this rank between blocks: n."""
        return self.gathered // size_of(self.mesh, "tp")

    def wide(self, elements: float) -> float:
        """Return the bytes of so many elements a token of this rank."""
        return self.tokens * elements * self.element_bytes

    def split(self, elements: float) -> float:
        """Return the bytes of so many elements a token of a block, of which ``tp`` leaves a part."""
        return self.gathered * elements * self.element_bytes / size_of(self.mesh, "tp")

    def whole(self, elements: float) -> float:
        """Return the bytes of so many elements a token of a block."""
        return self.gathered * elements * self.element_bytes


def activation_bytes_of(
    shape: Shape,
    mesh: Mapping[str, int],
    coordinate: Mapping[str, int] | None = None,
    *,
    microbatch: int,
    microbatches: int,
    element_bytes: int,
    schedule: str = "1f1b",
    chunks: int = 0,
    split: str = "",
    checkpointing: str = "none",
    moe: Moe | None = None,
    fused_norms: bool = False,
) -> float:
    """Return the bytes that the rank at a coordinate keeps for backward at most, of all its microbatches in flight.

    ``UserError`` where layers or microbatches do not fit the pipeline.
    """
    place = place_of(shape, mesh, coordinate, schedule=schedule, chunks=chunks, split=split, moe=moe)
    pp = place.size("pp")
    made = make_schedule(schedule, ranks=pp, microbatches=microbatches, chunks=chunks) if pp > 1 else None
    kept = Kept(
        shape=shape,
        mesh=mesh,
        microbatch=microbatch,
        element_bytes=element_bytes,
        checkpointing=checkpointing,
        moe=moe,
        fused_norms=fused_norms,
    )
    return activations_from(place, made, kept)


def activations_from(place: Place, schedule: Schedule | None, kept: Kept) -> float:
    """Return the same of a rank's place, in the order of its schedule; None is one microbatch after the other."""

    def of_stage(stage: int) -> float:
        first, last = stage == 0, stage == len(place.layers_by_stage) - 1
        return stage_activations(kept, place.layers_by_stage[stage], first=first, last=last).total

    return of_stage(0) if schedule is None else peak_held(schedule, place.coordinate["pp"], of_stage)


def stage_activations(kept: Kept, layers: int, *, first: bool, last: bool) -> StageActivations:
    """Return what backward needs of one microbatch in a stage of so many layers."""
    n, shape = kept.tokens, kept.shape
    positions = n / kept.microbatch if shape.recipe == "gpt" else 0
    return StageActivations(
        layers=layers * _LAYERS[kept.checkpointing](kept),
        embeddings=_INDEX_BYTES * (n + positions) if first else 0.0,
        head=_norm(kept) + kept.wide(shape.hidden) if last else 0.0,
        loss=kept.wide(shape.vocabulary) + _INDEX_BYTES * n + kept.element_bytes if last else 0.0,
    )


def _layer(kept: Kept) -> float:
    ffn = _ffn(kept) if kept.moe is None else _mixture(kept, kept.moe)
    return 2 * _norm(kept) + kept.whole(kept.shape.hidden) + _attention(kept) + ffn


def _input(kept: Kept) -> float:
    return kept.wide(kept.shape.hidden)


def _products(kept: Kept) -> float:
    shape = kept.shape
    projected = 2 + 2 * shape.kv_heads / shape.heads
    inner = _inner(shape) / 2 * shape.ffn
    return _input(kept) + kept.split(shape.hidden * projected + inner) + kept.whole(2 * shape.hidden) + _scores(kept)


_LAYERS = {"none": _layer, "full": _input, "selective": _products}


def _norm(kept: Kept) -> float:
    hidden = kept.shape.hidden
    if kept.shape.recipe == "gpt":
        return kept.wide(hidden + 2)
    each = hidden * kept.element_bytes if kept.fused_norms else 2 * hidden * _WIDE_BYTES
    return kept.tokens * (each + _WIDE_BYTES)


def _attention(kept: Kept) -> float:
    shape = kept.shape
    shared = size_of(kept.mesh, "cp") > 1
    by_token = kept.fused_norms and kept.element_bytes == _WIDE_BYTES
    turned = shared or (shape.recipe == "llama" and not by_token)
    outputs = 2 if turned and shape.heads > size_of(kept.mesh, "tp") else 1
    heads = kept.split(shape.hidden * (1 + outputs + 2 * shape.kv_heads / shape.heads))
    angles = 2 * kept.sequence * shape.head_size * _WIDE_BYTES if shape.recipe == "llama" else 0
    return heads + _scores(kept) + angles


def _scores(kept: Kept) -> float:
    return _WIDE_BYTES * kept.gathered * kept.shape.heads / size_of(kept.mesh, "tp")


def _ffn(kept: Kept) -> float:
    return kept.whole(kept.shape.hidden) + kept.split(_inner(kept.shape) * kept.shape.ffn)


def _inner(shape: Shape) -> int:
    return 4 if shape.recipe == "llama" else 2


def _mixture(kept: Kept, moe: Moe) -> float:
    """Where elements are narrow, the router has its own copy of its input in float32, and of its weights."""
    hidden, inner, n = kept.shape.hidden, _inner(kept.shape) * moe.expert_ffn, kept.tokens
    narrow = kept.element_bytes < _WIDE_BYTES
    routed = n * (hidden + moe.experts) * _WIDE_BYTES + _INDEX_BYTES * n * moe.top_k
    copied = moe.experts * hidden * _WIDE_BYTES + (kept.wide(hidden) if moe.shared else 0.0) if narrow else 0.0
    indices = _INDICES_AT_HOME + (_INDICES_AWAY if moe.ep > 1 else 0)
    rows = n * moe.etp * moe.top_k
    travelled = rows * ((3 * hidden + inner / moe.etp + 1) * kept.element_bytes + indices * _INDEX_BYTES)
    return routed + copied + travelled + _ENDS_BYTES * moe.experts_per_rank + kept.wide(moe.shared * inner)
