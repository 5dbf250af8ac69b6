"""The numerical check accepts gradients, losses and updates within rounding, and no others."""

import math

import pytest
import torch
from torch import Tensor, nn

from parbench.workloads.model.simulated_compute import (
    SimulatedCompute,
    SimulatedLinear,
    set_distinct_gradients,
    simulate_linears,
)
from parbench.workloads.step.verify import Tensors, compare, compute_norm, count_unfilled


def differences(
    actual: Tensors, reference: Tensors, low_precision: Tensors | None = None
) -> dict[str, str]:
    """Return the difference of each wrong tensor by name."""
    results = compare(actual, reference, low_precision, compute_norm(reference.values()))
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
    assert wrong == {"small": "is -1 times the reference"}
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


@pytest.mark.parametrize("value", [math.nan, math.inf])
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
        set_distinct_gradients(model, rank, ranks)
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
