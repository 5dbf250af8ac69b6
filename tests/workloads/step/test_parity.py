"""The gate lets through what is equal within rounding, and nothing else."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor, nn

from parbench.bench.world.world import World
from parbench.workloads.costs.parameter_table import num_parameters
from parbench.workloads.model.optimizer import LEARNING_RATE, make_optimizer
from parbench.workloads.model.shapes import Shape
from parbench.workloads.model.transformer import build, draw_tokens, loss_of
from parbench.workloads.step.layout import Layout
from parbench.workloads.step.parity import (
    Parity,
    count_unlike_rank_0,
)

SHAPE = Shape(recipe="gpt", layers=2, hidden=32, heads=4, kv_heads=4, ffn=64, sequence=16, vocabulary=64)


class Trainer:
    """Each rank takes its part of one batch, and gradients are averaged over ranks; a test may spoil any of it."""

    def __init__(self, world: World, dtype: str = "float32", spoil: str = "nothing") -> None:
        self.world, self.dtype = world, getattr(torch, dtype)
        self.model = build(SHAPE, world.seed, world.device, self.dtype)
        self.optimizer = make_optimizer(self.model.parameters(), self.dtype)
        self.batch = draw_tokens(SHAPE, 2 * world.size, world.seed, 1)
        self.num_steps = 0
        self.spoil: Callable[[Trainer], object] = lambda trainer: None
        self.layout = Layout(
            module=self.model,
            model=self.model,
            optimizer=self.optimizer,
            axes={"dp": world.group},
            data_rank=world.rank,
            data_size=world.size,
        )
        self.parity = Parity(world, self.layout, SHAPE, self.dtype)
        self.spoil_update = UPDATES[spoil]

    def gradients(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = loss_of(self.model, self.batch.chunk(self.world.size)[self.world.rank])
        loss.backward()  # type: ignore[no-untyped-call]
        for gradient in self.all_gradients():
            dist.all_reduce(gradient, group=self.world.group)
            gradient /= self.world.size
        self.spoil(self)
        return loss.detach()

    def step(self) -> None:
        self.gradients()
        self.num_steps += 1
        self.spoil_update(self)

    def check(self) -> int:
        return self.parity.count_wrong([self.batch], self.gradients, self.step)

    def all_gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    def gradient(self, name: str) -> Tensor:
        gradient = self.model.get_parameter(name).grad
        assert gradient is not None
        return gradient


def _update_less(trainer: Trainer, step: int) -> None:
    if trainer.num_steps != step:
        trainer.optimizer.step()


def _forget(trainer: Trainer) -> None:
    trainer.optimizer.step()
    trainer.optimizer.state.clear()


def _update_at(trainer: Trainer, factor: float) -> None:
    for group in trainer.optimizer.param_groups:
        group["lr"] = factor * LEARNING_RATE
    trainer.optimizer.step()


def _update_one_parameter_less(trainer: Trainer) -> None:
    parameter = trainer.model.get_parameter("layers.1.ffn.up.bias")
    before = parameter.detach().clone()
    trainer.optimizer.step()
    parameter.data.copy_(before)


UPDATES: dict[str, Callable[[Trainer], None]] = {
    "nothing": lambda trainer: trainer.optimizer.step(),
    "no update": lambda trainer: None,
    "no first update": lambda trainer: _update_less(trainer, 1),
    "no second update": lambda trainer: _update_less(trainer, 2),
    "moments forgotten": _forget,
    "a tenth more": lambda trainer: _update_at(trainer, 1.1),
    "a tenth less": lambda trainer: _update_at(trainer, 0.9),
    "one bias not updated": _update_one_parameter_less,
}


def _drop(trainer: Trainer) -> None:
    trainer.model.get_parameter("layers.0.attention.v.weight").grad = None


def _scale(trainer: Trainer, factor: float) -> None:
    for gradient in trainer.all_gradients():
        gradient *= factor


def _stay_local(trainer: Trainer) -> None:
    trainer.optimizer.zero_grad()
    loss_of(trainer.model, trainer.batch.chunk(2)[trainer.world.rank]).backward()  # type: ignore[no-untyped-call]


def _swap_names(trainer: Trainer) -> None:
    one, other = (trainer.gradient(f"layers.{layer}.ffn.up.weight") for layer in (0, 1))
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


GRADIENTS: dict[str, Callable[[Trainer], object]] = {
    "a missing one": _drop,
    "all a thousandth larger": lambda trainer: _scale(trainer, 1.001),
    "one of the wrong sign": lambda trainer: trainer.gradient("layers.1.ffn.up.weight").neg_(),
    "local ones": _stay_local,
    "summed ones": lambda trainer: _scale(trainer, 2),
    "another layer's": _swap_names,
    "no numbers": lambda trainer: trainer.gradient("norm.bias").fill_(math.nan),
}


def wrong_updates(world: World, dtype: str, spoils: list[str]) -> dict[str, list[int]]:
    """Return what the first two checks find, a step before each, where updates are spoilt in each way."""
    found: dict[str, list[int]] = {}
    for spoil in spoils:
        trainer = Trainer(world, dtype, spoil)
        found[spoil] = []
        for _ in range(2):
            trainer.step()
            found[spoil].append(trainer.check())
    return found


def stepped(world: World, dtype: str = "float32") -> Trainer:
    trainer = Trainer(world, dtype)
    trainer.step()
    assert trainer.check() == 0
    return trainer


def wrong_gradients(world: World, dtype: str, spoils: list[str]) -> dict[str, int]:
    """Return what is found where the gradients that a later check sees are spoilt in each way."""
    trainer, found = stepped(world, dtype), {}
    for name in spoils:
        trainer.spoil = GRADIENTS[name]
        found[name] = trainer.check()
    return found


def wrong_losses(world: World, dtype: str, errors: list[list[float]]) -> list[int]:
    """Return what is found where each rank's loss is larger by a part of it, gradients all right."""
    trainer = stepped(world, dtype)

    def check(by: float) -> int:
        return trainer.parity.count_wrong([trainer.batch], lambda: trainer.gradients() * (1 + by), trainer.step)

    return [check(by_rank[world.rank]) for by_rank in errors]


def wrong_with_noise_and_steps(world: World) -> tuple[int, list[int]]:
    """Return what the first check finds where gradients are noisy by 1e-5, and the steps taken after each of three."""
    trainer, counts = Trainer(world), []

    def add_noise(spoilt: Trainer) -> None:
        generator = torch.Generator().manual_seed(0)
        for gradient in spoilt.all_gradients():
            gradient += 1e-5 * gradient.abs().max() * torch.rand(gradient.shape, generator=generator)

    trainer.spoil = add_noise
    trainer.step()
    first = trainer.check()
    for _ in range(2):
        counts.append(trainer.num_steps)
        trainer.check()
    return first, [*counts, trainer.num_steps]


def on_both(ranks: Ranks, function: str, **arguments: Any) -> list[Any]:
    return ranks.call(f"test_parity:{function}", **arguments)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wrong_gradients_are_counted_on_every_rank(two_ranks: Ranks, dtype: str) -> None:
    """In bfloat16 those that are too far are all wrong; a thousandth is no farther than its rounding."""
    everything, matrix = num_parameters(SHAPE), SHAPE.hidden * SHAPE.ffn
    for found in on_both(two_ranks, "wrong_gradients", dtype=dtype, spoils=list(GRADIENTS)):
        if dtype == "float32":
            assert all(found.values()), found
        else:
            assert found == {
                "a missing one": SHAPE.hidden**2,
                "all a thousandth larger": 0,
                "one of the wrong sign": matrix,
                "local ones": everything,
                "summed ones": everything,
                "another layer's": 2 * matrix,
                "no numbers": SHAPE.hidden,
            }


def test_the_mean_of_the_ranks_losses_is_compared_and_counts_one(two_ranks: Ranks) -> None:
    """Ranks have almost the same loss at first, so that opposite errors leave their mean within the tolerance.

    bfloat16 knows three digits of one: its tolerance is of eight thousandths.
    """
    errors = [[0.5e-4, 0.5e-4], [1e-3, 1e-3], [0.0, 1e-3], [1e-3, -1e-3], [math.nan, 0.0]]
    assert on_both(two_ranks, "wrong_losses", dtype="float32", errors=errors) == [[0, 1, 1, 0, 1]] * 2
    errors = [[100 * error for error in of] for of in errors]
    assert on_both(two_ranks, "wrong_losses", dtype="bfloat16", errors=errors) == [[0, 1, 1, 0, 1]] * 2


def test_updates_that_are_alike_on_all_ranks_and_wrong_are_seen_once_and_right_ones_pass(two_ranks: Ranks) -> None:
    """No gradient tells of them: they are right for the weights that there are."""
    for found in on_both(two_ranks, "wrong_updates", dtype="float32", spoils=list(UPDATES)):
        assert found.pop("nothing") == [0, 0]
        assert all(first > 0 and second == 0 for first, second in found.values()), found
    spoils = ["nothing", "no update", "no first update", "no second update"]
    for found in on_both(two_ranks, "wrong_updates", dtype="bfloat16", spoils=spoils):
        assert found.pop("nothing") == [0, 0]
        assert all(first > 0 for first, _ in found.values()), found


def test_updates_whose_sign_rounding_decides_are_not_compared_and_only_the_first_check_takes_a_step(
    two_ranks: Ranks,
) -> None:
    """AdamW moves by its whole learning rate for a gradient that is zero but for noise."""
    assert on_both(two_ranks, "wrong_with_noise_and_steps") == [(0, [2, 2, 2])] * 2


BASE = [1.0, -2.0, 0.0, 3.0]
UNLIKE: list[tuple[list[float], list[float], str, bool, int]] = [
    *((BASE, BASE, dtype, turned, 0) for dtype in ("float64", "float32", "bfloat16") for turned in (False, True)),
    (BASE, [1.0, -2.0, 0.0, math.nextafter(3.0, 4.0)], "float64", False, 1),
    (BASE, [1.0, -2.0, -0.0, 3.0], "float64", False, 1),
    (BASE, [1.0, math.nan, math.nan, 3.0], "float64", False, 2),
    (BASE, [3.0, 0.0, -2.0, 1.0], "float64", False, 4),
    ([math.nan, 1.0, 2.0, 3.0], [math.nan, 1.0, 2.0, 3.0], "float32", False, 0),
    (BASE, [1.0, 0.0, -2.0, 3.0], "float32", True, 2),
]
"""What rank 0 and rank 1 have, of which type, whether transposed, and how many of them rank 1 is told."""


def unlike(world: World) -> list[int]:
    found = []
    for *values, dtype, transposed, _ in UNLIKE:
        tensor = torch.tensor(values[world.rank], dtype=getattr(torch, str(dtype)))
        tensor = tensor.reshape(2, 2).T if transposed else tensor
        found.append(count_unlike_rank_0([torch.zeros(2), tensor], world.group))
    return found


def unlike_and_kept(world: World) -> tuple[int, list[float], bool]:
    """Compare parameters of which each rank has another; return the count and what the comparison left of ours."""
    parameter = torch.nn.Parameter(torch.tensor([float(world.rank)] * 3))
    return count_unlike_rank_0([parameter], world.group), parameter.tolist(), parameter.grad is None


def test_elements_that_differ_in_any_bit_are_counted_on_the_rank_that_differs_and_not_mended(two_ranks: Ranks) -> None:
    assert on_both(two_ranks, "unlike") == [[0] * len(UNLIKE), [wrong for *_, wrong in UNLIKE]]
    assert on_both(two_ranks, "unlike_and_kept") == [(0, [0.0] * 3, True), (3, [1.0] * 3, True)]


class Staged(Trainer):
    """Two stages: each rank holds every other parameter of the same replica, and takes its gradients in parts."""

    def __init__(self, world: World, order: tuple[int, ...] = (0, 1)) -> None:
        super().__init__(world)
        held = nn.Module()
        names = [name for name, _ in self.model.named_parameters()]
        self.held = {name: self.model.get_parameter(name) for name in names[world.rank :: world.size]}
        object.__setattr__(held, "named_parameters", lambda: iter(self.held.items()))
        layout = Layout(
            module=held,
            model=held,
            optimizer=self.optimizer,
            axes={"pp": world.group},
            data_rank=0,
            data_size=1,
            holds_stage_only=True,
            exact_order=order,
        )
        self.parity = Parity(world, layout, SHAPE, torch.float32)

    def gradients(self) -> Tensor:
        self.optimizer.zero_grad()
        parts = self.batch.chunk(2)
        losses = [loss_of(self.model, part) / 2 for part in parts]
        for loss in losses:
            loss.backward()  # type: ignore[no-untyped-call]
        self.spoil(self)
        return torch.stack(losses).sum().detach()

    def check(self) -> int:
        return self.parity.count_wrong(self.batch.chunk(2), self._losses, self.step)

    def _losses(self) -> Tensor | None:
        loss = self.gradients()
        return loss if self.world.rank == 1 else None


def wrong_in_stages(world: World, order: tuple[int, ...], spoil: str) -> list[int]:
    """Return what is found in a right step, and then after ``spoil`` on rank 0."""
    trainer = Staged(world, order)
    trainer.step()
    found = [trainer.check()]
    if world.rank == 0 and spoil == "one bit":
        trainer.spoil = _last_bit
    elif world.rank == 0:
        trainer.held.pop("tokens.weight")
    return [*found, trainer.check()]


def _last_bit(trainer: Trainer) -> None:
    assert isinstance(trainer, Staged)
    gradient = next(iter(trainer.held.values())).grad
    assert gradient is not None
    value = gradient.view(-1)[3]
    value.copy_(torch.nextafter(value, torch.tensor(1e9)))


def test_each_stage_is_held_against_its_own_part_of_the_reference_in_its_own_order(two_ranks: Ranks) -> None:
    """With two parts a + b is b + a, so that nothing differs; with a part taken twice it does."""
    for order in ((0, 1), (1, 0)):
        assert on_both(two_ranks, "wrong_in_stages", order=order, spoil="one bit") == [[0, 1], [0, 0]], order
    found = on_both(two_ranks, "wrong_in_stages", order=(0, 0), spoil="one bit")
    assert all(one[0] > 0 for one in found)


def test_a_parameter_that_no_stage_holds_is_all_wrong_on_every_rank(two_ranks: Ranks) -> None:
    first, second = on_both(two_ranks, "wrong_in_stages", order=(0, 1), spoil="a parameter lost")
    assert first[0] == second[0] == 0
    assert min(first[1], second[1]) >= SHAPE.vocabulary * SHAPE.hidden
