"""Training loops as users write them, measured with ``--target own_steps:NAME``."""

import copy
import time

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import parbench
from bench.world.subject import Subject
from bench.world.world import World


def cnn(world: World, *, channels: int = 8, wrong: bool = False, late_seconds: float = 0.0) -> Subject:
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
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.mlp(self.norm(x))
        return found


def blocks(world: World, *, hidden: int = 32) -> Subject:
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


class Bare(Subject):
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


def bare(world: World) -> Subject:
    return Bare(world)
