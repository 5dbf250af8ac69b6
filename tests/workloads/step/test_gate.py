"""A step whose reference does not fit in memory is verified by a small model of the same recipe."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.world.world import World
from parbench.workloads.catalogue import STRATEGIES
from parbench.workloads.costs import strategies
from parbench.workloads.data_parallel import ddp, fsdp
from parbench.workloads.mesh import mesh_stages, mesh_step
from parbench.workloads.model.transformer import Layer, build, materialise, plain_name
from parbench.workloads.step import gate, training_step
from parbench.workloads.step.gate import behind_gate, small_shape
from parbench.workloads.step.layout import dtype_of, whole
from parbench.workloads.step.training_step import SMALL_MODEL, TrainingStep
from tests.support.ranks import Ranks
from tests.support.training_steps import (
    DEFINITION_BY_NAME,
    SMALL_PARAMS,
    Params,
    build_small_step,
    count_wrong_after_step,
)


def check_without_reference(world: World, name: str, params: Params) -> tuple[int, bool]:
    """Return the number of wrong elements, and whether the description names the small model."""
    step = build_small_step(world, name, {"check": "small", **params})
    wrong = count_wrong_after_step(step)
    step.close()
    return wrong, SMALL_MODEL in step.describe().notes


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("fsdp", {"layers": 4, "recipe": "llama"}),
        ("pp", {"microbatches": 2}),
        ("ep_step", {"tp": 2}),
    ],
)
def test_gate_passes_right_step(two_ranks: Ranks, name: str, params: Params) -> None:
    arguments = {"name": name, "params": params}
    assert two_ranks.call(f"{__name__}:check_without_reference", **arguments) == [(0, True)] * 2


def check_wrong_small_model(world: World) -> tuple[int, list[str]]:
    """Return the check's result if only the small model doubles a gradient."""

    def make(world: World, params: Any) -> TrainingStep:
        step = TrainingStep(world, params, ddp.lay_out, strategies.ddp)
        if params["check"] == "whole":
            value = step.layout.model.get_parameter("layers.1.attention.v.weight")
            value.register_hook(lambda gradient: 2 * gradient)  # type: ignore[no-untyped-call]
        return step

    params = DEFINITION_BY_NAME["ddp"].complete({**SMALL_PARAMS, "check": "small", "layers": 4})
    step = behind_gate(make, strategies.ddp)(world, **params)
    wrong = count_wrong_after_step(step)
    step.close()
    return wrong, list(step.differences())


def test_gate_names_wrong_gradient_of_small_model(two_ranks: Ranks) -> None:
    for wrong, differences in two_ranks.call(f"{__name__}:check_wrong_small_model"):
        assert wrong > 0
        assert any("small" in text and "layers.1.attention.v" in text for text in differences)


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
    step = build_small_step(world, "ddp", {"check": "small"})
    step.reset()
    step.step()
    if world.rank == 1:
        head = step.layout.model.get_parameter("head.weight")
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
def test_gate_names_difference(two_ranks: Ranks, corruption: str, difference: str) -> None:
    target = f"{__name__}:list_differences"
    _, differences = two_ranks.call(target, corruption=corruption)
    assert differences == [difference]


def has_reference(world: World, free_bytes: list[float], params: Params) -> bool:
    """Return whether the step has a reference with the ranks' free memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gate, "free_bytes", lambda world: free_bytes[world.rank])
        step = build_small_step(world, "ddp", params)
    step.close()
    return step.spec.reference_fits


@pytest.mark.parametrize(
    ("params", "bytes_of_rank_1", "fits"),
    [
        ({"check": "auto"}, 1e9, True),
        ({"check": "auto"}, 1e5, False),
        ({"check": "whole"}, 1e5, True),
        ({"compute": "timed:1ms"}, 1e5, True),
    ],
)
def test_gate_needs_memory_on_all_ranks(
    two_ranks: Ranks, params: Params, bytes_of_rank_1: float, fits: bool
) -> None:
    arguments = {"free_bytes": [1e9, bytes_of_rank_1], "params": params}
    assert two_ranks.call(f"{__name__}:has_reference", **arguments) == [fits, fits]


@pytest.mark.parametrize(
    ("name", "ranks", "params"),
    [
        ("fsdp", 8, {}),
        ("tp_sp", 8, {}),
        ("cp", 8, {"cp_method": "ulysses"}),
        ("pp", 2, {"split": "15+17"}),
        ("hybrid", 16, {"mesh": "pp=4,cp=2,tp=2"}),
        ("hybrid", 8, {"mesh": "dp=2,tp=4,ep=2,etp=2", "experts": 8}),
        ("ep_step", 8, {"etp": 4, "top_k": 6, "experts": 16, "expert_ffn": 1408}),
    ],
)
def test_small_shape_is_valid(name: str, ranks: int, params: Params) -> None:
    definition = DEFINITION_BY_NAME[name]
    params = definition.complete({"shape": "llama3-8b", "microbatch": 1, **params})
    spec = STRATEGIES[name](params, ranks, "cpu")
    small_params = {**params, **small_shape(spec, params, ranks)}
    world_spec = WorldSpec(nproc=ranks, backend="gloo", device="cpu")
    assert definition.refuse(small_params, world_spec) is None
    small = STRATEGIES[name](small_params, ranks, "cpu")
    assert small.shape.hidden * small.shape.layers < 20_000
    assert small.mesh == spec.mesh
    assert small.microbatches == spec.microbatches
    assert small.schedule == spec.schedule


def is_unsharded(layer: Layer) -> bool:
    return any(type(p.data) is Tensor and not p.is_meta for p in layer.parameters())


def count_unsharded_layers(world: World, name: str, params: Params) -> int:
    """Check the initial weights; return the most layers that are unsharded at once."""
    counts: list[int] = []
    layers: list[Layer] = []

    def record_layers(module: Any, *args: Any, **kwargs: Any) -> None:
        layers.extend(part for part in module.modules() if isinstance(part, Layer))
        materialise(module, *args, **kwargs)

    def record_count(module: Any, **kwargs: Any) -> Any:
        counts.append(len({id(layer) for layer in layers if is_unsharded(layer)}))
        return fully_shard(module, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for user in (training_step, fsdp, mesh_step):
            patch.setattr(user, "materialise", record_layers)
        for user in (mesh_stages, fsdp):
            patch.setattr(user, "fully_shard", record_count)
        step = build_small_step(world, name, {"layers": 4, **params})
    reference = build(step.spec.shape, world.seed, world.device, dtype_of(step.spec))
    for key, parameter in step.layout.model.named_parameters():
        expected = reference.get_parameter(plain_name(key))
        assert torch.equal(whole(parameter), expected)
    step.close()
    return max(counts)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("fsdp", {"precision": "bfloat16"}),
        ("hybrid", {"mesh": "fsdp=2", "microbatch": 1}),
    ],
)
def test_fsdp_holds_one_layer_unsharded(two_ranks: Ranks, name: str, params: Params) -> None:
    arguments = {"name": name, "params": params}
    assert two_ranks.call(f"{__name__}:count_unsharded_layers", **arguments) == [1, 1]
