"""Small steps of experts on several ranks: a training step, a layer alone, and dispatch alone."""

from collections.abc import Iterable

from torch import Tensor

from parbench.bench.rank.runner import load_target
from parbench.bench.world.world import World
from parbench.workloads.expert_parallel.layer_step import DispatchBenchmark, MoeLayerBenchmark
from parbench.workloads.expert_parallel.moe_layer import MoeLayer
from tests.support.training_steps import DEFINITION_BY_NAME, SMALL_PARAMS, Params

DROPS: Params = {"capacity": 0.75}
BFLOAT16: Params = {"precision": "bfloat16"}


def build_layer(world: World, params: Params) -> MoeLayerBenchmark:
    target = load_target(DEFINITION_BY_NAME["ep_layer"].target)
    step = target(world, **make_params("ep_layer", params))
    assert isinstance(step, MoeLayerBenchmark)
    return step


def build_dispatch(world: World, params: Params) -> DispatchBenchmark:
    target = load_target(DEFINITION_BY_NAME["ep_dispatch"].target)
    step = target(world, **make_params("ep_dispatch", params))
    assert isinstance(step, DispatchBenchmark)
    return step


def make_params(name: str, params: Params) -> Params:
    """Return small parameters; a missing one has the default of its definition."""
    definition = DEFINITION_BY_NAME[name]
    names = {param.name for param in definition.params}
    small = {key: value for key, value in SMALL_PARAMS.items() if key in names}
    return definition.complete({**small, **params})


def misroute_token(layers: Iterable[MoeLayer]) -> None:
    """Let token 3 of each layer take the two experts with the lowest scores."""

    def forward(layer: MoeLayer, x: Tensor) -> Tensor:
        if layer.assigned_ids is None:
            scores = layer.router(x.flatten(0, 1))
            expert_ids = scores.topk(2).indices
            expert_ids[3] = (-scores[3]).topk(2).indices
            layer.assigned_ids = expert_ids
        return MoeLayer.forward(layer, x)

    for layer in layers:
        layer.forward = forward.__get__(layer)  # type: ignore[method-assign]
