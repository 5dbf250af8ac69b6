"""The models that can be planned: the measured steps' shapes, and some that no test machine could hold. Pure."""

from dataclasses import replace

from bench.plan.params import Value
from bench.text import UserError, did_you_mean, listed
from workloads.costs.step_spec import StepSpec
from workloads.expert_parallel.moe_case import moe_of
from workloads.expert_parallel.routing import BALANCED
from workloads.model.shapes import SHAPES, Shape

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
# arXiv 2401.04088, table 1: 8 experts, 2 of them for a token; ``ffn`` is one expert's
_MIXTRAL = Shape(
    recipe="llama", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, sequence=8192, vocabulary=32000
)
_EXPERTS: dict[str, Value] = {"experts": 8, "top_k": 2, "expert_ffn": _MIXTRAL.ffn, "shared": 0, "routing": BALANCED}
MODELS = {
    **{name: StepSpec(name=name, shape=shape) for name, shape in (SHAPES | _LARGE).items()},
    "mixtral-8x7b": StepSpec(name="mixtral-8x7b", shape=_MIXTRAL, moe=moe_of(_EXPERTS, _MIXTRAL, 1)),
}


def model_of(name: str, sequence: int = 0) -> StepSpec:
    """Return a step of the named model, on no mesh yet, of ``sequence`` tokens if not 0; ``UserError`` names all."""
    if name not in MODELS:
        raise UserError(f"model {name!r} is not {listed(MODELS)}{did_you_mean(name, MODELS)}")
    if sequence < 0:
        raise UserError(f"sequence({sequence}) < 1")
    model = MODELS[name]
    return replace(model, shape=replace(model.shape, sequence=sequence)) if sequence else model
