"""A step whose reference does not fit in memory is verified by a small model of the same recipe."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.world.world import World
from parbench.workloads.costs.parameter_table import count_parameters
from parbench.workloads.presets import PRESETS
from parbench.workloads.step import reference_choice
from parbench.workloads.step.reference_choice import check_memory, shrink_model
from parbench.workloads.step.train_step import SMALL_MODEL_NOTE
from tests.support.ranks import Ranks
from tests.support.workloads.planner_asks import make_spec
from tests.support.workloads.training_steps import (
    DEFINITION_BY_NAME,
    Params,
    build_small_step,
    count_wrong_after_step,
)


def check_without_reference(world: World, name: str, params: Params) -> tuple[int, bool]:
    """Return the number of wrong elements, and whether the description names the small model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_choice, "count_free_bytes", lambda world: 0.0)
        step = build_small_step(world, name, params)
    wrong = count_wrong_after_step(step)
    step.close()
    return wrong, SMALL_MODEL_NOTE in step.describe().notes


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("fsdp", {"layers": 4, "recipe": "llama"}),
        ("pp", {"microbatches": 2}),
        ("hybrid", {"mesh": "tp=2", "experts": 8, "microbatches": 1}),
    ],
)
def test_small_model_passes(two_ranks: Ranks, name: str, params: Params) -> None:
    arguments = {"name": name, "params": params}
    assert two_ranks.call(f"{__name__}:check_without_reference", **arguments) == [(0, True)] * 2


def break_gradient(head: Tensor) -> None:
    head.register_hook(lambda gradient: gradient * math.nan)  # type: ignore[no-untyped-call]


def change_last_bit(head: Tensor) -> None:
    head.detach().view(torch.int32)[3, 5] ^= 1


HEAD_CORRUPTIONS: dict[str, Callable[[Tensor], None]] = {
    "gradient": break_gradient,
    "weight": change_last_bit,
}


def list_differences(world: World, corruption: str) -> list[str]:
    """Return the differences of a step without reference that rank 1 corrupts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_choice, "count_free_bytes", lambda world: 0.0)
        step = build_small_step(world, "ddp", {})
    step.reset()
    step.step()
    if world.rank == 1:
        head = step.model.get_parameter("head.weight")
        HEAD_CORRUPTIONS[corruption](head)
    step.check()
    step.close()
    return list(step.differences())


@pytest.mark.parametrize(
    ("corruption", "difference"),
    [
        ("gradient", "gradient of head.weight is not finite"),
        ("weight", "weights differ from those of the first replica"),
    ],
)
def test_difference_without_reference_is_named(
    two_ranks: Ranks, corruption: str, difference: str
) -> None:
    target = f"{__name__}:list_differences"
    _, differences = two_ranks.call(target, corruption=corruption)
    assert differences == [difference]


def has_reference(world: World, free_bytes: list[float], params: Params) -> bool:
    """Return True if the step has a reference with the ranks' free memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            reference_choice, "count_free_bytes", lambda world: free_bytes[world.rank]
        )
        step = build_small_step(world, "ddp", params)
    step.close()
    return step.spec.reference_fits


@pytest.mark.parametrize(
    ("params", "bytes_of_rank_1", "fits"),
    [
        ({}, 1e9, True),
        ({}, 1e5, False),
        ({"compute": "simulated:1ms"}, 1e5, True),
    ],
)
def test_reference_needs_memory_on_all_ranks(
    two_ranks: Ranks, params: Params, bytes_of_rank_1: float, fits: bool
) -> None:
    arguments = {"free_bytes": [1e9, bytes_of_rank_1], "params": params}
    assert two_ranks.call(f"{__name__}:has_reference", **arguments) == [fits, fits]


@pytest.mark.parametrize(
    ("name", "ranks", "params"),
    [
        ("fsdp", 8, {}),
        ("pp", 2, {"layers_per_stage": "15+17"}),
        ("hybrid", 16, {"mesh": "pp=4,cp=2,tp=2"}),
        (
            "hybrid",
            8,
            {"mesh": "dp=2,tp=4,ep=2", "top_k": 6, "experts": 16, "expert_ffn": 1408},
        ),
    ],
)
def test_small_shape_is_valid(name: str, ranks: int, params: Params) -> None:
    definition = DEFINITION_BY_NAME[name]
    params = definition.complete({"shape": "llama3-8b", "microbatch": 1, **params})
    spec = PRESETS[name](params, ranks)
    small_params = {**params, **shrink_model(spec, params)}
    world_spec = WorldSpec(nproc=ranks, backend="gloo", device="cpu")
    assert definition.refuse(small_params, world_spec) is None
    small = PRESETS[name](small_params, ranks)
    assert small.shape.hidden * small.shape.layers < 20_000
    assert small.dims == spec.dims
    assert small.microbatches == spec.microbatches
    assert small.pipeline_options == spec.pipeline_options


def test_check_memory_contains_single_process_reference() -> None:
    """Two models in bfloat16, gradients, and the states of an optimizer."""
    spec = make_spec("fsdp=8", "llama3-8b")
    elements = count_parameters(spec.shape)
    reference = elements * (2 + 2 + 2 + 12)
    assert check_memory(spec.make_rank_view(0)) > 16 * elements / 8 + reference
