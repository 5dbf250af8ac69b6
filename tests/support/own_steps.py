"""Training loops as users write them, measured with ``--target tests.support.own_steps:NAME``."""

import copy
import time

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel

import parbench
from parbench.bench.world.benchmark import Benchmark
from parbench.bench.world.world import World


def cnn(
    world: World, *, channels: int = 8, wrong: bool = False, late_seconds: float = 0.0
) -> Benchmark:
    """A convolutional network under DDP; of a ``wrong`` one a gradient is twice what it should be."""
    torch.manual_seed(0)
    first = nn.Conv2d(3, channels, 3, padding=1)
    pooled = (nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * channels, 10))
    model = nn.Sequential(first, *pooled).to(world.device)
    reference = copy.deepcopy(model)
    whole = DistributedDataParallel(model)
    if wrong:
        first.weight.register_hook(lambda gradient: 2 * gradient)  # type: ignore[no-untyped-call]
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.01)
    torch.manual_seed(world.rank)
    images, labels = torch.randn(4, 3, 16, 16), torch.randint(10, (4,))

    def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if late_seconds and module is whole and world.rank == 1:
            time.sleep(late_seconds)
        found: Tensor = cross_entropy(module(batch[0].to(world.device)), batch[1].to(world.device))
        return found

    return parbench.step_of(whole, (images, labels), loss, optimizer, reference)


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.mlp(self.norm(x))
        return found


def blocks(world: World, *, hidden: int = 32) -> Benchmark:
    """Transformer-like blocks under FSDP2."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(hidden) for _ in range(3))).to(world.device)
    reference = copy.deepcopy(model)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())

    def batch(number: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * number + world.rank)
        return torch.randn(4, 16, hidden, generator=generator).to(world.device)

    def loss(module: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = module(x).pow(2).mean()
        return found

    return parbench.step_of(model, batch, loss, optimizer, reference)


def split_in_columns_and_rows(world: World, *, hidden: int = 32) -> Benchmark:
    """Transformer-like blocks whose products are split over a mesh of one dimension, tp."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(hidden) for _ in range(2))).to(world.device)
    reference = copy.deepcopy(model)
    mesh = init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("tp",))
    for block in model:
        parallelize_module(block, mesh, {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()})
    data = torch.randn(4, 16, hidden, generator=torch.Generator().manual_seed(1)).to(world.device)

    def loss(module: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = module(x).pow(2).mean()
        return found

    return parbench.step_of(
        model, data, loss, torch.optim.SGD(model.parameters(), lr=0.01), reference
    )


def stages(world: World, *, hidden: int = 32, microbatches: int = 4) -> Benchmark:
    """Two transformer-like blocks as the stages of a pipeline."""
    torch.manual_seed(world.rank)
    stage = PipelineStage(
        Block(hidden).to(world.device), world.rank, world.size, world.device, group=world.group
    )
    schedule = Schedule1F1B(stage, microbatches, loss_fn=mse_loss)
    data = torch.randn(2 * microbatches, 16, hidden, device=world.device)
    batch = (data,) if world.rank == 0 else {"target": data}
    return parbench.step_of(
        schedule, batch, None, torch.optim.SGD(stage.submod.parameters(), lr=0.01)
    )


class Bare(Benchmark):
    """Nothing but a step: two all_reduces on groups of different names."""

    def __init__(self, world: World) -> None:
        self._pair = torch.distributed.new_group([0, 1], group_desc="tp")
        self._tensor, self._group = torch.ones(1024, device=world.device), world.group

    def step(self) -> None:
        torch.distributed.all_reduce(self._tensor, group=self._pair)
        torch.distributed.all_reduce(self._tensor[:256], group=self._group)
        self._tensor.fill_(1.0)

    def close(self) -> None:
        torch.distributed.destroy_process_group(self._pair)


def bare(world: World) -> Benchmark:
    return Bare(world)
