"""The FLOPs of a step: those of the model, which MFU counts, and those of a rank. Pure."""

from parbench.workloads.costs.parameter_table import count_layer_matmul_weights, list_layer_parts
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
    """Return True if ``selective`` checkpointing recomputes the GEMM of the weight ``name``.

    The checkpointing recomputes every second GEMM of a layer, as torchtitan does: k and out of
    attention (with latent attention q_b, kv_b and out), and up of an FFN with gate, up and down. It
    keeps the outputs of the others. ``name`` is the name of the weight in its layer, such as
    ``attention.k.weight``.
    """
    module = name.removesuffix(".weight")
    if module == "ffn.up":
        return shape.recipe == "llama"
    return module in ("attention.k", "attention.out", "attention.q_b", "attention.kv_b")


def count_model_matmul_weights(shape: Shape, moe: Moe | None = None) -> float:
    """Return the number of weights in GEMMs of the full model by which one token is multiplied.

    The weights of layers and of the head count. Embeddings do not, because they are looked up. Of
    the routed experts of a layer, only ``top_k`` count. ``moe`` is None for a dense model.
    """
    layers = _count_weights_of_layers(shape, moe, shape.layers, moe.dense_layers if moe else 0)
    return layers + shape.hidden * shape.vocabulary


def _count_weights_of_layers(
    shape: Shape, moe: Moe | None, layers: int, dense_layers: int
) -> float:
    """Return the number of weights in GEMMs of ``layers`` layers that one token uses.

    Of these layers, ``dense_layers`` have an FFN in place of the experts of ``moe``. None for
    ``moe`` means that all layers have an FFN.
    """
    moe_weights = (layers - dense_layers) * count_layer_matmul_weights(shape, moe)
    return moe_weights + dense_layers * count_layer_matmul_weights(shape)


def count_attention_flops(shape: Shape, is_causal: bool = True) -> float:
    """Return the forward FLOPs of one layer's attention per token, the mean of a full sequence.

    Without a mask they are 2 * sequence * heads * (head size + value size). Causal attention takes
    half of them, because a fused kernel skips masked pairs. The projections do not count.
    """
    full = 2.0 * shape.sequence * shape.heads * (shape.head_size + shape.value_size)
    return full / 2 if is_causal else full


def count_flops_per_token(shape: Shape, moe: Moe | None = None) -> float:
    """Return the model FLOPs of forward and backward for one token, 6 N + 12 L H Q T.

    This is PaLM's convention (arXiv 2204.02311, appendix B). N is the number of weights in GEMMs
    that a token uses. The model has L layers, H heads of Q elements, and T tokens in a sequence.
    Attention counts without the mask, as three times its forward pass. Recomputation does not
    count.
    """
    attention = 3.0 * shape.layers * count_attention_flops(shape, is_causal=False)
    return 6.0 * count_model_matmul_weights(shape, moe) + attention


def count_rank_flops(view: RankView) -> float:
    """Return the FLOPs that one rank executes for one microbatch, in its layers and its head.

    They are the sum of forward, backward and recomputation. A GEMM takes 2 FLOPs per weight and
    token in forward. The ranks of ``tp`` share layers and head. Checkpointing repeats the forward
    pass of layers (``full``), or every second GEMM (``selective``).
    """
    spec, shape = view.spec, view.spec.shape
    tokens = spec.local_tokens / spec.dims.tp
    attention = count_attention_flops(shape) * tokens * view.layers
    gemms = 2.0 * tokens * _count_weights_of_layers(shape, spec.moe, view.layers, view.dense_layers)
    head = 2.0 * tokens * shape.hidden * shape.vocabulary if view.has_head else 0.0
    recomputed = 0.0
    if spec.checkpointing == "full":
        recomputed = (gemms + attention) * view.recomputed_layers / view.layers
    elif spec.checkpointing == "selective":
        parts = list_layer_parts(shape, 1, spec.moe)
        weights = sum(part.numel for part in parts if is_recomputed_gemm(shape, part.name))
        recomputed = 2.0 * tokens * weights * view.layers
    total = recomputed + (1 + MATMUL_BACKWARD) * (gemms + head)
    return total + (1 + ATTENTION_BACKWARD) * attention
