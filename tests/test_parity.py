"""The gate lets through what is equal within rounding, and nothing else."""

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor, nn

from bench.world import World
from workloads.layout import Layout
from workloads.model import build, draw_tokens, loss_of
from workloads.optimizer import LEARNING_RATE, make_optimizer
from workloads.parity import (
    DISTANCE_MARGIN,
    FLOOR,
    RELATIVE_TOLERANCE,
    Parity,
    count_apart,
    count_unfilled,
    count_unlike_rank_0,
    distance,
)
from workloads.shapes import Shape, num_parameters
from workloads.timed import TimedLinear, Waiter, make_timed, tell_apart

REFERENCE = torch.tensor([4.0, -8.0, 0.0, 1e-6])
LIMIT = RELATIVE_TOLERANCE * 8
SHAPE = Shape(recipe="gpt", layers=2, hidden=32, heads=4, kv_heads=4, ffn=64, sequence=16, vocabulary=64)


# ---- elements


def with_element(index: int, value: float, tensor: Tensor = REFERENCE) -> Tensor:
    changed = tensor.clone()
    changed[index] = value
    return changed


def apart(found: Tensor, reference: Tensor = REFERENCE) -> int:
    return count_apart({"w": found}, {"w": reference})


def test_equal_tensors_are_not_apart() -> None:
    assert count_apart({"a": REFERENCE, "b": REFERENCE * 2}, {"b": REFERENCE * 2, "a": REFERENCE}) == 0
    assert count_apart({}, {}) == 0


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize(("by", "wrong"), [(0.9, 0), (-0.9, 0), (1.1, 1), (-1.1, 1), (1e9, 1)])
def test_the_tolerance_is_of_the_largest_reference_value(index: int, by: float, wrong: int) -> None:
    """Whichever element it is: a small one may be off by as much as a large one."""
    assert apart(with_element(index, float(REFERENCE[index]) + by * LIMIT)) == wrong


def test_the_largest_value_is_the_references_and_not_ours() -> None:
    assert apart(with_element(0, 1e9)) == 1
    assert apart(torch.full((3,), 1e9), torch.zeros(3)) == 3


def test_each_tensor_above_the_floor_has_a_tolerance_of_its_own() -> None:
    small = torch.full((2,), 2 * FLOOR * 8)
    expected = {"large": REFERENCE, "small": small}
    for factor, wrong in ((1 + 0.9 * RELATIVE_TOLERANCE, 0), (1 + 1.1 * RELATIVE_TOLERANCE, 2)):
        assert count_apart({"large": REFERENCE, "small": small * factor}, expected) == wrong


def test_a_tensor_of_tiny_gradients_has_the_tolerance_of_the_floor() -> None:
    """Beside gradients of 8, those of a millionth are the roundings of sums that cancel."""
    small = torch.full((2,), 1e-6)
    expected = {"large": REFERENCE, "small": small}
    for part, wrong in ((0.9, 0), (1.1, 2)):
        found = {"large": REFERENCE, "small": small + part * FLOOR * LIMIT}
        assert count_apart(found, expected) == wrong


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_wrong(bad: float) -> None:
    assert apart(with_element(2, bad)) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reference_that_is_no_number_passes_nothing_off_as_right(bad: float) -> None:
    """A limit that is infinite would let everything through."""
    reference = with_element(2, bad)
    assert apart(REFERENCE, reference) > 0
    assert apart(REFERENCE * 7, reference) > 0
    assert apart(reference, reference) > 0


def test_zeros_must_be_zeros_where_all_are() -> None:
    zeros = torch.zeros(3)
    assert apart(zeros, zeros) == 0
    assert apart(with_element(1, 1e-30, zeros), zeros) == 1


def test_a_missing_tensor_is_all_wrong_and_wrong_elements_are_summed() -> None:
    expected = dict.fromkeys("abc", REFERENCE)
    assert count_apart({"b": REFERENCE, "c": REFERENCE}, expected) == 4
    assert count_apart({"a": -REFERENCE, "c": with_element(0, 5.0)}, expected) == 2 + 4 + 1


def test_tensors_are_compared_by_name_and_not_by_place() -> None:
    assert count_apart({"b": REFERENCE, "a": -REFERENCE}, {"a": -REFERENCE, "b": REFERENCE}) == 0
    assert count_apart({"a": REFERENCE, "b": -REFERENCE}, {"a": -REFERENCE, "b": REFERENCE}) == 4


# ---- distance


def test_the_distance_is_of_all_together_relative_to_the_references_length() -> None:
    expected = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}
    assert distance(expected, expected) == 0.0
    assert distance({"a": torch.tensor([3.0, 3.0]), "b": torch.tensor([[8.0]])}, expected) == pytest.approx(1.0)
    assert distance({"a": torch.zeros(2), "b": torch.zeros(1, 1)}, expected) == pytest.approx(1.0)
    assert distance({name: 1.5 * value for name, value in expected.items()}, expected) == pytest.approx(0.5)


def test_a_narrow_tensor_is_as_far_as_its_rounding() -> None:
    reference = {"a": torch.tensor([1.0, 1 + 2**-9])}
    found = {"a": reference["a"].bfloat16()}
    assert distance(found, reference) == pytest.approx(2**-9 / math.sqrt(2), rel=0.01)


def test_other_names_are_infinitely_far() -> None:
    assert distance({}, {"a": REFERENCE}) == math.inf
    assert distance({"a": REFERENCE, "b": REFERENCE}, {"a": REFERENCE}) == math.inf


# ---- fills of timed compute, summed as rings sum them


Mean = Callable[[Tensor], Tensor]


def in_rings(parts: Tensor) -> Tensor:
    """Return the sums of all ranks' parts (n) by a ring's chunks (n), each begun by another rank, rounded at each."""
    return reduce(torch.add, [parts.roll(-rank) for rank in range(len(parts))])


def divided_first(parts: Tensor) -> Tensor:
    """Return the means as DDP takes them."""
    return in_rings(parts * (1 / len(parts)))


def divided_in_the_type(parts: Tensor) -> Tensor:
    """Return the means as NCCL takes them: the factor is rounded too."""
    return in_rings(parts * torch.tensor(1 / len(parts), dtype=parts.dtype))


def not_divided(parts: Tensor) -> Tensor:
    """Return the sums, as a hybrid step takes them over its data axes."""
    return in_rings(parts)


MEANS: list[Mean] = [divided_first, divided_in_the_type, not_divided]


def filled(ranks: int, dtype: torch.dtype, mean: Mean) -> tuple[Tensor, float]:
    """Return what each rank (n) fills in a timed Linear's gradient, and what comes of all."""
    divisor = 1 if mean is not_divided else ranks
    fills, expected = [], 0.0
    for rank in range(ranks):
        model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(1, 1)])})
        make_timed(model, 1.0, Waiter(torch.device("cpu")))
        tell_apart(model, rank, ranks, divisor)
        [linear] = [module for module in model.modules() if isinstance(module, TimedLinear)]
        fills.append(linear.fill)
        expected = linear.mean_fill * ranks / divisor
    return torch.tensor(fills, dtype=dtype), expected


each_mean = pytest.mark.parametrize("mean", MEANS)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@each_mean
@each_dtype
@pytest.mark.parametrize("ranks", [*range(2, 17), 24, 31, 48, 64, 96])
def test_fills_are_right_in_whatever_order_ranks_are_summed(ranks: int, dtype: torch.dtype, mean: Mean) -> None:
    parts, expected = filled(ranks, dtype, mean)
    for microbatches in (1, 2, 3):
        of_all = reduce(torch.add, [parts] * microbatches)
        assert count_unfilled(mean(of_all), microbatches * expected, ranks) == 0


@each_mean
@each_dtype
@pytest.mark.parametrize("ranks", [*range(2, 17), 24, 26])
def test_a_rank_that_is_missing_in_the_mean_is_seen(ranks: int, dtype: torch.dtype, mean: Mean) -> None:
    parts, expected = filled(ranks, dtype, mean)
    for missing in range(ranks):
        rest = parts.clone()
        rest[missing] = 0
        assert count_unfilled(mean(rest), expected, ranks) == ranks


@each_mean
@pytest.mark.parametrize("ranks", [27, 48, 96])
def test_half_of_many_ranks_missing_is_seen_in_bfloat16_too(ranks: int, mean: Mean) -> None:
    parts, expected = filled(ranks, torch.bfloat16, mean)
    parts[: ranks // 2] = 0
    assert count_unfilled(mean(parts), expected, ranks) == ranks


@pytest.mark.parametrize("ranks", [5, 6, 7, 9])
def test_numbers_of_ranks_as_fills_would_not_be_equal_to_their_mean(ranks: int) -> None:
    """Nor need they be: DDP's factor is rounded before the sum."""
    found, expected = divided_first(torch.arange(1.0, ranks + 1)), (ranks + 1) / 2
    assert bool((found != expected).any())
    assert count_unfilled(found, expected, ranks) == 0


def test_a_missing_gradient_is_one_and_no_number_is_wrong() -> None:
    assert count_unfilled(None, 3.0, 2) == 1
    assert count_unfilled(torch.tensor([3.0, math.nan, math.inf, -3.0]), 3.0, 2) == 3


# ---- the whole gate, on data parallelism by hand


class Trainer:
    """Each rank takes its part of one batch, and gradients are averaged over ranks; a test may spoil any of it."""

    def __init__(self, world: World, dtype: str = "float32", spoil: str = "nothing") -> None:
        self.world, self.dtype = world, getattr(torch, dtype)
        self.model = build(SHAPE, world.seed, world.device, self.dtype)
        self.optimizer = make_optimizer(self.model.parameters(), self.dtype)
        self.batch = draw_tokens(SHAPE, 2 * world.size, world.seed, 1)
        self.num_steps = 0
        self.spoil: Callable[[Trainer], object] = lambda trainer: None
        layout = Layout(
            module=self.model,
            model=self.model,
            optimizer=self.optimizer,
            axes={"dp": world.group},
            data_rank=world.rank,
            data_size=world.size,
            expected_bytes={},
        )
        self.parity = Parity(world, layout, SHAPE, self.dtype)
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
    """Lose the moments after each step."""
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


def _never(trainer: Trainer) -> None:
    """Leave all weights as they were."""


UPDATES: dict[str, Callable[[Trainer], None]] = {
    "nothing": lambda trainer: trainer.optimizer.step(),
    "no update": _never,
    "no first update": lambda trainer: _update_less(trainer, 1),
    "no second update": lambda trainer: _update_less(trainer, 2),
    "moments forgotten": _forget,
    "a tenth more": lambda trainer: _update_at(trainer, 1.1),
    "a tenth less": lambda trainer: _update_at(trainer, 0.9),
    "one bias not updated": _update_one_parameter_less,
}


def _one_element(trainer: Trainer, part: float) -> None:
    gradient = trainer.gradient("head.weight")
    gradient[3, 5] += part * RELATIVE_TOLERANCE * gradient.abs().max()


def _drop(trainer: Trainer) -> None:
    trainer.model.get_parameter("layers.0.attention.v.weight").grad = None


def _scale(trainer: Trainer, factor: float) -> None:
    for gradient in trainer.all_gradients():
        gradient *= factor


def _twist_one(trainer: Trainer) -> None:
    trainer.gradient("layers.1.ffn.up.weight").neg_()


def _stay_local(trainer: Trainer) -> None:
    """Give each rank the gradients of its own part alone."""
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
    "one of the wrong sign": _twist_one,
    "local ones": _stay_local,
    "summed ones": lambda trainer: _scale(trainer, 2),
    "another layer's": _swap_names,
    "no numbers": lambda trainer: trainer.gradient("norm.bias").fill_(math.nan),
}


def wrong_updates(world: World, dtype: str, spoil: str) -> list[int]:
    """Return what the first two checks find, a step before each."""
    trainer = Trainer(world, dtype, spoil)
    wrong = []
    for _ in range(2):
        trainer.step()
        wrong.append(trainer.check())
    return wrong


def wrong_gradients(world: World, dtype: str, spoil: str) -> tuple[int, int]:
    """Return what is found after a right step, and where the gradients that a later check sees are spoilt."""
    trainer = Trainer(world, dtype)
    trainer.step()
    right = trainer.check()
    trainer.spoil = GRADIENTS[spoil]
    return right, trainer.check()


def wrong_elements(world: World, parts: list[float]) -> list[int]:
    """Return what is found where one element is off by parts of the tolerance."""
    trainer = Trainer(world)
    trainer.step()
    trainer.check()
    wrong = []
    for part in parts:
        trainer.spoil = lambda spoilt, part=part: _one_element(spoilt, part)  # type: ignore[misc]
        wrong.append(trainer.check())
    return wrong


def wrong_losses(world: World, by_rank: list[float]) -> int:
    """Return what is found where each rank's loss is larger by a part of it, gradients all right."""
    trainer = Trainer(world)
    trainer.step()
    trainer.check()
    return trainer.parity.count_wrong(
        [trainer.batch], lambda: trainer.gradients() * (1 + by_rank[world.rank]), trainer.step
    )


def wrong_bits(world: World, dtype: str) -> int:
    """Return what is found after rank 1 has changed the last bit of two weights."""
    trainer = Trainer(world, dtype)
    trainer.step()
    trainer.check()
    if world.rank == 1:
        weights = trainer.model.get_parameter("tokens.weight").detach()
        weights.view(torch.int32 if dtype == "float32" else torch.int16)[3, 5:7] ^= 1
    return trainer.check()


def wrong_with_noise(world: World) -> int:
    """Return what the first check finds where gradients are noisy by a hundred-thousandth of their largest."""
    trainer = Trainer(world)

    def add_noise(spoilt: Trainer) -> None:
        generator = torch.Generator().manual_seed(0)
        for gradient in spoilt.all_gradients():
            gradient += 1e-5 * gradient.abs().max() * torch.rand(gradient.shape, generator=generator)

    trainer.spoil = add_noise
    trainer.step()
    return trainer.check()


def steps_of_checks(world: World) -> list[int]:
    trainer = Trainer(world)
    trainer.step()
    counts = []
    for _ in range(3):
        trainer.check()
        counts.append(trainer.num_steps)
    return counts


def wrong_at_distances(world: World, factors: list[float]) -> list[int]:
    """Return what is found where gradients lie so many times as far from those in float32 as one process's."""
    trainer = Trainer(world, "bfloat16")
    trainer.step()
    trainer.check()
    wrong = []
    for factor in factors:
        trainer.spoil = lambda spoilt, factor=factor: _move(spoilt, factor)  # type: ignore[misc]
        wrong.append(trainer.check())
    return wrong


def _move(trainer: Trainer, factor: float) -> None:
    exact, narrow = (_alone(trainer, dtype) for dtype in (torch.float32, torch.bfloat16))
    for name, parameter in trainer.model.named_parameters():
        moved = exact[name] + factor * (narrow[name].float() - exact[name])
        parameter.grad = moved.to(parameter.dtype)


def _alone(trainer: Trainer, dtype: torch.dtype) -> dict[str, Tensor]:
    model = build(SHAPE, trainer.world.seed, trainer.world.device, dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(trainer.model.get_parameter(name))
    loss_of(model, trainer.batch).backward()  # type: ignore[no-untyped-call]
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def on_both(ranks: Ranks, function: str, **arguments: Any) -> list[Any]:
    return ranks.call(f"test_parity:{function}", **arguments)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_right_passes_again_and_again(two_ranks: Ranks, dtype: str) -> None:
    assert on_both(two_ranks, "wrong_updates", dtype=dtype, spoil="nothing") == [[0, 0]] * 2


@pytest.mark.parametrize("spoil", GRADIENTS)
def test_wrong_gradients_are_counted_on_every_rank(two_ranks: Ranks, spoil: str) -> None:
    for right, wrong in on_both(two_ranks, "wrong_gradients", dtype="float32", spoil=spoil):
        assert right == 0
        assert wrong > 0


@pytest.mark.parametrize("spoil", sorted(GRADIENTS.keys() - {"all a thousandth larger"}))
def test_in_bfloat16_gradients_that_are_too_far_are_all_wrong(two_ranks: Ranks, spoil: str) -> None:
    missing = SHAPE.hidden**2 if spoil == "a missing one" else 0
    for answer in on_both(two_ranks, "wrong_gradients", dtype="bfloat16", spoil=spoil):
        assert answer == (0, num_parameters(SHAPE) - missing)


def test_in_bfloat16_the_limit_is_a_margin_over_what_one_process_is_off(two_ranks: Ranks) -> None:
    factors = [0.0, 1.0, DISTANCE_MARGIN - 0.2, DISTANCE_MARGIN + 0.1, 3.0]
    everything = num_parameters(SHAPE)
    for wrong in on_both(two_ranks, "wrong_at_distances", factors=factors):
        assert wrong == [0, 0, 0, everything, everything]


def test_one_element_beyond_the_tolerance_is_one_wrong(two_ranks: Ranks) -> None:
    for wrong in on_both(two_ranks, "wrong_elements", parts=[0.8, -0.8, 1.2, -1.2]):
        assert wrong == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("by_rank", "wrong"),
    [([0.5e-4, 0.5e-4], 0), ([1e-3, 1e-3], 1), ([0.0, 1e-3], 1), ([1e-3, -1e-3], 0), ([math.nan, 0.0], 1)],
)
def test_the_mean_of_the_ranks_losses_is_compared_and_counts_one(
    two_ranks: Ranks, by_rank: list[float], wrong: int
) -> None:
    """Ranks have almost the same loss at first, so that opposite errors leave their mean within the tolerance."""
    assert on_both(two_ranks, "wrong_losses", by_rank=by_rank) == [wrong, wrong]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_last_bit_of_a_weight_counts_on_the_rank_that_differs(two_ranks: Ranks, dtype: str) -> None:
    assert on_both(two_ranks, "wrong_bits", dtype=dtype) == [0, 2]


@pytest.mark.parametrize("spoil", sorted(UPDATES.keys() - {"nothing"}))
def test_updates_that_are_alike_on_all_ranks_and_wrong_are_seen(two_ranks: Ranks, spoil: str) -> None:
    """No gradient tells of them: they are right for the weights that there are."""
    for first, second in on_both(two_ranks, "wrong_updates", dtype="float32", spoil=spoil):
        assert first > 0
        assert second == 0  # updates are compared once


@pytest.mark.parametrize("spoil", ["no update", "no first update", "no second update"])
def test_in_bfloat16_an_update_that_is_not_made_is_seen(two_ranks: Ranks, spoil: str) -> None:
    for first, _ in on_both(two_ranks, "wrong_updates", dtype="bfloat16", spoil=spoil):
        assert first > 0


def test_updates_whose_sign_rounding_decides_are_not_compared(two_ranks: Ranks) -> None:
    """AdamW moves by its whole learning rate for a gradient that is zero but for noise."""
    assert on_both(two_ranks, "wrong_with_noise") == [0, 0]


def test_only_the_first_check_takes_a_step_and_it_takes_one(two_ranks: Ranks) -> None:
    assert on_both(two_ranks, "steps_of_checks") == [[2, 2, 2]] * 2


# ---- ranks


BASE = [1.0, -2.0, 0.0, 3.0]
NUDGED = [1.0, -2.0, 0.0, math.nextafter(3.0, 4.0)]


def unlike(world: World, values: list[list[float]], dtype: str, transposed: bool = False) -> int:
    tensor = torch.tensor(values[world.rank], dtype=getattr(torch, dtype))
    if transposed:
        tensor = tensor.reshape(2, 2).T
    return count_unlike_rank_0([torch.zeros(2), tensor], world.group)


def unlike_and_kept(world: World) -> tuple[int, list[float], bool]:
    """Compare parameters of which each rank has another; return the count and what the comparison left of ours."""
    parameter = torch.nn.Parameter(torch.tensor([float(world.rank)] * 3))
    return count_unlike_rank_0([parameter], world.group), parameter.tolist(), parameter.grad is None


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("transposed", [False, True])
def test_ranks_that_are_alike_in_every_bit_are_alike(two_ranks: Ranks, dtype: str, transposed: bool) -> None:
    answers = two_ranks.call("test_parity:unlike", values=[BASE, BASE], dtype=dtype, transposed=transposed)
    assert answers == [0, 0]


@pytest.mark.parametrize(
    ("other", "wrong"),
    [
        (NUDGED, 1),
        ([1.0, -2.0, -0.0, 3.0], 1),
        ([1.0, math.nan, math.nan, 3.0], 2),
        ([3.0, 0.0, -2.0, 1.0], 4),
    ],
)
def test_elements_that_differ_in_any_bit_are_counted_on_the_rank_that_differs(
    two_ranks: Ranks, other: list[float], wrong: int
) -> None:
    assert two_ranks.call("test_parity:unlike", values=[BASE, other], dtype="float64") == [0, wrong]


def test_nan_is_like_the_same_nan(two_ranks: Ranks) -> None:
    values = [[math.nan, 1.0, 2.0, 3.0]] * 2
    assert two_ranks.call("test_parity:unlike", values=values, dtype="float32") == [0, 0]


def test_transposed_elements_are_compared_by_their_place(two_ranks: Ranks) -> None:
    values = [BASE, [1.0, 0.0, -2.0, 3.0]]
    assert two_ranks.call("test_parity:unlike", values=values, dtype="float32", transposed=True) == [0, 2]


def test_comparing_mends_nothing(two_ranks: Ranks) -> None:
    assert two_ranks.call("test_parity:unlike_and_kept") == [(0, [0.0] * 3, True), (3, [1.0] * 3, True)]


# ---- stages, and gradients that are to be equal


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
            expected_bytes={},
            staged=True,
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


def test_each_stage_is_held_against_its_own_part_of_the_reference(two_ranks: Ranks) -> None:
    found = two_ranks.call("test_parity:wrong_in_stages", order=(0, 1), spoil="one bit")
    assert found == [[0, 1], [0, 0]]


def test_gradients_taken_in_another_order_are_not_equal(two_ranks: Ranks) -> None:
    """With two parts a + b is b + a, so that nothing differs; with a part taken twice it does."""
    assert two_ranks.call("test_parity:wrong_in_stages", order=(1, 0), spoil="one bit") == [[0, 1], [0, 0]]
    found = two_ranks.call("test_parity:wrong_in_stages", order=(0, 0), spoil="one bit")
    assert all(one[0] > 0 for one in found)


def test_a_parameter_that_no_stage_holds_is_all_wrong_on_every_rank(two_ranks: Ranks) -> None:
    first, second = two_ranks.call("test_parity:wrong_in_stages", order=(0, 1), spoil="a parameter lost")
    assert first[0] == second[0] == 0
    assert min(first[1], second[1]) >= SHAPE.vocabulary * SHAPE.hidden
