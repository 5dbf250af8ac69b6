"""The numerical check accepts gradients, losses and updates within rounding, and no others."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parbench.bench.world.world import World
from parbench.workloads.costs.parameter_table import num_parameters
from parbench.workloads.model.optimizer import LEARNING_RATE, make_optimizer
from parbench.workloads.model.shapes import Shape
from parbench.workloads.model.transformer import build, draw_tokens, loss_of
from parbench.workloads.step.layout import Layout
from parbench.workloads.step.parity import Parity, count_unlike_rank_0
from tests.support.ranks import Ranks

SHAPE = Shape(
    recipe="gpt", layers=2, hidden=32, heads=4, kv_heads=4, ffn=64, sequence=16, vocabulary=64
)


class Trainer:
    """A data-parallel loop that averages gradients; a test corrupts gradients or updates."""

    def __init__(self, world: World, dtype: str = "float32", update: str = "right") -> None:
        self.world = world
        self.dtype = getattr(torch, dtype)
        self.model = build(SHAPE, world.seed, world.device, self.dtype)
        self.optimizer = make_optimizer(self.model.parameters(), self.dtype)
        self.batch = draw_tokens(SHAPE, 2 * world.size, world.seed, 1)
        self.num_steps = 0
        self.corrupt: Callable[[Trainer], object] = lambda trainer: None
        self.update = UPDATES[update]
        layout = Layout(
            module=self.model,
            model=self.model,
            optimizer=self.optimizer,
            axes={"dp": world.group},
            data_rank=world.rank,
            data_size=world.size,
        )
        self.parity = Parity(world, layout, SHAPE, self.dtype)

    def backward(self) -> Tensor:
        """Compute the gradients of this rank's part of the batch without any communication."""
        self.optimizer.zero_grad()
        loss = loss_of(self.model, self.batch.chunk(self.world.size)[self.world.rank])
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def compute_gradients(self) -> Tensor:
        loss = self.backward()
        for gradient in self.gradients():
            dist.all_reduce(gradient, group=self.world.group)
            gradient /= self.world.size
        self.corrupt(self)
        return loss

    def step(self) -> None:
        self.compute_gradients()
        self.num_steps += 1
        self.update(self)

    def check(self) -> int:
        return self.parity.count_wrong([self.batch], self.compute_gradients, self.step)

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def gradient(self, name: str) -> Tensor:
        gradient = self.model.get_parameter(name).grad
        assert gradient is not None
        return gradient


def skip_second_update(trainer: Trainer) -> None:
    if trainer.num_steps != 2:
        trainer.optimizer.step()


def forget_moments(trainer: Trainer) -> None:
    trainer.optimizer.step()
    trainer.optimizer.state.clear()


def raise_learning_rate(trainer: Trainer) -> None:
    for group in trainer.optimizer.param_groups:
        group["lr"] = 1.1 * LEARNING_RATE
    trainer.optimizer.step()


def skip_one_bias(trainer: Trainer) -> None:
    bias = trainer.model.get_parameter("layers.1.ffn.up.bias")
    before = bias.detach().clone()
    trainer.optimizer.step()
    bias.data.copy_(before)


UPDATES: dict[str, Callable[[Trainer], None]] = {
    "right": lambda trainer: trainer.optimizer.step(),
    "no update": lambda trainer: None,
    "no second update": skip_second_update,
    "moments forgotten": forget_moments,
    "learning rate 10 % higher": raise_learning_rate,
    "one bias not updated": skip_one_bias,
}


def drop_gradient(trainer: Trainer) -> None:
    trainer.model.get_parameter("layers.0.attention.v.weight").grad = None


def scale_gradients(trainer: Trainer, factor: float) -> None:
    for gradient in trainer.gradients():
        gradient *= factor


def swap_layers(trainer: Trainer) -> None:
    first = trainer.gradient("layers.0.ffn.up.weight")
    second = trainer.gradient("layers.1.ffn.up.weight")
    copy = first.clone()
    first.copy_(second)
    second.copy_(copy)


CORRUPTIONS: dict[str, Callable[[Trainer], object]] = {
    "one missing": drop_gradient,
    "0.1 % larger": lambda trainer: scale_gradients(trainer, 1.001),
    "one negated": lambda trainer: trainer.gradient("layers.1.ffn.up.weight").neg_(),
    "not reduced": lambda trainer: trainer.backward(),
    "two layers swapped": swap_layers,
    "not a number": lambda trainer: trainer.gradient("norm.bias").fill_(math.nan),
}


def checked_trainer(world: World, dtype: str = "float32") -> Trainer:
    trainer = Trainer(world, dtype)
    trainer.step()
    assert trainer.check() == 0
    return trainer


def wrong_gradients(world: World, dtype: str) -> dict[str, int]:
    """Return the number of wrong elements that a later check counts for each corruption."""
    trainer = checked_trainer(world, dtype)
    counts = {}
    for name, corrupt in CORRUPTIONS.items():
        trainer.corrupt = corrupt
        counts[name] = trainer.check()
    return counts


def test_parity_counts_wrong_float32_gradients(two_ranks: Ranks) -> None:
    for counts in two_ranks.call(
        "tests.workloads.step.test_parity:wrong_gradients", dtype="float32"
    ):
        assert all(counts.values()), counts


def test_parity_counts_wrong_bfloat16_gradients(two_ranks: Ranks) -> None:
    matrix = SHAPE.hidden * SHAPE.ffn
    for counts in two_ranks.call(
        "tests.workloads.step.test_parity:wrong_gradients", dtype="bfloat16"
    ):
        assert counts == {
            "one missing": SHAPE.hidden**2,
            "0.1 % larger": 0,  # within the rounding of bfloat16
            "one negated": matrix,
            "not reduced": num_parameters(SHAPE),
            "two layers swapped": 2 * matrix,
            "not a number": SHAPE.hidden,
        }


def wrong_losses(world: World, dtype: str, errors: list[list[float]]) -> list[int]:
    """Return the count for each relative error of the ranks' losses; all gradients are right."""
    trainer = checked_trainer(world, dtype)
    counts = []
    for by_rank in errors:
        factor = 1 + by_rank[world.rank]

        def compute(factor: float = factor) -> Tensor:
            return trainer.compute_gradients() * factor

        counts.append(trainer.parity.count_wrong([trainer.batch], compute, trainer.step))
    return counts


@pytest.mark.parametrize(("dtype", "unit"), [("float32", 1e-4), ("bfloat16", 1e-2)])
def test_parity_compares_mean_loss(two_ranks: Ranks, dtype: str, unit: float) -> None:
    errors = [
        [0.5 * unit, 0.5 * unit],
        [10 * unit, 10 * unit],
        [0.0, 10 * unit],
        [10 * unit, -10 * unit],  # the mean stays within the tolerance
        [math.nan, 0.0],
    ]
    counts = two_ranks.call(
        "tests.workloads.step.test_parity:wrong_losses", dtype=dtype, errors=errors
    )
    assert counts == [[0, 1, 1, 0, 1]] * 2


def wrong_updates(world: World, dtype: str, updates: list[str]) -> dict[str, list[int]]:
    """Return the counts of two checks, each after a step, for each kind of update."""
    counts: dict[str, list[int]] = {}
    for update in updates:
        trainer = Trainer(world, dtype, update)
        counts[update] = []
        for _ in range(2):
            trainer.step()
            counts[update].append(trainer.check())
    return counts


def test_parity_counts_wrong_updates_once(two_ranks: Ranks) -> None:
    """Gradients are right for the weights that there are: only the first check compares updates."""
    updates = list(UPDATES)
    for counts in two_ranks.call(
        "tests.workloads.step.test_parity:wrong_updates", dtype="float32", updates=updates
    ):
        assert counts.pop("right") == [0, 0]
        assert all(first > 0 and second == 0 for first, second in counts.values()), counts
    updates = ["right", "no update"]
    for counts in two_ranks.call(
        "tests.workloads.step.test_parity:wrong_updates", dtype="bfloat16", updates=updates
    ):
        assert counts["right"] == [0, 0]
        assert counts["no update"][0] > 0


def add_noise(trainer: Trainer) -> None:
    generator = torch.Generator().manual_seed(0)
    for gradient in trainer.gradients():
        gradient += 1e-5 * gradient.abs().max() * torch.rand(gradient.shape, generator=generator)


def check_with_noise(world: World) -> tuple[int, list[int]]:
    """Return the first check's count, and the number of steps taken after each of three checks."""
    trainer = Trainer(world)
    trainer.corrupt = add_noise
    trainer.step()
    first = trainer.check()
    num_steps = [trainer.num_steps]
    for _ in range(2):
        trainer.check()
        num_steps.append(trainer.num_steps)
    return first, num_steps


def test_parity_ignores_updates_decided_by_noise(two_ranks: Ranks) -> None:
    """AdamW moves a weight by the whole learning rate if its gradient is only noise."""
    assert (
        two_ranks.call("tests.workloads.step.test_parity:check_with_noise") == [(0, [2, 2, 2])] * 2
    )


BASE = [1.0, -2.0, 0.0, 3.0]
NAN = math.nan
UNLIKE: list[tuple[list[float], str, int]] = [
    (BASE, "float64", 0),
    (BASE, "bfloat16", 0),
    ([1.0, -2.0, 0.0, math.nextafter(3.0, 4.0)], "float64", 1),
    ([1.0, -2.0, -0.0, 3.0], "float32", 1),
    ([1.0, NAN, NAN, 3.0], "float64", 2),
    ([1.0, 0.0, -2.0, 3.0], "float32", 2),
]
"""Elements of rank 1, their type, and how many differ from ``BASE`` of rank 0."""


def unlike_rank_0(world: World) -> list[int]:
    counts = []
    for other, dtype, _ in UNLIKE:
        elements = other if world.rank == 1 else BASE
        matrix = torch.tensor(elements, dtype=getattr(torch, dtype)).reshape(2, 2).T
        counts.append(count_unlike_rank_0([torch.zeros(2), matrix], world.group))
    return counts


def unlike_parameter(world: World) -> tuple[int, list[float], bool]:
    parameter = torch.nn.Parameter(torch.tensor([float(world.rank)] * 3))
    count = count_unlike_rank_0([parameter], world.group)
    return count, parameter.tolist(), parameter.grad is None


def test_count_unlike_rank_0_counts_bits(two_ranks: Ranks) -> None:
    counts = two_ranks.call("tests.workloads.step.test_parity:unlike_rank_0")
    assert counts == [[0] * len(UNLIKE), [differing for *_, differing in UNLIKE]]


def test_count_unlike_rank_0_leaves_parameters(two_ranks: Ranks) -> None:
    first, second = two_ranks.call("tests.workloads.step.test_parity:unlike_parameter")
    assert first == (0, [0.0] * 3, True)
    assert second == (3, [1.0] * 3, True)
