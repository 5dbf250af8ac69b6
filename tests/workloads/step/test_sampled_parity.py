"""A step too large for one process's beside it passes on a small shape of its recipe, and on some layers at size."""

from functools import partial
from typing import Any

import pytest
import torch
from ranks import Ranks
from spoilings import FACTORS
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from training_steps import OF_NAME, SMALL, Params, small

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.world.world import World
from parbench.workloads.catalogue import STRATEGIES
from parbench.workloads.costs import strategies
from parbench.workloads.data_parallel import ddp, fsdp
from parbench.workloads.mesh import mesh_stages, mesh_step
from parbench.workloads.model.shapes import SHAPES
from parbench.workloads.model.transformer import Layer, attend, build, loss_of, materialise, plain_name
from parbench.workloads.step import gate, sampled_parity, training_step
from parbench.workloads.step.gate import gated, small_shape
from parbench.workloads.step.layout import dtype_of, local, whole
from parbench.workloads.step.parity import Parity
from parbench.workloads.step.sampled_parity import SampledParity, attend_by_keys, sampled_layers
from parbench.workloads.step.training_step import TrainingStep

SIZE = {"check": "sampled", "layers": 4}
STAGES = {"microbatch": 1, "microbatches": 4}
MESH = {"kv_heads": 4, "microbatch": 1, "microbatches": 2}
NARROW = {"precision": "bfloat16"}
RIGHT_ON_2: dict[str, tuple[str, Params]] = {
    "ddp": ("ddp", {"accumulation": 2}),
    "ddp_bf16": ("ddp_bf16", {}),
    "zero1": ("zero1", {"optimizer": "distributed", **NARROW}),
    "fsdp": ("fsdp", {"recipe": "llama", **NARROW}),
    "tp": ("tp", {}),
    "tp_sp": ("tp_sp", {"recipe": "llama"}),
    "cp": ("cp", {"method": "zigzag"}),
    "cp of a full mask": ("cp", {"method": "ulysses", "mask": "full", **NARROW}),
    "pp": ("pp", {**STAGES, "schedule": "zb_h1"}),
    "experts, router": ("ep_step", {"aux": 0.01, "tp": 2}),
    "experts, generator, fsdp": ("ep_step", {"routing": "zipf", "fsdp": True, **NARROW}),
}
RIGHT_ON_4: dict[str, tuple[str, Params]] = {
    "hsdp": ("hsdp", {}),
    "tp_fsdp": ("tp_fsdp", NARROW),
    "pp of fsdp": ("hybrid", {**MESH, "mesh": "pp=2,fsdp=2"}),
    "cp of experts": ("hybrid", {**MESH, "mesh": "cp=2,dp=2,ep=2", "experts": 4, "ffn": 64}),
}


def passed(world: World, cases: dict[str, tuple[str, Params]]) -> dict[str, Any]:
    """Return what is wrong with each right step, in whose small shape, and whether its row says how it was checked."""
    found = {}
    for label, (name, params) in cases.items():
        step = small(world, name, {**SIZE, **params})
        step.reset()
        step.step()
        said = any("small shape of the recipe" in note and "layers 0 and 2" in note for note in step.describe().notes)
        found[label] = (step.check(), step.found_small, said and isinstance(step._parity, SampledParity))
        step.close()
    return found


def test_a_right_step_of_every_recipe_passes_at_size_and_its_row_says_how(two_ranks: Ranks, four_ranks: Ranks) -> None:
    assert sampled_layers(4, seed=0) == (0, 2)
    for ranks, cases in ((two_ranks, RIGHT_ON_2), (four_ranks, RIGHT_ON_4)):
        for found in ranks.call("test_sampled_parity:passed", cases=cases):
            assert found == dict.fromkeys(cases, (0, (0, ()), True))


def assert_named(ranks: Ranks, name: str, params: Params, tensors: list[str], **how: object) -> None:
    given = {**SMALL, **SIZE, **params}
    found = ranks.call("spoilings:unseen", name=name, params=given, tensors=tensors, **how)
    assert not set.intersection(*map(set, found)), (name, params)


def test_a_wrong_gradient_of_a_sampled_layer_or_of_the_ends_is_named_at_size(two_ranks: Ranks) -> None:
    of_layers = ["layers.2.attention.k.weight", "layers.0.ffn_norm.weight"]
    assert_named(
        two_ranks,
        "fsdp",
        NARROW,
        [*of_layers, "tokens.weight", "norm.weight"],
        spoilings=["missing", "doubled"],
        after=True,
    )
    assert_named(two_ranks, "fsdp", {}, of_layers, spoilings=["missing", "halved"], only=1, after=True)
    assert_named(
        two_ranks, "tp", NARROW, ["layers.2.attention.q.weight", "head.weight"], spoilings=["halved", "negated"]
    )
    assert_named(
        two_ranks,
        "ep_step",
        NARROW,
        ["layers.2.ffn.experts.up", "layers.0.ffn.router.weight"],
        spoilings=["missing", "negated"],
        after=True,
    )
    assert_named(two_ranks, "pp", {**STAGES, **NARROW}, ["layers.2.ffn.up.weight"], spoilings=["negated", "halved"])


def passed_on(world: World, spoilt: str, factor: float) -> tuple[int, bool]:
    """Return what the gate finds, before any step at size, where the small shape's gradient is a multiple of itself."""
    params = OF_NAME["ddp"].whole({**SMALL, **SIZE, **NARROW})

    def make(world: World, given: Any) -> TrainingStep:
        step = TrainingStep(world, given, ddp.lay_out, strategies.ddp)
        if given["check"] == "whole":
            held = {plain_name(name): parameter for name, parameter in step.layout.model.named_parameters()}
            held[spoilt].register_hook(lambda gradient: factor * gradient)  # type: ignore[no-untyped-call]
        return step

    step = gated(make, world, params, strategies.ddp)
    step.reset()
    step.step()
    wrong = step.check()
    words = step.differences()
    step.close()
    return wrong, any(spoilt in one for one in words) and all(one.startswith("on a small shape: ") for one in words)


@pytest.mark.parametrize("spoilt", ["layers.1.attention.v.weight", "positions.weight"])
def test_a_wrong_gradient_anywhere_in_the_small_shape_is_named(two_ranks: Ranks, spoilt: str) -> None:
    for factor in FACTORS.values():
        for wrong, named in two_ranks.call("test_sampled_parity:passed_on", spoilt=spoilt, factor=factor):
            assert wrong > 0, factor
            assert named, factor


def gates(world: World, free: list[float]) -> list[str]:
    """Return the gate of a small step for each asked check, ranks having so much memory free; timed ones have one."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gate, "free_bytes", lambda world: free[world.rank])
        for params in (*({"check": check} for check in ("auto", "whole", "sampled")), {"compute": "timed:1ms"}):
            step = small(world, "fsdp", params)
            found.append(type(step._parity).__name__)
            step.close()
    return found


def test_memory_decides_on_all_ranks_alike_unless_it_is_said(two_ranks: Ranks) -> None:
    both = [Parity.__name__, SampledParity.__name__]
    for free, decided in (([1e9, 1e9], 0), ([1e9, 1e5], 1), ([1e5, 1e5], 1)):
        assert two_ranks.call("test_sampled_parity:gates", free=free) == [[both[decided], *both, both[0]]] * 2


def test_a_small_shape_can_carry_whatever_the_recipe_can() -> None:
    asked: list[tuple[str, int, Params]] = [
        *(("hybrid", 16, {"mesh": mesh}) for mesh in ("dp=2,pp=2,tp=4", "fsdp=4,cp=4", "pp=4,cp=2,tp=2")),
        *((name, 8, {}) for name in STRATEGIES if name not in ("pp", "hybrid")),
        *(("cp", 8, {"method": method}) for method in ("ring", "striped", "ulysses", "usp", "allgather_kv")),
        *(("pp", 4, {"schedule": schedule}) for schedule in ("1f1b", "interleaved", "zb_v", "dualpipe_v")),
        ("pp", 2, {"split": "15+17"}),
        ("hybrid", 8, {"mesh": "dp=2,tp=4,ep=2,etp=2", "experts": 8}),
        ("ep_step", 8, {"etp": 4, "top_k": 6, "experts": 16, "expert_ffn": 1408}),
        ("ep_step", 8, {"tp": 4, "routing": "zipf", "capacity": 1.25}),
    ]
    for name, ranks, more in asked:
        definition, given = OF_NAME[name], {"shape": "llama3-8b", "microbatch": 1, **more}
        params = definition.whole(given)
        spec = STRATEGIES[name](params, ranks, "cpu")
        small_params = {**params, **small_shape(spec, params, ranks)}
        place = WorldSpec(nproc=ranks, backend="gloo", device="cpu")
        assert definition.refuse(small_params, place) is None, (name, more)
        made = STRATEGIES[name](small_params, ranks, "cpu")
        assert made.shape.hidden * made.shape.layers < 20_000
        kept = ("microbatch", "microbatches", "element_bytes", "checkpointing", "schedule", "cp_method")
        assert made.mesh == spec.mesh
        assert all(getattr(made, one) == getattr(spec, one) for one in kept)


def whole_when_sharded(world: World, name: str, params: Params) -> tuple[list[int], bool]:
    """Return how many layers are whole on the device whenever one is sharded, and whether weights are one process's."""
    counts: list[int] = []
    begun: list[Layer] = []

    def noted(module: Any, *where: Any, **more: Any) -> None:
        begun.extend(part for part in module.modules() if isinstance(part, Layer) and part not in begun)
        materialise(module, *where, **more)

    def counted(module: Any, **how: Any) -> Any:
        counts.append(sum(any(type(p.data) is Tensor and not p.is_meta for p in m.parameters()) for m in begun))
        return fully_shard(module, **how)

    with pytest.MonkeyPatch.context() as patch:
        for where in (training_step, fsdp, mesh_step):
            patch.setattr(where, "materialise", noted)
        patch.setattr(mesh_stages if name == "hybrid" else fsdp, "fully_shard", counted)
        step = small(world, name, {"layers": 4, **params})
    alone = dict(build(step.spec.shape, world.seed, world.device, dtype_of(step.spec)).named_parameters())
    held = {plain_name(n): whole(p) for n, p in step.layout.model.named_parameters()}
    same = all(torch.equal(weights, alone[n]) for n, weights in held.items())
    step.close()
    return counts, same and not any(local(p).is_meta for p in step.layout.model.parameters())


def test_where_fsdp_shards_one_layer_at_a_time_is_whole_and_weights_are_those_of_one_process(four_ranks: Ranks) -> None:
    for name, params in (
        ("fsdp", {}),
        ("hsdp", NARROW),
        ("tp_fsdp", {}),
        ("hybrid", {**MESH, "mesh": "fsdp=4"}),
        ("hybrid", {**MESH, "mesh": "pp=2,fsdp=2"}),
    ):
        for counts, same in four_ranks.call("test_sampled_parity:whole_when_sharded", name=name, params=params):
            assert max(counts) == 1, (name, counts)
            assert same, name


def in_pieces(world: World) -> tuple[dict[str, float], float]:
    """Return the largest difference of each gradient of one process's pass in pieces from its pass at once."""
    step = small(world, "fsdp", {**SIZE, "recipe": "llama", "layers": 2})
    step.reset()
    step.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampled_parity, "LOGITS", 64 * 7)
        patch.setattr(sampled_parity, "SCORES", 0)
        assert step.check() == 0
        assert isinstance(step._parity, SampledParity)
        loss, found = step._parity._alone_in_parts(_batch(step), torch.float64, 0)
    alone = build(step.spec.shape, world.seed, world.device, torch.float64)
    with torch.no_grad():
        for name, parameter in step.layout.model.named_parameters():
            alone.get_parameter(name).copy_(whole(parameter))
    right = loss_of(alone, torch.cat(_batch(step)))
    right.backward()  # type: ignore[no-untyped-call]
    step.close()
    gradients = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    apart = {name: float((gradients[name] - gradient).abs().max()) for name, gradient in found.items()}
    return apart, abs(float(right.detach()) - loss)


def _batch(step: TrainingStep) -> list[Tensor]:
    return list(step._batch.chunk(step.layout.data_size))


def test_a_pass_in_pieces_is_the_pass_at_once(two_ranks: Ranks) -> None:
    for apart, loss in two_ranks.call("test_sampled_parity:in_pieces"):
        assert len(apart) == 3 + 2 * 9
        assert max(loss, *apart.values()) < 1e-12, apart


def test_attention_in_pieces_of_shared_keys_is_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SHAPES["tiny-llama"]
    chance = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, 16, 8, generator=chance, dtype=torch.float64, requires_grad=True)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    monkeypatch.setattr(sampled_parity, "SCORES", 0)
    found, right = attend_by_keys(q, k, v), attend(q, k, v)
    torch.testing.assert_close(found, right)
    wanted = partial(torch.autograd.grad, inputs=(q, k, v), grad_outputs=torch.randn_like(right))
    torch.manual_seed(0)
    for one, other in zip(wanted(found), wanted(right), strict=True):
        torch.testing.assert_close(one, other)
