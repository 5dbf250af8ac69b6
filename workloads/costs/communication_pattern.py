"""Closed forms of a training step: bytes sent per rank by mesh axis, bytes of model state, bytes of activations.

Psi is the number of parameters, e the bytes of an element, n the ranks of an axis, t those of the tensor-parallel axis,
s b h a the sequence, microbatch, hidden size and heads. All is printed as "formula" beside what was counted.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.plan.catalogue import OPERATIONS as CATALOGUE
from bench.plan.operation_spec import ONE

_LOG_SUM_EXP_BYTES = 4  # float32, whatever the elements are: one per head and token


_FACTORS: Mapping[str, Callable[[int], float]] = {
    **{spec.short_name: spec.busbw.of for spec in CATALOGUE if spec.c10d and spec.busbw},
    "send": ONE.of,
    "recv": lambda n: 0.0,  # the sender counts it
    "barrier": lambda n: 0.0,
}
OPERATIONS = tuple(_FACTORS)


def sent_bytes(operation: str, num_bytes: float, n: int) -> float:
    """Return the bytes that the busiest rank's link carries in one ring-optimal call on ``n`` ranks.

    ``num_bytes`` is the whole: an all_gather's output, a reduce_scatter's input, what one rank of an all_to_all holds.
    The factors are nccl-tests' (doc/PERFORMANCE.md). For broadcast and reduce that is all of ``num_bytes``, though the
    mean over the ranks of a chain is (n-1)/n of it: its last rank sends nothing.
    """
    if operation not in _FACTORS:
        raise ValueError(f"operation({operation}) is none of {', '.join(OPERATIONS)}")
    _refuse_less_than_one("n", n)
    return _FACTORS[operation](n) * num_bytes if n > 1 else 0.0  # one rank alone has nobody to send to


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
