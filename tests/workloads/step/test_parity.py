"""The numerical check accepts gradients, losses and updates within rounding, and no others."""

import math
from collections.abc import Callable
from functools import reduce
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parbench.bench.world.world import World
from parbench.workloads.costs.parameter_table import num_parameters
from parbench.workloads.model.optimizer import LEARNING_RATE, make_optimizer
from parbench.workloads.model.shapes import Shape
from parbench.workloads.model.timed_compute import (
    TimedCompute,
    TimedLinear,
    fill_distinct_gradients,
    make_timed,
)
from parbench.workloads.model.transformer import build, draw_tokens, loss_of
from parbench.workloads.step.layout import Layout
from parbench.workloads.step.parity import (
    Parity,
    Tensors,
    compare,
    compare_bits,
    count_unfilled,
    count_unlike_rank_0,
    norm_of_all,
)
from tests.support.ranks import Ranks

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
NAN = math.nan
SHAPE = Shape(
    recipe="gpt", layers=2, hidden=32, heads=4, kv_heads=4, ffn=64, sequence=16, vocabulary=64
)


class Trainer:
    """A data-parallel loop whose gradients or updates a test corrupts."""

    def __init__(self, world: World, dtype: str = "float32", update: str = "right") -> None:
        self.world = world
        self.model = build(SHAPE, world.seed, world.device, getattr(torch, dtype))
        self.optimizer = make_optimizer(self.model.parameters(), getattr(torch, dtype))
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
        self.parity = Parity(world, layout, SHAPE, getattr(torch, dtype))

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

    def check(self, loss_factor: float = 1.0) -> int:
        def losses_and_gradients() -> Tensor:
            return self.compute_gradients() * loss_factor

        return self.parity.count_wrong([self.batch], losses_and_gradients, self.step)

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def gradient(self, name: str) -> Tensor:
        return cast(Tensor, self.model.get_parameter(name).grad)


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
    "moments forgotten": forget_moments,
    "learning rate 10 % higher": raise_learning_rate,
    "one bias not updated": skip_one_bias,
}


def scale_gradients(trainer: Trainer) -> None:
    for gradient in trainer.gradients():
        gradient *= 1.001


CORRUPTIONS: dict[str, tuple[Callable[[Trainer], object], int]] = {
    "0.1 % larger": (scale_gradients, 0),  # within the rounding of bfloat16
    "one negated": (lambda trainer: trainer.gradient("layers.1.ffn.up.weight").neg_(), 32 * 64),
    "not reduced": (lambda trainer: trainer.backward(), num_parameters(SHAPE)),
    "not a number": (lambda trainer: trainer.gradient("norm.bias").fill_(NAN), 32),
}
"""Corruptions of gradients, and the number of wrong elements in bfloat16."""


def checked_trainer(world: World, dtype: str) -> Trainer:
    trainer = Trainer(world, dtype)
    trainer.step()
    assert trainer.check() == 0
    return trainer


def count_wrong_gradients(world: World, dtype: str) -> dict[str, int]:
    trainer = checked_trainer(world, dtype)
    counts = {}
    for name, (corrupt, _) in CORRUPTIONS.items():
        trainer.corrupt = corrupt
        counts[name] = trainer.check()
    return counts


def test_parity_counts_wrong_gradients(two_ranks: Ranks) -> None:
    for counts in two_ranks.call(f"{__name__}:count_wrong_gradients", dtype="float32"):
        assert all(counts.values()), counts
    for counts in two_ranks.call(f"{__name__}:count_wrong_gradients", dtype="bfloat16"):
        assert counts == {name: wrong for name, (_, wrong) in CORRUPTIONS.items()}


def count_wrong_losses(world: World, dtype: str, errors: list[list[float]]) -> list[int]:
    """Return the count for each list of the ranks' relative errors of the loss."""
    trainer = checked_trainer(world, dtype)
    return [trainer.check(loss_factor=1 + by_rank[world.rank]) for by_rank in errors]


@pytest.mark.parametrize(("dtype", "unit"), [("float32", 1e-4), ("bfloat16", 1e-2)])
def test_parity_compares_mean_loss(two_ranks: Ranks, dtype: str, unit: float) -> None:
    errors = [
        [0.5 * unit, 0.5 * unit],
        [0.0, 10 * unit],
        [10 * unit, -10 * unit],  # the mean stays within the tolerance
        [NAN, 0.0],
    ]
    counts = two_ranks.call(f"{__name__}:count_wrong_losses", dtype=dtype, errors=errors)
    assert counts == [[0, 1, 0, 1]] * 2


def count_wrong_updates(world: World, dtype: str, updates: list[str]) -> dict[str, list[int]]:
    """Return the counts of two checks, each after a step, for each kind of update."""
    counts: dict[str, list[int]] = {}
    for update in updates:
        trainer = Trainer(world, dtype, update)
        counts[update] = []
        for _ in range(2):
            trainer.step()
            counts[update].append(trainer.check())
    return counts


@pytest.mark.parametrize(
    ("dtype", "updates"),
    [("float32", list(UPDATES)), ("bfloat16", ["right", "no update"])],
)
def test_parity_counts_wrong_updates_once(two_ranks: Ranks, dtype: str, updates: list[str]) -> None:
    """Gradients are right for the wrong weights, so only the first check compares updates."""
    arguments = {"dtype": dtype, "updates": updates}
    for counts in two_ranks.call(f"{__name__}:count_wrong_updates", **arguments):
        assert counts.pop("right") == [0, 0]
        for update, (first, _) in counts.items():
            assert first > 0, update
        if dtype == "float32":
            assert all(second == 0 for _, second in counts.values()), counts


def add_noise(trainer: Trainer) -> None:
    generator = torch.Generator().manual_seed(0)
    for gradient in trainer.gradients():
        gradient += 1e-5 * gradient.abs().max() * torch.rand(gradient.shape, generator=generator)


def count_wrong_with_noise(world: World) -> int:
    trainer = Trainer(world)
    trainer.corrupt = add_noise
    trainer.step()
    return trainer.check()


def test_parity_ignores_updates_decided_by_noise(two_ranks: Ranks) -> None:
    """AdamW moves a weight by the whole learning rate if its gradient is only noise."""
    assert two_ranks.call(f"{__name__}:count_wrong_with_noise") == [0, 0]


BASE = [1.0, -2.0, 0.0, 3.0]
UNLIKE: list[tuple[list[float], str, int]] = [
    (BASE, "bfloat16", 0),
    ([1.0, -2.0, 0.0, math.nextafter(3.0, 4.0)], "float64", 1),
    ([1.0, -2.0, -0.0, 3.0], "float32", 1),
    ([1.0, NAN, NAN, 3.0], "float64", 2),
]
"""Elements of rank 1, their type, and how many differ from ``BASE`` of rank 0."""


def count_unlike(world: World) -> list[int]:
    counts = []
    for elements, dtype, _ in UNLIKE:
        values = elements if world.rank == 1 else BASE
        matrix = torch.tensor(values, dtype=getattr(torch, dtype)).reshape(2, 2).T
        counts.append(count_unlike_rank_0([torch.zeros(2), nn.Parameter(matrix)], world.group))
    return counts


def test_count_unlike_rank_0_counts_bits(two_ranks: Ranks) -> None:
    counts = two_ranks.call(f"{__name__}:count_unlike")
    assert counts == [[0] * len(UNLIKE), [unlike for *_, unlike in UNLIKE]]


def differences(
    actual: Tensors, reference: Tensors, low_precision: Tensors | None = None
) -> dict[str, str]:
    """Return how each wrong tensor differs, by name."""
    results = compare(actual, reference, low_precision, norm_of_all(reference.values()))
    return {result.name: result.how for result in results if result.wrong}


def vector(distance: float = 0.0) -> Tensor:
    """Return a tensor at a distance from (3, 4, 0), in units of its norm of 5."""
    return torch.tensor([3.0, 4.0, 5 * distance])


def test_compare_limits_float32() -> None:
    assert differences({"w": vector(0.99e-4)}, {"w": vector()}) == {}
    assert differences({"w": vector(1.02e-4)}, {"w": vector()}).keys() == {"w"}


@pytest.mark.parametrize("error", [0.0, 0.1])
def test_compare_limits_bfloat16(error: float) -> None:
    """The limit is three times the error of a single process and two epsilons."""
    limit = 3 * error + 2 * 2**-7
    large = 10 * vector()
    reference = {"w": vector(), "large": large}
    low_precision = {"w": vector(error).bfloat16(), "large": (10 * vector(0.3)).bfloat16()}
    assert differences({"w": vector(0.97 * limit), "large": large}, reference, low_precision) == {}
    wrong = differences({"w": vector(1.03 * limit), "large": large}, reference, low_precision)
    assert wrong.keys() == {"w"}


def test_compare_finds_common_factor_in_bfloat16() -> None:
    """Each tensor is within its own limit, but all of them together are not."""
    generator = torch.Generator().manual_seed(0)
    reference = {str(i): torch.randn(1000, generator=generator) for i in range(20)}
    narrow = {name: tensor.bfloat16() for name, tensor in reference.items()}
    assert differences(narrow, reference, narrow) == {}
    without_one_rank = {name: tensor * 63 / 64 for name, tensor in reference.items()}
    assert differences(without_one_rank, reference, narrow) != {}


@pytest.mark.parametrize(("floor", "dtype"), [(1e-8, torch.float32), (1e-5, torch.bfloat16)])
def test_compare_names_small_tensor(floor: float, dtype: torch.dtype) -> None:
    large = torch.full((100,), 1e3)
    small = 3 * floor * 1e4 / 5 * vector()  # three times the floor of all gradients, 1e4
    reference = {"large": large, "small": small}
    narrow = {name: tensor.to(dtype) for name, tensor in reference.items()}
    low_precision = narrow if dtype == torch.bfloat16 else None
    wrong = differences({"large": large, "small": -small}, reference, low_precision)
    assert wrong == {"small": "is -1 of the reference"}
    assert differences({"large": large}, reference, low_precision).keys() == {"small"}


def test_compare_ignores_noise_and_unused() -> None:
    large = torch.full((100,), 1e3)
    unused = torch.zeros(2)
    reference = {"large": large, "noise": torch.tensor([1e-9, 0.0]), "unused": unused}
    noise = torch.tensor([0.0, 0.9e-4])  # the floor is 1e-8 of 1e4
    assert differences({"large": large, "noise": noise}, reference) == {}
    assert differences({"large": large, "noise": 2 * noise}, reference).keys() == {"noise"}
    wrong = differences({"large": large, "noise": noise, "unused": 2 * noise}, reference)
    assert wrong.keys() == {"unused"}


def test_compare_rejects_zeros_in_bfloat16() -> None:
    large = torch.full((100,), 1e3)
    tiny = 1e-9 * vector()  # below the noise floor of all gradients
    reference = {"large": large, "tiny": tiny}
    narrow = {name: tensor.bfloat16() for name, tensor in reference.items()}
    assert differences({"large": large, "tiny": tiny}, reference, narrow) == {}
    assert differences({"large": large, "tiny": 0 * tiny}, reference, narrow).keys() == {"tiny"}


@pytest.mark.parametrize("value", [NAN, math.inf])
def test_compare_rejects_non_finite(value: float) -> None:
    finite = {"w": torch.ones(3)}
    broken = {"w": torch.tensor([1.0, value, 1.0])}
    assert differences(broken, finite).keys() == {"w"}
    assert differences(finite, broken).keys() == {"w"}
    assert differences(broken, broken).keys() == {"w"}


def test_compare_bits_counts_elements() -> None:
    last_bit = torch.tensor([3.0 + 2**-21, 4.0, 0.0])
    results = compare_bits({"a": last_bit}, {"a": vector(), "missing": vector()})
    assert [result.wrong for result in results] == [1, 2]


def ring_sums(parts: Tensor) -> Tensor:
    """Return the sums of the ranks' parts, each begun by another rank, as in a ring's chunks."""
    return reduce(torch.add, [parts.roll(-rank) for rank in range(len(parts))])


def make_fills(ranks: int, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Return the fill of each rank in a timed Linear's gradient, and their expected mean."""
    fills, expected = [], 0.0
    for rank in range(ranks):
        model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(1, 1)])})
        make_timed(model, 1.0, TimedCompute(CPU))
        fill_distinct_gradients(model, rank, ranks, ranks)
        [linear] = [module for module in model.modules() if isinstance(module, TimedLinear)]
        fills.append(linear.fill)
        expected = linear.mean_fill
    return torch.tensor(fills, dtype=dtype), expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 5, 26])
def test_count_unfilled_sees_missing_rank(ranks: int, dtype: torch.dtype) -> None:
    fills, expected = make_fills(ranks, dtype)
    # Ranks divide before they sum, by a factor that NCCL rounds.
    factor = torch.tensor(1 / ranks, dtype=dtype)
    assert count_unfilled(ring_sums(fills * factor), expected, ranks) == 0
    assert count_unfilled(ring_sums(3 * fills * factor), 3 * expected, ranks) == 0
    for missing in range(ranks):
        others = fills.clone()
        others[missing] = 0
        assert count_unfilled(ring_sums(others * factor), expected, ranks) == ranks


def test_count_unfilled_counts_missing_and_non_finite() -> None:
    assert count_unfilled(None, 3.0, 2) == 1
    assert count_unfilled(torch.tensor([3.0, NAN, math.inf, -3.0]), 3.0, 2) == 3
