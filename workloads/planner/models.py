"""The models that can be planned: the measured steps' shapes, and some that no test machine could hold. Pure."""

from dataclasses import dataclass, replace

from bench.text import UserError, did_you_mean, listed
from workloads.model.shapes import SHAPES, Shape, num_layer_parameters, num_parameters


@dataclass(frozen=True, kw_only=True)
class Model:
    """A shape, and its mixtures of experts; ``shape.ffn`` is then one expert's, and ``num_experts`` 0 is none."""

    name: str
    shape: Shape
    num_experts: int = 0
    top_k: int = 0

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert: two matrices for gpt, three for llama, without biases."""
        return (3 if self.shape.recipe == "llama" else 2) * self.shape.hidden * self.shape.ffn

    @property
    def dense_layer_parameters(self) -> int:
        """Parameters of a layer that every rank of the expert axis holds: without experts, all of it."""
        if not self.num_experts:
            return num_layer_parameters(self.shape)
        router = self.shape.hidden * self.num_experts
        return num_layer_parameters(self.shape) - self.expert_parameters + router


def num_model_parameters(model: Model) -> int:
    """Return all parameters, those of every expert included."""
    shape = model.shape
    ends = num_parameters(shape) - shape.layers * num_layer_parameters(shape)
    layer = model.dense_layer_parameters + model.num_experts * model.expert_parameters
    return ends + shape.layers * layer


def _gpt(layers: int, hidden: int, heads: int, *, sequence: int = 2048, vocabulary: int = 51200) -> Shape:
    return Shape(
        recipe="gpt",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn=4 * hidden,
        sequence=sequence,
        vocabulary=vocabulary,
    )


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, sequence: int, vocabulary: int) -> Shape:
    return Shape(
        recipe="llama",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        sequence=sequence,
        vocabulary=vocabulary,
    )


_BIG = (
    Model(name="llama3-405b", shape=_llama(126, 16384, 128, 8, 53248, 8192, 128256)),  # arXiv 2407.21783, table 3
    Model(name="gpt-7.5b", shape=_gpt(36, 4096, 32)),  # arXiv 2104.04473, table 1: 7.5 B
    Model(name="gpt-175b", shape=_gpt(96, 12288, 96)),  # arXiv 2005.14165, table 2.1
    Model(name="gpt-530b", shape=_gpt(105, 20480, 128)),  # arXiv 2104.04473, table 1: 529.6 B
    # arXiv 2401.04088, table 1: 8 experts, 2 of them for a token
    Model(name="mixtral-8x7b", shape=_llama(32, 4096, 32, 8, 14336, 8192, 32000), num_experts=8, top_k=2),
)
MODELS = {
    **{name: Model(name=name, shape=shape) for name, shape in SHAPES.items()},
    **{model.name: model for model in _BIG},
}


def model_of(name: str, sequence: int = 0) -> Model:
    """Return the named model, with sequences of ``sequence`` tokens if that is not 0; ``UserError`` names all."""
    if name not in MODELS:
        raise UserError(f"model {name!r} is not {listed(MODELS)}{did_you_mean(name, MODELS)}")
    if sequence < 0:
        raise UserError(f"sequence({sequence}) < 1")
    model = MODELS[name]
    return replace(model, shape=replace(model.shape, sequence=sequence)) if sequence else model
