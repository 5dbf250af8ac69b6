"""The numerical check accepts gradients, losses and updates within rounding, and no others."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parbench.bench.world.world import World
from parbench.workloads.costs.parameter_table import num_parameters
from parbench.workloads.model.optimizer import LEARNING_RATE, make_optimizer
from parbench.workloads.model.shapes import Shape
from parbench.workloads.model.simulated_compute import (
    SimulatedCompute,
    SimulatedLinear,
    set_distinct_gradients,
    simulate_linears,
)
from parbench.workloads.model.transformer import compute_loss, draw_tokens
from parbench.workloads.step.verify import (
    Tensors,
    Verifier,
    compare,
    count_replica_mismatches,
    count_unfilled,
    norm_of_all,
)
from tests.support.ranks import Ranks
from tests.support.workloads.training_steps import build_model

NAN = math.nan
SHAPE = Shape(
    recipe="gpt", layers=2, hidden=32, heads=4, kv_heads=4, ffn=64, sequence=16, vocabulary=64
)


class Trainer:
    """A data-parallel loop whose gradients or updates a test corrupts."""

    def __init__(
        self,
        world: World,
        dtype_name: str = "float32",
        reduce_dtype_name: str = "",
        update: str = "right",
    ) -> None:
        dtype = getattr(torch, dtype_name)
        self.reduce_dtype = getattr(torch, reduce_dtype_name or dtype_name)
        self.world = world
        self.model = build_model(SHAPE, world.seed, world.device, dtype)
        self.optimizer = make_optimizer(self.model.parameters(), dtype)
        tokens = draw_tokens(SHAPE, 2 * world.size, world.seed, 1)
        self.microbatches = tokens.chunk(world.size)
        self.corrupt: Callable[[Trainer], object] = lambda trainer: None
        self.update = UPDATES[update]
        self.verifier = Verifier(
            world=world,
            model=self.model,
            build_reference=lambda dtype: build_model(SHAPE, world.seed, world.device, dtype),
            reference_loss=lambda model, tokens, microbatch: compute_loss(model, tokens),
            dtype=dtype,
            reduce_dtype=self.reduce_dtype,
            data_size=world.size,
            replicas=[(world.group, list(self.model.parameters()))],
        )

    def backward(self) -> Tensor:
        """Compute the gradients of this rank's part of the batch without any communication."""
        self.optimizer.zero_grad()
        tokens = self.microbatches[self.world.rank]
        loss = compute_loss(self.model, tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def compute_gradients(self) -> Tensor:
        loss = self.backward()
        for gradient in self.gradients():
            total = gradient.to(self.reduce_dtype) / self.world.size
            dist.all_reduce(total, group=self.world.group)
            gradient.copy_(total)
        self.corrupt(self)
        return loss

    def step(self) -> None:
        self.compute_gradients()
        self.update(self)

    def check(self, loss_factor: float = 1.0) -> int:
        def compute() -> Tensor:
            return self.compute_gradients() * loss_factor

        return self.verifier.count_wrong(self.microbatches, compute, self.step)

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def gradient(self, name: str) -> Tensor:
        gradient = self.model.get_parameter(name).grad
        assert gradient is not None
        return gradient


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


def negate_one_gradient(trainer: Trainer) -> None:
    trainer.gradient("layers.1.ffn.up.weight").neg_()


def break_one_gradient(trainer: Trainer) -> None:
    trainer.gradient("norm.bias").fill_(NAN)


CORRUPTIONS: list[Callable[[Trainer], object]] = [
    scale_gradients,
    negate_one_gradient,
    break_one_gradient,
    Trainer.backward,  # gradients are not reduced
]


def checked_trainer(world: World, *dtypes: str) -> Trainer:
    trainer = Trainer(world, *dtypes)
    trainer.step()
    assert trainer.check() == 0
    return trainer


def count_wrong_gradients(world: World, dtypes: tuple[str, str]) -> list[int]:
    trainer = checked_trainer(world, *dtypes)
    counts = []
    for corrupt in CORRUPTIONS:
        trainer.corrupt = corrupt
        counts.append(trainer.check())
    return counts


def test_verifier_counts_wrong_gradients(two_ranks: Ranks) -> None:
    dtypes = ("float32", "float32")
    for counts in two_ranks.call(f"{__name__}:count_wrong_gradients", dtypes=dtypes):
        assert min(counts) > 0


@pytest.mark.parametrize(
    "dtypes",
    [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "bfloat16")],
)
def test_verifier_counts_wrong_low_precision_gradients(
    two_ranks: Ranks, dtypes: tuple[str, str]
) -> None:
    for counts in two_ranks.call(f"{__name__}:count_wrong_gradients", dtypes=dtypes):
        scaled, *wrong = counts
        assert scaled == 0  # within the rounding of bfloat16
        assert wrong == [32 * 64, 32, num_parameters(SHAPE)]


def count_wrong_losses(world: World, dtype: str, errors: list[list[float]]) -> list[int]:
    """Return the count for each list of the ranks' relative errors of the loss."""
    trainer = checked_trainer(world, dtype)
    return [trainer.check(loss_factor=1 + by_rank[world.rank]) for by_rank in errors]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 1e-2)])
def test_verifier_compares_mean_loss(two_ranks: Ranks, dtype: str, tolerance: float) -> None:
    small, large = 0.5 * tolerance, 10 * tolerance
    # The mean of opposite errors stays within the tolerance.
    errors = [[small, small], [0.0, large], [large, -large], [NAN, 0.0]]
    counts = two_ranks.call(f"{__name__}:count_wrong_losses", dtype=dtype, errors=errors)
    assert counts == [[0, 1, 0, 1]] * 2


def count_wrong_updates(world: World, update: str) -> list[int]:
    """Return the counts of two checks, each after a step."""
    trainer = Trainer(world, update=update)
    counts = []
    for _ in range(2):
        trainer.step()
        counts.append(trainer.check())
    return counts


@pytest.mark.parametrize("update", UPDATES)
def test_verifier_compares_updates_once(two_ranks: Ranks, update: str) -> None:
    """Gradients are right for the wrong weights, so only the first check compares updates."""
    for first, second in two_ranks.call(f"{__name__}:count_wrong_updates", update=update):
        assert (first > 0) == (update != "right")
        assert second == 0


def add_noise(trainer: Trainer) -> None:
    generator = torch.Generator().manual_seed(0)
    for gradient in trainer.gradients():
        noise = torch.rand(gradient.shape, generator=generator)
        gradient += 1e-5 * gradient.abs().max() * noise


def count_wrong_with_noise(world: World) -> int:
    trainer = Trainer(world)
    trainer.corrupt = add_noise
    trainer.step()
    return trainer.check()


def test_verifier_ignores_updates_decided_by_noise(two_ranks: Ranks) -> None:
    """AdamW moves a weight by the whole learning rate if its gradient is only noise."""
    assert two_ranks.call(f"{__name__}:count_wrong_with_noise") == [0, 0]


def count_mismatches(world: World, values_of_rank_1: list[float], dtype: str) -> int:
    values = values_of_rank_1 if world.rank == 1 else [1.0, -2.0, 0.0, 3.0]
    matrix = torch.tensor(values, dtype=getattr(torch, dtype)).reshape(2, 2).T
    return count_replica_mismatches([torch.zeros(2), nn.Parameter(matrix)], world.group)


@pytest.mark.parametrize(
    ("values", "dtype", "unlike"),
    [
        ([1.0, -2.0, 0.0, 3.0], "bfloat16", 0),
        ([1.0, -2.0, 0.0, math.nextafter(3.0, 4.0)], "float64", 1),
        ([1.0, NAN, -0.0, 3.0], "float32", 2),
    ],
)
def test_replica_mismatches_are_bits(
    two_ranks: Ranks, values: list[float], dtype: str, unlike: int
) -> None:
    arguments = {"values_of_rank_1": values, "dtype": dtype}
    assert two_ranks.call(f"{__name__}:count_mismatches", **arguments) == [0, unlike]


def differences(
    actual: Tensors, reference: Tensors, low_precision: Tensors | None = None
) -> dict[str, str]:
    """Return the difference of each wrong tensor by name."""
    results = compare(actual, reference, low_precision, norm_of_all(reference.values()))
    return {result.name: result.difference for result in results}


def vector(distance: float = 0.0) -> Tensor:
    """Return a tensor at a distance from (3, 4, 0), in units of its norm of 5."""
    return torch.tensor([3.0, 4.0, 5 * distance])


def narrow(tensors: Tensors) -> Tensors:
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


LARGE = torch.full((100,), 1e3)  # its norm is 1e4


def test_compare_limits_float32() -> None:
    reference = {"w": vector()}
    assert differences({"w": vector(0.99e-4)}, reference) == {}
    assert differences({"w": vector(1.02e-4)}, reference).keys() == {"w"}


@pytest.mark.parametrize("error", [0.0, 0.1])
def test_compare_limits_bfloat16(error: float) -> None:
    """The limit is three times the error of a single process and two epsilons."""
    limit = 3 * error + 2 * 2**-7
    large = 10 * vector()
    reference = {"w": vector(), "large": large}
    low_precision = narrow({"w": vector(error), "large": 10 * vector(0.3)})
    right = {"w": vector(0.97 * limit), "large": large}
    assert differences(right, reference, low_precision) == {}
    wrong = {"w": vector(1.03 * limit), "large": large}
    assert differences(wrong, reference, low_precision).keys() == {"w"}


def test_compare_finds_common_factor_in_bfloat16() -> None:
    """Each tensor is within its own limit, but all of them together are not."""
    generator = torch.Generator().manual_seed(0)
    reference = {str(i): torch.randn(1000, generator=generator) for i in range(20)}
    low_precision = narrow(reference)
    assert differences(low_precision, reference, low_precision) == {}
    without_one_rank = {name: tensor * 63 / 64 for name, tensor in reference.items()}
    assert differences(without_one_rank, reference, low_precision) != {}


def test_compare_names_small_tensor() -> None:
    floor = 1e-8 * 1e4  # of all gradients
    small = 3 * floor / 5 * vector()
    reference = {"large": LARGE, "small": small}
    wrong = differences({"large": LARGE, "small": -small}, reference)
    assert wrong == {"small": "is -1 of the reference"}
    assert differences({"large": LARGE}, reference).keys() == {"small"}


def test_compare_ignores_noise_and_unused() -> None:
    reference = {"large": LARGE, "noise": torch.tensor([1e-9, 0.0]), "unused": torch.zeros(2)}
    noise = torch.tensor([0.0, 0.9e-4])  # the floor is 1e-8 of 1e4
    right = {"large": LARGE, "noise": noise}
    assert differences(right, reference) == {}
    assert differences({**right, "noise": 2 * noise}, reference).keys() == {"noise"}
    assert differences({**right, "unused": 2 * noise}, reference).keys() == {"unused"}


def test_compare_rejects_zeros_in_bfloat16() -> None:
    tiny = 1e-9 * vector()  # below the noise floor of all gradients
    reference = {"large": LARGE, "tiny": tiny}
    low_precision = narrow(reference)
    assert differences(reference, reference, low_precision) == {}
    zeros = {"large": LARGE, "tiny": 0 * tiny}
    assert differences(zeros, reference, low_precision).keys() == {"tiny"}


@pytest.mark.parametrize("value", [NAN, math.inf])
def test_compare_rejects_non_finite(value: float) -> None:
    finite = {"w": torch.ones(3)}
    broken = {"w": torch.tensor([1.0, value, 1.0])}
    assert differences(broken, finite).keys() == {"w"}
    assert differences(finite, broken).keys() == {"w"}
    assert differences(broken, broken).keys() == {"w"}


def ring_sums(parts: Tensor) -> Tensor:
    """Return the sums of the ranks' parts, each begun by another rank, as in a ring's chunks."""
    sums = torch.zeros_like(parts)
    for rank in range(len(parts)):
        sums += parts.roll(-rank)
    return sums


def make_fills(ranks: int, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Return the fill of each rank in a timed Linear's gradient, and their expected mean."""
    fills, expected = [], 0.0
    for rank in range(ranks):
        model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(1, 1)])})
        simulate_linears(model, 1.0, SimulatedCompute(torch.device("cpu")))
        set_distinct_gradients(model, rank, ranks, ranks)
        [linear] = [module for module in model.modules() if isinstance(module, SimulatedLinear)]
        fills.append(linear.gradient_value)
        expected = linear.mean_gradient_value
    return torch.tensor(fills, dtype=dtype), expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 26])
def test_count_unfilled_sees_missing_rank(ranks: int, dtype: torch.dtype) -> None:
    fills, expected = make_fills(ranks, dtype)
    # Ranks divide before they sum, by a factor that NCCL rounds.
    factor = torch.tensor(1 / ranks, dtype=dtype)
    assert count_unfilled(ring_sums(fills * factor), expected, ranks) == 0
    for missing in range(ranks):
        incomplete = fills.clone()
        incomplete[missing] = 0
        assert count_unfilled(ring_sums(incomplete * factor), expected, ranks) == ranks
