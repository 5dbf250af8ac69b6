"""The models that can be planned: the measured steps' shapes, and some that no test machine could hold. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bench.text import UserError, did_you_mean, listed
from workloads.costs.parameter_table import whole_elements
from workloads.costs.step_spec import StepSpec
from workloads.expert_parallel.moe_case import Moe
from workloads.expert_parallel.routing import BALANCED
from workloads.model.shapes import SHAPES, Shape


@dataclass(frozen=True, kw_only=True)
class Model:
    """A shape, and its mixtures of experts; ``shape.ffn`` is then one expert's, and ``num_experts`` 0 is none."""

    name: str
    shape: Shape
    num_experts: int = 0
    top_k: int = 0

    def moe(self, ep: int = 1) -> Moe | None:
        """Return its mixture over ``ep`` ranks, routes even and nothing dropped; None without experts."""
        if not self.num_experts:
            return None
        return Moe(
            ep=ep,
            etp=1,
            tp=1,
            experts=self.num_experts,
            top_k=self.top_k,
            expert_ffn=self.shape.ffn,
            shared=0,
            capacity=0.0,
            scores="softmax",
            aux=0.0,
            variant="all_to_all",
            chunks=1,
            routing=BALANCED,
            strength=0.0,
        )

    @property
    def parameters(self) -> int:
        """All parameters, those of every expert included."""
        return whole_elements(self.shape, self.moe())

    def step(self, mesh: Mapping[str, int], **more: Any) -> StepSpec:
        """Return a step of it on a mesh, as large clusters take it."""
        return StepSpec(name=self.name, shape=self.shape, mesh=mesh, moe=self.moe(mesh.get("ep", 1)), **more)


# arXiv 2407.21783, table 3; 2104.04473, table 1 (7.5 B and 529.6 B); 2005.14165, table 2.1
_LARGE = {
    "llama3-405b": Shape(
        recipe="llama", layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, sequence=8192, vocabulary=128256
    ),
    "gpt-7.5b": Shape(
        recipe="gpt", layers=36, hidden=4096, heads=32, kv_heads=32, ffn=16384, sequence=2048, vocabulary=51200
    ),
    "gpt-175b": Shape(
        recipe="gpt", layers=96, hidden=12288, heads=96, kv_heads=96, ffn=49152, sequence=2048, vocabulary=51200
    ),
    "gpt-530b": Shape(
        recipe="gpt", layers=105, hidden=20480, heads=128, kv_heads=128, ffn=81920, sequence=2048, vocabulary=51200
    ),
}
# arXiv 2401.04088, table 1: 8 experts, 2 of them for a token
_MIXTRAL = Shape(
    recipe="llama", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, sequence=8192, vocabulary=32000
)
MODELS = {
    **{name: Model(name=name, shape=shape) for name, shape in (SHAPES | _LARGE).items()},
    "mixtral-8x7b": Model(name="mixtral-8x7b", shape=_MIXTRAL, num_experts=8, top_k=2),
}


def model_of(name: str, sequence: int = 0) -> Model:
    """Return the named model, with sequences of ``sequence`` tokens if that is not 0; ``UserError`` names all."""
    if name not in MODELS:
        raise UserError(f"model {name!r} is not {listed(MODELS)}{did_you_mean(name, MODELS)}")
    if sequence < 0:
        raise UserError(f"sequence({sequence}) < 1")
    model = MODELS[name]
    return replace(model, shape=replace(model.shape, sequence=sequence)) if sequence else model
