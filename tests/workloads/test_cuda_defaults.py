"""Every training step is right with CUDA's defaults."""

from typing import Any

import pytest

from parbench.bench.rank.runner import load_target
from parbench.bench.world.world import World
from tests.support.cuda_defaults import use_cuda_defaults
from tests.support.ep_steps import BFLOAT16, make_params
from tests.support.ranks import Ranks
from tests.support.training_steps import DEFINITION_BY_NAME, Params, count_wrong_after_step

ONE_LAYER: Params = {"layers": 1}
EXPERTS: Params = {**ONE_LAYER, "experts": 4, "ffn": 64}
TWO_MICROBATCHES: Params = {"microbatch": 1, "microbatches": 2}


def build_step(world: World, name: str, params: Params) -> Any:
    target = load_target(DEFINITION_BY_NAME[name].target)
    return target(world, **make_params(name, params))


def run_step(world: World, name: str, params: Params) -> int:
    """Return wrong elements with CUDA's defaults."""
    with use_cuda_defaults():
        step = build_step(world, name, params)
        wrong = count_wrong_after_step(step)
        step.close()
    return wrong


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("ddp", ONE_LAYER),
        ("zero1", ONE_LAYER),
        ("fsdp", ONE_LAYER),
        ("hsdp", ONE_LAYER),
        ("tp", {**ONE_LAYER, **BFLOAT16}),
        ("tp_sp", ONE_LAYER),
        ("tp_fsdp", ONE_LAYER),
        ("pp", TWO_MICROBATCHES),
        ("cp", ONE_LAYER),
        ("ep_step", {**EXPERTS, "aux": 0.1}),
        ("hybrid", {**EXPERTS, **TWO_MICROBATCHES, "mesh": "dp=1,tp=2,etp=2"}),
    ],
)
def test_step_is_right_with_cuda_defaults(two_ranks: Ranks, name: str, params: Params) -> None:
    assert two_ranks.call(f"{__name__}:run_step", name=name, params=params) == [0, 0]
