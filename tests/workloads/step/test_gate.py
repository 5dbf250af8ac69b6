"""A step whose reference does not fit in memory is verified by a small model of the same recipe."""

import math
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
from parbench.workloads.step.layout import dtype_of, local, whole
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
    step = build_small_step(world, name, {"check": "small", "layers": 4, **params})
    wrong = count_wrong_after_step(step)
    step.close()
    return wrong, SMALL_MODEL in step.describe().notes


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("fsdp", {"recipe": "llama", "precision": "bfloat16"}),
        ("pp", {"microbatch": 1, "microbatches": 4}),
        ("ep_step", {"aux": 0.01, "tp": 2}),
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
            for name, parameter in step.layout.model.named_parameters():
                if plain_name(name) == "layers.1.attention.v.weight":
                    parameter.register_hook(lambda gradient: 2 * gradient)  # type: ignore[no-untyped-call]
        return step

    params = DEFINITION_BY_NAME["ddp"].whole({**SMALL_PARAMS, "check": "small", "layers": 4})
    step = behind_gate(make, strategies.ddp)(world, **params)
    wrong = count_wrong_after_step(step)
    step.close()
    return wrong, list(step.differences())


def test_gate_names_wrong_gradient_of_small_model(two_ranks: Ranks) -> None:
    for wrong, differences in two_ranks.call(f"{__name__}:check_wrong_small_model"):
        assert wrong > 0
        assert any("small" in text and "layers.1.attention.v" in text for text in differences)


def check_corrupted(world: World) -> list[list[str]]:
    """Return the differences with a gradient that is not a number, and with a changed last bit."""
    step = build_small_step(world, "ddp", {"check": "small"})
    step.reset()
    step.step()
    head = step.layout.model.get_parameter("head.weight")
    hook = head.register_hook(lambda gradient: gradient * math.nan)  # type: ignore[no-untyped-call]
    step.check()
    not_finite = list(step.differences())
    hook.remove()
    if world.rank == 1:
        head.detach().view(torch.int32)[3, 5] ^= 1
    step.check()
    changed = list(step.differences())
    step.close()
    return [not_finite, changed]


def test_gate_checks_replicas_and_finite_gradients(two_ranks: Ranks) -> None:
    first, second = two_ranks.call(f"{__name__}:check_corrupted")
    for not_finite in (first[0], second[0]):
        assert not_finite == ["gradient of head.weight is not finite"]
    assert first[1] == []
    assert second[1] == ["weights are not those of rank 0"]


def choose_references(world: World, free_bytes: list[float]) -> list[bool]:
    """Return whether each step has a reference, with the ranks' free memory."""
    choices = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gate, "free_bytes", lambda world: free_bytes[world.rank])
        for params in ({"check": "auto"}, {"check": "whole"}, {"compute": "timed:1ms"}):
            step = build_small_step(world, "ddp", params)
            choices.append(step.spec.reference_fits)
            step.close()
    return choices


@pytest.mark.parametrize(("second_rank_bytes", "fits"), [(1e9, True), (1e5, False)])
def test_gate_needs_memory_on_all_ranks(
    two_ranks: Ranks, second_rank_bytes: float, fits: bool
) -> None:
    free_bytes = [1e9, second_rank_bytes]
    choices = two_ranks.call(f"{__name__}:choose_references", free_bytes=free_bytes)
    assert choices == [[fits, True, True]] * 2


@pytest.mark.parametrize(
    ("name", "ranks", "overrides"),
    [
        *((name, 8, {}) for name in STRATEGIES if name not in ("pp", "hybrid")),
        ("cp", 8, {"method": "ulysses"}),
        ("pp", 4, {"schedule": "interleaved"}),
        ("pp", 2, {"split": "15+17"}),
        ("hybrid", 16, {"mesh": "pp=4,cp=2,tp=2"}),
        ("hybrid", 8, {"mesh": "dp=2,tp=4,ep=2,etp=2", "experts": 8}),
        ("ep_step", 8, {"etp": 4, "top_k": 6, "experts": 16, "expert_ffn": 1408}),
        ("ep_step", 8, {"tp": 4, "routing": "zipf", "capacity": 1.25}),
    ],
)
def test_small_shape_is_valid(name: str, ranks: int, overrides: Params) -> None:
    definition = DEFINITION_BY_NAME[name]
    params = definition.whole({"shape": "llama3-8b", "microbatch": 1, **overrides})
    spec = STRATEGIES[name](params, ranks, "cpu")
    small_params = {**params, **small_shape(spec, params, ranks)}
    world_spec = WorldSpec(nproc=ranks, backend="gloo", device="cpu")
    assert definition.refuse(small_params, world_spec) is None
    small = STRATEGIES[name](small_params, ranks, "cpu")
    assert small.shape.hidden * small.shape.layers < 20_000
    assert small.mesh == spec.mesh
    assert small.microbatches == spec.microbatches
    assert small.schedule == spec.schedule
    assert small.checkpointing == spec.checkpointing


def is_unsharded(layer: Layer) -> bool:
    return any(type(p.data) is Tensor and not p.is_meta for p in layer.parameters())


def count_unsharded_layers(world: World, name: str, params: Params) -> tuple[int, bool]:
    """Return the most layers that are unsharded at once, and whether weights are right."""
    counts: list[int] = []
    layers: dict[int, Layer] = {}

    def record_layers(module: Any, *args: Any, **kwargs: Any) -> None:
        layers.update({id(part): part for part in module.modules() if isinstance(part, Layer)})
        materialise(module, *args, **kwargs)

    def record_count(module: Any, **kwargs: Any) -> Any:
        counts.append(sum(map(is_unsharded, layers.values())))
        return fully_shard(module, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for user in (training_step, fsdp, mesh_step):
            patch.setattr(user, "materialise", record_layers)
        patch.setattr(mesh_stages if name == "hybrid" else fsdp, "fully_shard", record_count)
        step = build_small_step(world, name, {"layers": 4, **params})
    reference = build(step.spec.shape, world.seed, world.device, dtype_of(step.spec))
    weights_are_right = True
    for key, parameter in step.layout.model.named_parameters():
        expected = reference.get_parameter(plain_name(key))
        is_right = not local(parameter).is_meta and torch.equal(whole(parameter), expected)
        weights_are_right = weights_are_right and is_right
    step.close()
    return max(counts), weights_are_right


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("hsdp", {"precision": "bfloat16"}),
        ("tp_fsdp", {}),
        ("hybrid", {"mesh": "pp=2,fsdp=2", "microbatch": 1, "microbatches": 2}),
    ],
)
def test_fsdp_holds_one_layer_unsharded(four_ranks: Ranks, name: str, params: Params) -> None:
    arguments = {"name": name, "params": params}
    results = four_ranks.call(f"{__name__}:count_unsharded_layers", **arguments)
    assert results == [(1, True)] * 4
