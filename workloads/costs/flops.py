"""The FLOPs of a step: those of the model, which MFU counts, and those of a rank. Pure."""

from dataclasses import dataclass

from parbench.workloads.costs.parameter_table import count_matmul_weights, layer_parts
from parbench.workloads.costs.step_spec import RankView
from parbench.workloads.expert_parallel.moe_case import Moe
from parbench.workloads.model.shapes import Shape

MATMUL_BACKWARD = 2.0
"""The backward FLOPs of a GEMM relative to forward: a GEMM for the input's gradient and one for the
weight's."""
ATTENTION_BACKWARD = 2.5
"""The backward FLOPs of attention relative to forward: five GEMMs, of which one repeats the scores
(FlashAttention-2, Dao 2023, section 4)."""


def is_recomputed_gemm(shape: Shape, name: str) -> bool:
    """Return True if ``selective`` checkpointing recomputes the GEMM of a parameter.

    The checkpointing keeps every second output of q, k, v, out, gate, up, down, and with latent
    attention of q_a, q_b, kv_a, kv_b, out.
    """
    module = name.removesuffix(".weight")
    if module == "ffn.up":
        return shape.recipe == "llama"
    return module in ("attention.k", "attention.out", "attention.q_b", "attention.kv_b")


def matmul_weights(shape: Shape, moe: Moe | None = None) -> float:
    """Return the number of GEMM weights used for each token: layers and head, no embeddings."""
    layers = _layer_weights(shape, moe, shape.layers, moe.dense_layers if moe else 0)
    return layers + shape.hidden * shape.vocabulary


def _layer_weights(shape: Shape, moe: Moe | None, layers: int, dense_layers: int) -> float:
    """Return the GEMM weights for a token in ``layers`` (``dense_layers`` without experts)."""
    moe_weights = (layers - dense_layers) * count_matmul_weights(shape, moe)
    return moe_weights + dense_layers * count_matmul_weights(shape)


def attention_flops(shape: Shape, is_causal: bool = True) -> float:
    """Return the forward FLOPs of a layer's attention per token: 2 s heads (head + value size).

    Causal attention takes half of these FLOPs, because a fused kernel skips masked pairs.
    """
    full = 2.0 * shape.sequence * shape.heads * (shape.head_size + shape.value_size)
    return full / 2 if is_causal else full


def flops_per_token(shape: Shape, moe: Moe | None = None) -> float:
    """Return model FLOPs of forward and backward per token, 6 N + 12 L H Q T.

    This is PaLM's convention (arXiv 2204.02311, appendix B): N are ``matmul_weights``, attention
    counts without the mask and three times its forward pass, and recomputation does not count.
    """
    attention = 3.0 * shape.layers * attention_flops(shape, is_causal=False)
    return 6.0 * matmul_weights(shape, moe) + attention


@dataclass(frozen=True, kw_only=True)
class StageFlops:
    """The FLOPs of one microbatch on one rank."""

    forward: float
    backward: float
    recomputed: float  # the forward passes that backward repeats
    attention: float  # the part of ``forward`` that is attention

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.recomputed


def stage_flops(view: RankView) -> StageFlops:
    """Return the FLOPs that a rank executes: 2 per weight and token, and attention.

    ``tp`` splits layers and head. ``full`` checkpointing repeats the layers' forward pass, and
    ``selective`` every second GEMM.
    """
    spec, shape = view.spec, view.spec.shape
    tokens = spec.local_tokens / spec.dims.tp
    attention = attention_flops(shape) * tokens * view.layers
    weights = _layer_weights(shape, spec.moe, view.layers, view.dense_layers)
    layers = 2.0 * weights * tokens
    head = 2.0 * shape.hidden * shape.vocabulary * tokens if view.has_head else 0.0
    return StageFlops(
        forward=layers + head + attention,
        backward=MATMUL_BACKWARD * (layers + head) + ATTENTION_BACKWARD * attention,
        recomputed=_recomputed_flops(view, layers + attention),
        attention=attention,
    )


def _recomputed_flops(view: RankView, forward: float) -> float:
    """Return the FLOPs that backward repeats, from the ``forward`` FLOPs of the rank's layers."""
    spec = view.spec
    if spec.checkpointing == "full":
        return forward * view.recomputed_layers / view.layers
    if spec.checkpointing == "none" or spec.is_simulated:
        return 0.0
    weights = sum(
        part.numel
        for part in layer_parts(spec.shape, 1, spec.moe)
        if is_recomputed_gemm(spec.shape, part.name)
    )
    return 2.0 * weights * view.layers * spec.local_tokens / spec.dims.tp
