"""To go: closed forms that layouts still call."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from workloads.costs.communication_pattern import sent_bytes
from workloads.expert_parallel.moe_case import Moe
from workloads.model.shapes import Shape

_LOG_SUM_EXP_BYTES = 4
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


def padded_numel(shape: Sequence[int], n: int) -> int:
    """Return the elements of a parameter once FSDP has padded its first dimension to a multiple of ``n``."""
    _refuse_less_than_one("n", n)
    if not shape:
        raise ValueError("a parameter of no dimension cannot be sharded on its first")
    return -(-shape[0] // n) * n * math.prod(shape[1:])


def total_padded_numel(shapes: Iterable[Sequence[int]], n: int) -> int:
    """Return the elements of all parameters as FSDP sends them: each padded on its own."""
    return sum(padded_numel(shape, n) for shape in shapes)


def ddp_sent_bytes(
    num_parameters: int, element_bytes: int, n: int, *, num_synchronisations: int = 1
) -> dict[str, float]:
    """Return bytes by axis: an all_reduce of all gradients per synchronisation, 2 Psi e (n-1)/n each.

    M microbatches accumulated without ``no_sync`` make M synchronisations.
    """
    each = sent_bytes("all_reduce", num_parameters * element_bytes, n)
    return {"dp": each * num_synchronisations}


def zero1_sent_bytes(
    num_parameters: int, element_bytes: int, n: int, *, num_synchronisations: int = 1
) -> dict[str, float]:
    """Return DDP's bytes and those of the update: every owner broadcasts its shard, together Psi e.

    That is ``sent_bytes``'s convention for a broadcast, so that it agrees with a count of calls; the mean over ranks of
    ring-optimal broadcasts is Psi e (n-1)/n. The literature's 2 Psi e (n-1)/n reduce-scatters gradients instead, which
    torch's ZeroRedundancyOptimizer does not.
    """
    gradients = ddp_sent_bytes(num_parameters, element_bytes, n, num_synchronisations=num_synchronisations)
    return {"dp": gradients["dp"] + sent_bytes("broadcast", num_parameters * element_bytes, n)}


def fsdp_sent_bytes(
    padded_parameters: int,
    element_bytes: int,
    n: int,
    *,
    num_kept: int = 0,
    num_microbatches: int = 1,
    num_synchronisations: int | None = None,
    reduce_element_bytes: int | None = None,
) -> dict[str, float]:
    """Return bytes by axis of FSDP: all-gather forward, all-gather again backward, reduce-scatter; 3 Psi e (n-1)/n.

    ``num_kept`` of the padded parameters stay gathered between forward and backward (reshard_after_forward=False): 0 is
    ZeRO-3 with every unit resharded, all of them is ZeRO-2, 2 Psi e (n-1)/n; by torch's default the root's are kept.
    Gathering is done for each microbatch, reducing too unless gradient sync is turned off (``num_synchronisations``).
    """
    if not 0 <= num_kept <= padded_parameters:
        raise ValueError(f"num_kept({num_kept}) is not within 0 and padded_parameters({padded_parameters})")
    syncs = num_microbatches if num_synchronisations is None else num_synchronisations
    reduce_bytes = element_bytes if reduce_element_bytes is None else reduce_element_bytes
    gathered = sent_bytes("all_gather", (2 * padded_parameters - num_kept) * element_bytes, n) * num_microbatches
    return {"dp": gathered + sent_bytes("reduce_scatter", padded_parameters * reduce_bytes, n) * syncs}


def hsdp_sent_bytes(
    padded_parameters: int,
    element_bytes: int,
    *,
    replicas: int,
    shards: int,
    num_kept: int = 0,
    num_microbatches: int = 1,
) -> dict[str, float]:
    """Return bytes by axis of FSDP in R replicas of S shards, gradients synchronised every microbatch.

    shard: FSDP's 3 Psi e (S-1)/S; replicate: an all_reduce of the rank's shard of gradients, 2 Psi e (R-1)/(R S).
    """
    shard = fsdp_sent_bytes(
        padded_parameters, element_bytes, shards, num_kept=num_kept, num_microbatches=num_microbatches
    )
    reduced = sent_bytes("all_reduce", padded_parameters * element_bytes / shards, replicas)
    return {"shard": shard["dp"], "replicate": reduced * num_microbatches}


def tp_sent_bytes(
    *,
    layers: int,
    microbatch: int,
    sequence: int,
    hidden: int,
    element_bytes: int,
    tp: int,
    num_microbatches: int = 1,
) -> dict[str, float]:
    """Return bytes of tensor-parallel layers, 8 b s h e (t-1)/t per layer and microbatch, without embedding and head.

    4 all_reduces of b s h e: after attention and after the FFN, forward and backward (arXiv 1909.08053). With sequence
    parallelism torch makes 4 all_gathers and 4 reduce_scatters of them, the same bytes; Megatron gathers 2 more again.
    """
    each = sent_bytes("all_reduce", microbatch * sequence * hidden * element_bytes, tp)
    return {"tp": 4 * each * layers * num_microbatches}


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes of model state that one rank holds; ``optimizer`` counts the master weights of mixed precision."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """All three."""
        return self.parameters + self.gradients + self.optimizer


# which of parameters, gradients and optimizer state are split over n (arXiv 1910.02054, figure 1)
_SPLIT = {
    "ddp": (False, False, False),
    "zero1": (False, False, True),
    "zero2": (False, True, True),
    "zero3": (True, True, True),
    "hsdp": (True, True, True),
    "tp": (False, False, False),
    "tp_sp": (False, False, False),
    "tp_fsdp": (True, True, True),
}


def state_bytes(
    strategy: str, num_parameters: int, n: int, *, mixed: bool, tp: int = 1, num_replicated: int = 0
) -> StateBytes:
    """Return bytes of parameters, gradients and Adam's state per rank (arXiv 1910.02054); 16 Psi before any split.

    Mixed precision holds 2 + 2 + 12 bytes per parameter (16-bit weights and gradients; float32 weights and two
    moments), float32 4 + 4 + 8. ``n`` is the axis that splits state: S for hsdp. ``tp`` divides all parameters but
    ``num_replicated`` of them. zero2 is the paper's: torch's FSDP without resharding holds the parameters whole only
    from forward to backward.
    """
    if strategy not in _SPLIT:
        raise ValueError(f"strategy({strategy}) is none of {', '.join(_SPLIT)}")
    _refuse_less_than_one("n", n)
    _refuse_less_than_one("tp", tp)
    psi = num_replicated + (num_parameters - num_replicated) / tp
    per_parameter = (2, 2, 12) if mixed else (4, 4, 8)
    parameters, gradients, optimizer = (
        psi * size / (n if split else 1) for size, split in zip(per_parameter, _SPLIT[strategy], strict=True)
    )
    return StateBytes(parameters=parameters, gradients=gradients, optimizer=optimizer)


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """The sizes of one layer and one microbatch; ``ffn`` is the inner size, ``kv_heads`` are fewer in GQA."""

    microbatch: int
    sequence: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int


def gpt_activation_bytes(
    shape: LayerShape, element_bytes: int, *, tp: int = 1, sequence_parallel: bool = False
) -> float:
    """Return bytes that backward needs of a LayerNorm/GELU layer: sbh(32 + 4a/h) in 16 bit with f = 4h, t = 1.

    In elements of sbh: the norms' inputs 2 and outputs 2; q, k, v 3 and attention's output 1; the FFN's inner values
    before and after GELU 2f/h; then attention's log-sum-exp, 4abs bytes. It is Megatron's sbh(34 + 5as/h)
    (arXiv 2205.05198) without dropout's masks 2 and with fused attention in place of the scores. The norms' two values
    per token, at most 16bs bytes, are left out.
    """
    split = 4 + 2 * shape.ffn / shape.hidden
    return _activation_bytes(shape, element_bytes, split, tp, sequence_parallel)


def swiglu_activation_bytes(
    shape: LayerShape, element_bytes: int, *, tp: int = 1, sequence_parallel: bool = False
) -> float:
    """Return bytes that backward needs of an RMSNorm/GQA/SwiGLU layer: in 16 bit sbh(12 + 4a_kv/a + 8f/h + 4a/h).

    As for GPT, but k and v have 2a_kv/a and the FFN has 4f/h: gate, its SiLU, up, and their product. A fused RMSNorm is
    taken for granted: one composed of elementary operations, as on the CPU, holds more.
    """
    split = 2 + 2 * shape.kv_heads / shape.heads + 4 * shape.ffn / shape.hidden
    return _activation_bytes(shape, element_bytes, split, tp, sequence_parallel)


def _activation_bytes(shape: LayerShape, element_bytes: int, split: float, tp: int, sequence_parallel: bool) -> float:
    """Divide by t what tensor parallelism splits, and with sequence parallelism the norms' inputs.

    The norms' outputs stay whole even so: torch keeps for backward what it gathered (Megatron gathers it again).
    """
    _refuse_less_than_one("tp", tp)
    tokens = shape.microbatch * shape.sequence
    norm_inputs = 2 / tp if sequence_parallel else 2
    elements = tokens * shape.hidden * (norm_inputs + 2 + split / tp)
    return elements * element_bytes + _LOG_SUM_EXP_BYTES * shape.heads * tokens / tp


def recompute_activation_bytes(shape: LayerShape, element_bytes: int) -> float:
    """Return bytes of a layer that backward computes again: its input alone, 2sbh in 16 bit (arXiv 2205.05198)."""
    return float(shape.microbatch * shape.sequence * shape.hidden * element_bytes)


def _refuse_less_than_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name}({value}) < 1")
