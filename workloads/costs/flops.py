"""What a step computes: FLOPs as the model counts them, and FLOPs that a rank executes. Pure."""

from dataclasses import dataclass

from parbench.workloads.costs.memory import layers_equation
from parbench.workloads.costs.parameter_table import layer_weights
from parbench.workloads.costs.step_spec import Position
from parbench.workloads.expert_parallel.moe_case import Moe
from parbench.workloads.model.shapes import Shape

_BACKWARD = (
    2.0  # times the forward pass: one product for the input's gradient, one for the weight's
)
_CAUSAL = 0.5  # a fused kernel leaves out the masked half of attention


def product_weights(shape: Shape, moe: Moe | None = None) -> float:
    """Return the weights of matrix products that a token meets: layers and head, without tables, norms and biases."""
    return (
        _layers_weights(shape, moe, shape.layers, moe.dense_layers if moe else 0)
        + shape.hidden * shape.vocabulary
    )


def _layers_weights(shape: Shape, moe: Moe | None, layers: int, dense: int) -> float:
    return (layers - dense) * layer_weights(shape, moe) + dense * layer_weights(shape)


def flops_per_token(shape: Shape, moe: Moe | None = None) -> float:
    """Return model FLOPs of forward and backward per token, 6 N + 12 L H Q T (PaLM, arXiv 2204.02311, appendix B).

    N are ``product_weights``, Q the mean of a head's sizes of keys and of values. Attention counts in full, not half
    for the causal mask, and recomputation not at all, as there.
    """
    size = (shape.head_size + shape.value_size) / 2
    weights = product_weights(shape, moe)
    return 6.0 * weights + 12.0 * shape.layers * shape.heads * size * shape.sequence


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
    """Return what a rank executes: 2 FLOPs a weight and token forward, attention 2 s a (d + u), half of it masked.

    ``full`` checkpointing runs the layers' forward pass again; ``selective`` repeats no matrix product.
    """
    spec, shape = at.spec, at.spec.shape
    tokens = spec.local_tokens / spec.size("tp")
    sizes = shape.heads * (shape.head_size + shape.value_size)
    attention = _CAUSAL * 2.0 * shape.sequence * sizes * tokens * at.layers
    layers = 2.0 * _layers_weights(shape, spec.moe, at.layers, at.dense_layers) * tokens + attention
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
    return 2 * (layers_equation(at, "none").value - layers_equation(at, "selective").value)
