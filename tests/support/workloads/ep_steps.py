"""Small steps of experts on several ranks: a training step, a layer alone, and dispatch alone."""

from parbench.bench.plan.cases import load_target
from parbench.bench.world.world import World
from parbench.workloads.layers.moe_layers import DispatchBenchmark, MoeLayerBenchmark
from tests.support.workloads.training_steps import DEFINITION_BY_NAME, SMALL_PARAMS, Params

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
