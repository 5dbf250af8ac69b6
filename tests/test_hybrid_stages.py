"""A rank's stages take the gradients of all microbatches, in a pipeline's order or one by one, and say which comes."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from ranks import Ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from bench.params import Value
from bench.world import World
from workloads.definitions import with_defaults
from workloads.experts.moe import exchange_ffns
from workloads.experts.moe_case import moe_of
from workloads.hybrid.hybrid_stages import OneStage, PipelineStages, RoutingRecorder, mixtures_in, shard_stages
from workloads.model import Transformer, build
from workloads.pipeline.pipeline_case import Pipeline
from workloads.pipeline.schedules import make_schedule
from workloads.shapes import SHAPES
from workloads.training import Options

SHAPE = replace(SHAPES["tiny"], hidden=32, ffn=64, sequence=8, vocabulary=50, layers=2)
PARAMS: dict[str, Value] = {"shape": "tiny", "hidden": 32, "ffn": 64, "sequence": 8, "vocabulary": 50, "layers": 2}
CPU = torch.device("cpu")


def part(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / 3


def microbatches() -> tuple[list[Tensor], list[Tensor]]:
    tokens = [torch.randint(50, (1, 9), generator=torch.Generator().manual_seed(n)) for n in range(3)]
    return [one[:, :-1] for one in tokens], [one[:, 1:] for one in tokens]


def model_of(*, mixture: bool) -> Transformer:
    model = build(SHAPE, 0, CPU)
    if mixture:
        exchange_ffns(model, SHAPE, moe_of({"ep": 1, "experts": 4}, SHAPE, 1), 0)
    return model


def expected() -> tuple[float, dict[str, Tensor]]:
    model, (given, targets) = model_of(mixture=False), microbatches()
    loss = torch.stack([part(model(x), y) for x, y in zip(given, targets, strict=True)]).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def apart(named: Any) -> float:
    _, gradients = expected()
    return max(float((p.grad - gradients[name]).abs().max()) for name, p in named)


def test_one_stage_is_the_whole_model() -> None:
    began: list[tuple[int, int]] = []
    model = model_of(mixture=False)
    stage = OneStage(model, part, lambda mixtures, microbatch: began.append((len(mixtures), microbatch)))
    loss = stage.train(*microbatches())
    assert abs(float(loss) - expected()[0]) < 1e-6
    assert began == [(0, 0), (0, 1), (0, 2)]
    assert apart(model.named_parameters()) < 1e-6


def test_a_stage_s_mixtures_are_known_by_the_number_of_their_layer() -> None:
    stage = OneStage(model_of(mixture=True), part, lambda mixtures, microbatch: None)
    assert mixtures_in(stage.chunks[0]).keys() == {0, 1}


def through_a_pipeline(world: World) -> tuple[float | None, float, list[tuple[list[int], int]]]:
    """Return the loss, how far gradients are from one process's, and what came before which microbatch."""
    began: list[tuple[list[int], int]] = []
    recorder = RoutingRecorder(world.device, lambda mixtures, microbatch: began.append((list(mixtures), microbatch)))
    schedule = make_schedule("1f1b", ranks=2, microbatches=3)
    given = {**with_defaults({**PARAMS, "recipe": "gpt"}, ""), "accumulation": 3, "microbatch": 1}
    stages = PipelineStages(
        model_of(mixture=False),
        replace(Options.of(given), shape=SHAPE),
        Pipeline(schedule=schedule, layers_by_stage=(1, 1)),
        recorder,
        world.group,
        tokens=8,
        loss=part,
    )
    loss = stages.train(*microbatches())
    [chunk] = stages.chunks.values()
    assert [str(action)[1] for action, _, _ in recorder.read()].count("F") == 3
    return None if loss is None else float(loss), apart(chunk.named_parameters()), began


def test_a_pipeline_takes_the_same_gradients_in_its_order(two_ranks: Ranks) -> None:
    [first, last] = two_ranks.call("test_hybrid_stages:through_a_pipeline")
    assert first[0] is None
    assert abs(last[0] - expected()[0]) < 1e-6
    schedule = make_schedule("1f1b", ranks=2, microbatches=3)
    for rank, (_, gradients, began) in enumerate((first, last)):
        assert gradients < 1e-6
        # backward begins as forward does, for it may compute its microbatch's layers again
        assert [microbatch for _, microbatch in began] == [action.microbatch for action in schedule.actions_of(rank)]


def sharded(world: World, mixture: bool) -> tuple[set[str], float, bool]:
    """Return which parameters are sharded, the loss apart from one process's, and whether every layer is FSDP's."""
    stage = OneStage(model_of(mixture=mixture), part, lambda mixtures, microbatch: None)
    chunk = stage.chunks[0]
    shard_stages(stage, init_device_mesh("cpu", (world.size,), mesh_dim_names=("fsdp",)), kept=False)
    loss = 0.0 if mixture else float(stage.train(*microbatches())) - expected()[0]
    names = {name for name, p in chunk.named_parameters() if hasattr(p, "placements")}
    return names, loss, all(isinstance(module, FSDPModule) for module in (*chunk.layers.values(), chunk))


def test_all_but_experts_are_sharded(two_ranks: Ranks) -> None:
    dense = {name for name, _ in model_of(mixture=False).named_parameters()}
    for names, loss, everywhere in two_ranks.call("test_hybrid_stages:sharded", mixture=False):
        assert names == dense
        assert abs(loss) < 1e-6
        assert everywhere
    for names, _, _ in two_ranks.call("test_hybrid_stages:sharded", mixture=True):
        assert not any(".experts." in name for name in names)
        assert "layers.0.ffn.router.weight" in names
