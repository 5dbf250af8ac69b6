"""Every training step is right with CUDA's defaults, and the host reads no more than it must."""

from typing import Any

import pytest

from parbench.bench.plan.cases import load_target
from parbench.bench.world.world import World
from tests.support.host_reads import record_host_reads
from tests.support.ranks import Ranks
from tests.support.workloads.cuda_defaults import use_cuda_defaults
from tests.support.workloads.ep_steps import BFLOAT16, DROPS, make_params
from tests.support.workloads.training_steps import (
    DEFINITION_BY_NAME,
    Params,
    count_wrong_after_step,
)

ONE_LAYER: Params = {"layers": 1}
EXPERTS: Params = {**ONE_LAYER, "experts": 4, "ffn": 64}
ONCE: Params = {"microbatches": 1}
TWO_MICROBATCHES: Params = {"microbatch": 1, "microbatches": 2}
FULL = pytest.mark.full


def build_step(world: World, name: str, params: Params) -> Any:
    target = load_target(DEFINITION_BY_NAME[name].target)
    return target(world, **make_params(name, params))


def run_step(world: World, name: str, params: Params) -> tuple[int, list[str]]:
    """Return wrong elements with CUDA's defaults, and the reads of a later step."""
    with use_cuda_defaults():
        step = build_step(world, name, params)
        wrong = count_wrong_after_step(step)
        step.reset()
        reads = record_host_reads(step.step)
        step.close()
    return wrong, reads


@pytest.mark.parametrize(
    ("name", "params", "num_reads"),
    [
        ("ddp", ONE_LAYER, 0),
        ("zero1", ONE_LAYER, 0),
        pytest.param("zero1", {**ONE_LAYER, "optimizer": "zero_redundancy"}, 0, marks=FULL),
        ("fsdp", ONE_LAYER, 0),
        ("tp", {**ONE_LAYER, **BFLOAT16}, 0),
        ("tp_sp", ONE_LAYER, 0),
        ("pp", TWO_MICROBATCHES, 0),
        ("cp", ONE_LAYER, 0),
        # Each mixture reads how many rows it sends and receives, once in every forward pass.
        ("ep_dispatch", {}, 1),
        ("ep_layer", {}, 1),
        ("ep_step", {**EXPERTS, "microbatches": 2}, 2),
        ("hybrid", {**EXPERTS, **TWO_MICROBATCHES, "mesh": "dp=1,tp=2,etp=2"}, 0),
        # The number of tokens that others send here, or that are not dropped, is read as well.
        ("ep_layer", {"variant": "allgather"}, 1),
        pytest.param("ep_layer", {"ep": 1, **DROPS}, 1, marks=FULL),
        ("ep_layer", {"ep": 1}, 0),
        pytest.param("ep_step", {**EXPERTS, "checkpointing": "full"}, 2, marks=FULL),
        pytest.param("hybrid", {**EXPERTS, **ONCE, "mesh": "fsdp=2,ep=2"}, 1, marks=FULL),
        pytest.param(
            "hybrid", {**EXPERTS, **ONCE, **BFLOAT16, "mesh": "tp=2,ep=2,etp=1"}, 1, marks=FULL
        ),
        pytest.param("hybrid", {**EXPERTS, "mesh": "dp=2,ep=2"}, 4, marks=FULL),
    ],
)
def test_step_is_right_with_few_reads(
    two_ranks: Ranks, name: str, params: Params, num_reads: int
) -> None:
    for wrong, reads in two_ranks.call(f"{__name__}:run_step", name=name, params=params):
        assert wrong == 0
        assert len(reads) == num_reads, reads
