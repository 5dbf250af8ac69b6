"""What a rank computes: FLOPs that are executed, and FLOPs as the model counts them. Pure."""

from dataclasses import dataclass

from workloads.model.shapes import num_layer_weights
from workloads.planner.ask import Ask
from workloads.planner.models import Model
from workloads.planner.rank_memory import kept_bytes, layer_bytes
from workloads.planner.stage_parts import Part

_BACKWARD = 2.0  # times the forward pass: one product for the input's gradient, one for the weight's
_CAUSAL = 0.5  # a fused kernel leaves out the masked half of attention


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
        """All that is executed."""
        return self.forward + self.backward + self.again


def stage_flops(ask: Ask, part: Part) -> StageFlops:
    """Return what a rank executes: 2 FLOPs a weight and token forward, attention 4 s h a token, half of it masked.

    ``full`` checkpointing runs the layers' forward pass again; ``selective`` repeats no matrix product.
    """
    shape = ask.model.shape
    attention = _CAUSAL * 4.0 * shape.sequence * shape.hidden * ask.local_tokens / ask.tp * part.layers
    layers = part.layers * 2.0 * active_layer_weights(ask.model) * ask.local_tokens / ask.tp + attention
    # tp splits the head's columns, or, where it is whole, its tokens
    head = 2.0 * shape.hidden * shape.vocabulary * ask.local_tokens / ask.tp if part.head else 0.0
    return StageFlops(
        forward=layers + head,
        backward=_BACKWARD * (layers + head),
        again=layers if ask.checkpointing == "full" else 0.0,
        attention=attention,
    )


def again_bytes(ask: Ask, part: Part) -> float:
    """Return what ``selective`` checkpointing writes and reads again: twice the activations that it dropped."""
    return 2 * part.layers * (layer_bytes(ask) - kept_bytes(ask)) if ask.checkpointing == "selective" else 0.0


def active_layer_weights(model: Model) -> float:
    """Return the weights of a layer that one token meets: of experts, its top-k and the router."""
    weights = num_layer_weights(model.shape)
    if not model.num_experts:
        return weights
    return weights + (model.top_k - 1) * model.expert_parameters + model.shape.hidden * model.num_experts


def model_flops_per_token(model: Model) -> float:
    """Return 6 N + 12 L H Q T (PaLM, arXiv 2204.02311, appendix B), N the weights that one token meets.

    As for the measured steps: attention whole, without what is computed again.
    """
    shape = model.shape
    weights = shape.layers * active_layer_weights(model) + shape.hidden * shape.vocabulary
    return 6.0 * weights + 12.0 * shape.layers * shape.heads * shape.head_size * shape.sequence
