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
from tests.support.training_steps import DEFINITION_BY_NAME, SMALL_PARAMS, Params, build_small_step

MESH = {"kv_heads": 4, "microbatch": 1, "microbatches": 2}


def checked(world: World, name: str, params: Params) -> tuple[int, bool]:
    """Return how much is wrong of a right step without a reference of its size, and whether its row says so."""
    step = build_small_step(world, name, {"check": "small", "layers": 4, **params})
    step.reset()
    step.step()
    wrong = step.check()
    step.close()
    return wrong, SMALL_MODEL in step.describe().notes


def test_gate_passes_right_steps_and_notes_the_small_model(two_ranks: Ranks) -> None:
    for name, params in (
        ("fsdp", {"recipe": "llama", "precision": "bfloat16"}),
        ("pp", {"microbatch": 1, "microbatches": 4}),
        ("ep_step", {"aux": 0.01, "tp": 2}),
    ):
        assert (
            two_ranks.call(
                "tests.workloads.step.test_small_model:checked", name=name, params=params
            )
            == [(0, True)] * 2
        ), name


def spoilt_small_model(world: World) -> tuple[int, list[str]]:
    """Return the result of a check whose small model doubles a gradient; the model of full size is right."""
    tensor = "layers.1.attention.v.weight"

    def make(world: World, params: Any) -> TrainingStep:
        step = TrainingStep(world, params, ddp.lay_out, strategies.ddp)
        if params["check"] == "whole":
            parameters = {
                plain_name(name): parameter
                for name, parameter in step.layout.model.named_parameters()
            }
            parameters[tensor].register_hook(lambda gradient: 2 * gradient)  # type: ignore[no-untyped-call]
        return step

    params = DEFINITION_BY_NAME["ddp"].whole({**SMALL_PARAMS, "check": "small", "layers": 4})
    step = behind_gate(make, strategies.ddp)(world, **params)
    step.reset()
    step.step()
    wrong = step.check()
    step.close()
    return wrong, list(step.differences())


def test_gate_names_a_wrong_gradient_of_the_small_model(two_ranks: Ranks) -> None:
    for wrong, differences in two_ranks.call(
        "tests.workloads.step.test_small_model:spoilt_small_model"
    ):
        assert wrong > 0
        assert (
            "on a small model: gradient of layers.1.attention.v.weight is 2 of the reference"
            in differences
        )


def spoilt_at_size(world: World) -> list[list[str]]:
    """Return the differences without a reference: of a gradient that is no number, and of a replica's last bit."""
    step = build_small_step(world, "ddp", {"check": "small"})
    step.reset()
    step.step()
    found = []
    head = step.layout.model.get_parameter("head.weight")
    hook = head.register_hook(lambda gradient: gradient * math.nan)  # type: ignore[no-untyped-call]
    step.check()
    found.append(list(step.differences()))
    hook.remove()
    if world.rank == 1:
        head.detach().view(torch.int32)[3, 5] ^= 1
    step.check()
    found.append(list(step.differences()))
    step.close()
    return found


def test_gate_without_reference_checks_replicas_and_finite_gradients(two_ranks: Ranks) -> None:
    first, second = two_ranks.call("tests.workloads.step.test_small_model:spoilt_at_size")
    assert first == [["gradient of head.weight is not finite"], []]
    assert second == [
        ["gradient of head.weight is not finite"],
        ["weights are not those of rank 0"],
    ]


def chosen(world: World, free: list[float]) -> list[bool]:
    """Return for each value of ``check`` whether a step has a reference, where ranks have so much memory free."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gate, "free_bytes", lambda world: free[world.rank])
        for params in (
            *({"check": check} for check in ("auto", "whole", "small")),
            {"compute": "timed:1ms"},
        ):
            step = build_small_step(world, "fsdp", params)
            found.append(step.spec.reference_fits)
            step.close()
    return found


def test_gate_chooses_alike_on_all_ranks_by_free_memory(two_ranks: Ranks) -> None:
    for free, fits in (([1e9, 1e9], True), ([1e9, 1e5], False), ([1e5, 1e5], False)):
        assert (
            two_ranks.call("tests.workloads.step.test_small_model:chosen", free=free)
            == [[fits, True, False, True]] * 2
        )


def test_small_shape_is_valid_for_every_recipe() -> None:
    asked: list[tuple[str, int, Params]] = [
        *(
            ("hybrid", 16, {"mesh": mesh})
            for mesh in ("dp=2,pp=2,tp=4", "fsdp=4,cp=4", "pp=4,cp=2,tp=2")
        ),
        *((name, 8, {}) for name in STRATEGIES if name not in ("pp", "hybrid")),
        *(
            ("cp", 8, {"method": method})
            for method in ("ring", "striped", "ulysses", "usp", "allgather_kv")
        ),
        *(
            ("pp", 4, {"schedule": schedule})
            for schedule in ("1f1b", "interleaved", "zb_v", "dualpipe_v")
        ),
        ("pp", 2, {"split": "15+17"}),
        ("hybrid", 8, {"mesh": "dp=2,tp=4,ep=2,etp=2", "experts": 8}),
        ("ep_step", 8, {"etp": 4, "top_k": 6, "experts": 16, "expert_ffn": 1408}),
        ("ep_step", 8, {"tp": 4, "routing": "zipf", "capacity": 1.25}),
    ]
    for name, ranks, more in asked:
        definition, given = (
            DEFINITION_BY_NAME[name],
            {"shape": "llama3-8b", "microbatch": 1, **more},
        )
        params = definition.whole(given)
        spec = STRATEGIES[name](params, ranks, "cpu")
        small_params = {**params, **small_shape(spec, params, ranks)}
        place = WorldSpec(nproc=ranks, backend="gloo", device="cpu")
        assert definition.refuse(small_params, place) is None, (name, more)
        made = STRATEGIES[name](small_params, ranks, "cpu")
        assert made.shape.hidden * made.shape.layers < 20_000
        kept = (
            "microbatch",
            "microbatches",
            "element_bytes",
            "checkpointing",
            "schedule",
            "cp_method",
        )
        assert made.mesh == spec.mesh
        assert all(getattr(made, one) == getattr(spec, one) for one in kept)


def whole_when_sharded(world: World, name: str, params: Params) -> tuple[list[int], bool]:
    """Return how many layers are whole on the device whenever one is sharded, and whether weights are one process's."""
    counts: list[int] = []
    begun: list[Layer] = []

    def noted(module: Any, *where: Any, **more: Any) -> None:
        begun.extend(
            part for part in module.modules() if isinstance(part, Layer) and part not in begun
        )
        materialise(module, *where, **more)

    def counted(module: Any, **how: Any) -> Any:
        counts.append(
            sum(
                any(type(p.data) is Tensor and not p.is_meta for p in m.parameters()) for m in begun
            )
        )
        return fully_shard(module, **how)

    with pytest.MonkeyPatch.context() as patch:
        for where in (training_step, fsdp, mesh_step):
            patch.setattr(where, "materialise", noted)
        patch.setattr(mesh_stages if name == "hybrid" else fsdp, "fully_shard", counted)
        step = build_small_step(world, name, {"layers": 4, **params})
    alone = dict(
        build(step.spec.shape, world.seed, world.device, dtype_of(step.spec)).named_parameters()
    )
    held = {plain_name(n): whole(p) for n, p in step.layout.model.named_parameters()}
    same = all(torch.equal(weights, alone[n]) for n, weights in held.items())
    step.close()
    return counts, same and not any(local(p).is_meta for p in step.layout.model.parameters())


def test_fsdp_holds_one_layer_unsharded_at_a_time(four_ranks: Ranks) -> None:
    for name, params in (
        ("fsdp", {}),
        ("hsdp", {"precision": "bfloat16"}),
        ("tp_fsdp", {}),
        ("hybrid", {**MESH, "mesh": "fsdp=4"}),
        ("hybrid", {**MESH, "mesh": "pp=2,fsdp=2"}),
    ):
        for counts, same in four_ranks.call(
            "tests.workloads.step.test_small_model:whole_when_sharded", name=name, params=params
        ):
            assert max(counts) == 1, (name, counts)
            assert same, name
