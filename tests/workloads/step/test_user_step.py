"""Training loops that users write are compared with a reference and explained."""

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

import parbench
from parbench.bench.world.benchmark import Benchmark, Explanation
from parbench.bench.world.world import World
from parbench.workloads.probes.peaks import Peak
from parbench.workloads.step import user_step
from parbench.workloads.step.user_step import ExplainedUserStep
from tests.support.ranks import Ranks
from tests.support.workloads.training_steps import Params, assert_right, metric_value

CHANNELS = 8
HIDDEN = 32
CNN_BYTES = (CHANNELS * 3 * 9 + CHANNELS + 16 * CHANNELS * 10 + 10) * 4


def build_cnn(world: World, wrong: bool = False, is_wrapped: bool = False) -> Benchmark:
    """Build a convolutional network under DDP; if ``wrong``, one gradient is doubled.

    If ``is_wrapped``, the model is compiled with a checkpointed layer.
    """
    torch.manual_seed(0)
    convolution = nn.Conv2d(3, CHANNELS, 3, padding=1)
    linear = nn.Linear(16 * CHANNELS, 10)
    model = nn.Sequential(convolution, nn.AdaptiveAvgPool2d(4), nn.Flatten(), linear)
    reference = copy.deepcopy(model)
    if wrong:
        convolution.weight.register_hook(lambda gradient: 2 * gradient)  # type: ignore[no-untyped-call]
    if is_wrapped:
        model[0] = checkpoint_wrapper(convolution)
    ddp: nn.Module = DistributedDataParallel(model)
    if is_wrapped:
        ddp = cast(nn.Module, torch.compile(ddp, backend="eager"))
    torch.manual_seed(world.rank)
    batch = torch.randn(4, 3, 16, 16), torch.randint(10, (4,))

    def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with record_function("parbench:data"):
            images, labels = batch
        return cross_entropy(module(images), labels)

    optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
    return parbench.step_of(ddp, batch, loss, optimizer, reference)


class Block(nn.Module):
    """The norm and the MLP of a transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        up = nn.Linear(HIDDEN, 4 * HIDDEN)
        down = nn.Linear(4 * HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(up, nn.GELU(), down)

    def forward(self, x: Tensor) -> Tensor:
        return x + cast(Tensor, self.mlp(self.norm(x)))


def square_loss(module: nn.Module, x: Tensor) -> Tensor:
    return cast(Tensor, module(x)).pow(2).mean()


def build_fsdp(world: World) -> Benchmark:
    """Build three blocks under FSDP2."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Block())
    reference = copy.deepcopy(model)
    for block in model:
        fully_shard(block)
    fully_shard(model)

    def batch(number: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * number + world.rank)
        return torch.randn(4, 16, HIDDEN, generator=generator)

    optimizer = torch.optim.AdamW(model.parameters())
    return parbench.step_of(model, batch, square_loss, optimizer, reference)


def build_tensor_parallel(world: World) -> Benchmark:
    """Build two blocks whose matrices are split over a mesh of one dimension."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    reference = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",))
    for block in model:
        parallelize_module(
            block, mesh, {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()}
        )
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(4, 16, HIDDEN, generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    return parbench.step_of(model, batch, square_loss, optimizer, reference)


class SumInTwoGroups(Benchmark):
    """A benchmark with only a step."""

    def __init__(self, world: World) -> None:
        self._world = world.group
        self._pair = dist.new_group([0, 1], group_desc="tp")

    def step(self) -> None:
        dist.all_reduce(torch.ones(1024), group=self._pair)
        dist.all_reduce(torch.ones(256), group=self._world)

    def close(self) -> None:
        dist.destroy_process_group(self._pair)


BUILDERS: dict[str, Callable[..., Benchmark]] = {
    "ddp": build_cnn,
    "fsdp": build_fsdp,
    "tp": build_tensor_parallel,
    "sums": SumInTwoGroups,
}


def check_loop(world: World, name: str, **params: Any) -> tuple[int, list[str]]:
    loop: Any = BUILDERS[name](world, **params)
    for _ in range(2):
        loop.reset()
        loop.step()
    return loop.check(), list(loop.differences())


@pytest.mark.parametrize("name", ["ddp", "fsdp", "tp"])
def test_loop_matches_reference(two_ranks: Ranks, name: str) -> None:
    assert two_ranks.call(f"{__name__}:check_loop", name=name) == [(0, [])] * 2


def test_mesh_of_a_loop_is_not_used_by_later_steps(two_ranks: Ranks) -> None:
    """DTensor caches a mesh, and takes it for another one with equal ranks and names."""
    two_ranks.call(f"{__name__}:check_loop", name="tp")
    assert_right(two_ranks, "tp", {"vocabulary": 61, "microbatches": 2})


@pytest.mark.parametrize(
    ("params", "differences"),
    [
        ({"is_wrapped": True}, []),
        ({"wrong": True}, ["0.weight is 2 times the reference"]),
    ],
)
def test_loop_names_wrong_gradients(
    two_ranks: Ranks, params: Params, differences: list[str]
) -> None:
    results = two_ranks.call(f"{__name__}:check_loop", name="ddp", **params)
    assert results == [(len(differences), differences)] * 2


def explain_loop(world: World, name: str) -> Explanation:
    loop = BUILDERS[name](world)
    step = ExplainedUserStep(world, loop)
    for _ in range(2):
        step.step()
    with pytest.MonkeyPatch.context() as patch:
        peak = Peak(flops_per_second=1e15, source="a test")
        patch.setattr(user_step, "find_peak", lambda device, dtype: peak)
        explanation = step.explain_step(loop.reset, 0.0)
    step.close()
    return explanation


def explain(ranks: Ranks, name: str) -> Explanation:
    explanation: Explanation = ranks.call(f"{__name__}:explain_loop", name=name)[0]
    return explanation


def test_explanation_uses_group_names(two_ranks: Ranks) -> None:
    explanation = explain(two_ranks, "sums")
    # A ring of two ranks sends 2 (n - 1) / n of 4 KiB.
    assert metric_value(explanation, "bytes_sent.tp") == 4096
    assert metric_value(explanation, "bytes_sent.world") == 1024
    assert {"ect", "exposed_comm.tp", "exposed_comm.world"} <= explanation.metrics.keys()


def test_explanation_of_ddp_loop(two_ranks: Ranks) -> None:
    explanation = explain(two_ranks, "ddp")
    assert metric_value(explanation, "bytes_sent.world") == CNN_BYTES
    assert 0 < metric_value(explanation, "mfu") < 1
    assert metric_value(explanation, "memory_peak") > CNN_BYTES


def test_loop_marks_its_phases(two_ranks: Ranks) -> None:
    explanation = explain(two_ranks, "ddp")
    phases = ("forward", "backward", "optimizer", "data")
    seconds = {phase: metric_value(explanation, f"phase_time.{phase}") for phase in phases}
    assert min(seconds.values()) > 0
    assert seconds["data"] < seconds["forward"] + seconds["backward"]
    exposed = metric_value(explanation, "exposed_comm.world")
    share = metric_value(explanation, "phase_exposed.backward") / exposed
    assert 0.5 < share < 1.001
