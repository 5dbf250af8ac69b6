"""What a step computes: FLOPs as the model counts them, and FLOPs that a rank executes. Pure."""

from dataclasses import dataclass

from workloads.costs.memory import layer_equation
from workloads.costs.step_spec import Position
from workloads.expert_parallel.moe_case import Moe
from workloads.model.shapes import Shape, num_ffn_matrices, num_layer_weights

_BACKWARD = 2.0  # times the forward pass: one product for the input's gradient, one for the weight's
_CAUSAL = 0.5  # a fused kernel leaves out the masked half of attention


def active_layer_weights(shape: Shape, moe: Moe | None = None) -> float:
    """Return the weights of a layer's products that one token meets: of experts its top-k, the shared, the router."""
    weights = num_layer_weights(shape)
    if moe is None:
        return weights
    met = (moe.top_k + moe.shared) * moe.expert_ffn - shape.ffn
    return weights + num_ffn_matrices(shape) * shape.hidden * met + shape.hidden * moe.experts


def flops_per_token(shape: Shape, moe: Moe | None = None) -> float:
    """Return model FLOPs of forward and backward per token, 6 N + 12 L H Q T (PaLM, arXiv 2204.02311, appendix B).

    N are the weights of matrix products that a token meets: layers and head, without embedding tables (looked up),
    norms and biases. Attention counts in full, not half for the causal mask, and recomputation not at all, as there.
    """
    weights = shape.layers * active_layer_weights(shape, moe) + shape.hidden * shape.vocabulary
    return 6.0 * weights + 12.0 * shape.layers * shape.heads * shape.head_size * shape.sequence


@dataclass(frozen=True, kw_only=True)
class StageFlops:
    """FLOPs of one microbatch on one rank; ``again`` is the forward pass that backward repeats.

    ``attention`` is the part of ``forward`` that is attention's two products.
    """

    forward: float
    backward: float
    again: float
    attention: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.again


def stage_flops(at: Position) -> StageFlops:
    """Return what a rank executes: 2 FLOPs a weight and token forward, attention 4 s h a token, half of it masked.

    ``full`` checkpointing runs the layers' forward pass again; ``selective`` repeats no matrix product.
    """
    spec, shape = at.spec, at.spec.shape
    tokens = spec.local_tokens / spec.size("tp")
    attention = _CAUSAL * 4.0 * shape.sequence * shape.hidden * tokens * at.layers
    layers = at.layers * 2.0 * active_layer_weights(shape, spec.moe) * tokens + attention
    # tp splits the head's columns, or, where it is whole, its tokens
    head = 2.0 * shape.hidden * shape.vocabulary * tokens if at.head else 0.0
    return StageFlops(
        forward=layers + head,
        backward=_BACKWARD * (layers + head),
        again=layers / spec.every if spec.checkpointing == "full" else 0.0,
        attention=attention,
    )


def again_bytes(at: Position) -> float:
    """Return what ``selective`` checkpointing writes and reads again: twice the activations that it dropped."""
    if at.spec.checkpointing != "selective":
        return 0.0
    return 2 * at.layers * (layer_equation(at, "none").value - layer_equation(at, "selective").value)
