"""Small steps of experts on several ranks: a whole training step, a layer alone, and dispatch alone."""

from training_steps import OF_NAME, SMALL, Params, small, wrong_after_a_step

from parbench.bench.rank.runner import load_target
from parbench.bench.world.world import World
from parbench.workloads.expert_parallel.expert_step import EpStep
from parbench.workloads.expert_parallel.layer_step import DispatchStep, LayerStep

DROPS: Params = {"capacity": 0.75}
NARROW: Params = {"precision": "bfloat16"}


def step_of(world: World, params: Params) -> EpStep:
    step = small(world, "ep_step", params)
    assert isinstance(step, EpStep)
    return step


def layer_of(world: World, params: Params) -> LayerStep:
    step = load_target(OF_NAME["ep_layer"].target)(world, **params_of("ep_layer", params))
    assert isinstance(step, LayerStep)
    return step


def dispatch_of(world: World, params: Params) -> DispatchStep:
    step = load_target(OF_NAME["ep_dispatch"].target)(world, **params_of("ep_dispatch", params))
    assert isinstance(step, DispatchStep)
    return step


def params_of(name: str, params: Params) -> Params:
    """Return small parameters; what is not given has the default of its definition."""
    definition = OF_NAME[name]
    known = {param.name for param in definition.params}
    return definition.whole({**{key: value for key, value in SMALL.items() if key in known}, **params})


def wrong_after(step: EpStep | LayerStep | DispatchStep, steps: int) -> list[int]:
    wrong = [wrong_after_a_step(step) for _ in range(steps)]
    step.close()
    return wrong
