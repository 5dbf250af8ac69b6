"""Tensors and fills count as wrong where rounding errors do not explain them."""

import math
from collections.abc import Callable
from functools import reduce

import pytest
import torch
from torch import Tensor, nn

from parbench.workloads.context_parallel.attention_kernel import CpuFlash
from parbench.workloads.context_parallel.attention_methods import RingAttention
from parbench.workloads.context_parallel.context_case import Tile
from parbench.workloads.model.optimizer import make_optimizer
from parbench.workloads.model.shapes import SHAPES
from parbench.workloads.model.timed_compute import (
    TimedCompute,
    TimedLinear,
    fill_distinct_gradients,
    make_timed,
)
from parbench.workloads.model.transformer import build, draw_tokens, loss_of
from parbench.workloads.step.parity import (
    LOW_PRECISION_NOISE_FLOOR,
    NOISE_FLOOR,
    Tensors,
    compare,
    compare_bits,
    count_unfilled,
    norm_of_all,
)

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


def differences(
    actual: Tensors, reference: Tensors, low_precision: Tensors | None = None
) -> dict[str, str]:
    """Return how each wrong tensor differs, by name."""
    results = compare(actual, reference, low_precision, norm_of_all(reference.values()))
    return {result.name: result.how for result in results if result.wrong}


def vector(distance: float = 0.0, index: int = 2) -> Tensor:
    """Return a tensor at a distance from (3, 4, 0), in units of its norm of 5."""
    moved = torch.tensor([3.0, 4.0, 0.0])
    moved[index] += 5 * distance
    return moved


@pytest.mark.parametrize("index", [0, 2])
def test_compare_limits_float32(index: int) -> None:
    assert differences({"w": vector(0.99e-4, index)}, {"w": vector()}) == {}
    assert differences({"w": vector(1.02e-4, index)}, {"w": vector()}).keys() == {"w"}


@pytest.mark.parametrize("error", [0.0, 0.01, 0.1])
def test_compare_limits_bfloat16(error: float) -> None:
    """The limit is three times the error of a single process and two epsilons."""
    limit = 3 * error + 2 * 2**-7
    large = 10 * vector()
    reference = {"w": vector(), "large": large}
    low_precision = {"w": vector(error).bfloat16(), "large": (10 * vector(0.3)).bfloat16()}
    assert differences({"w": vector(0.97 * limit), "large": large}, reference, low_precision) == {}
    wrong = differences({"w": vector(1.03 * limit), "large": large}, reference, low_precision)
    assert wrong.keys() == {"w"}


def test_compare_finds_wrong_factor_of_all_low_precision_tensors() -> None:
    generator = torch.Generator().manual_seed(0)
    reference = {str(i): torch.randn(1000, generator=generator) for i in range(20)}
    narrow = {name: tensor.bfloat16() for name, tensor in reference.items()}
    errors = {name: narrow[name].float() - tensor for name, tensor in reference.items()}
    equal_errors = {name: reference[name] - error for name, error in errors.items()}
    assert differences(equal_errors, reference, narrow) == {}
    without_one_rank = {name: tensor * 63 / 64 for name, tensor in reference.items()}
    assert differences(without_one_rank, reference, narrow) != {}


def test_compare_low_precision_tensor_of_zeros_is_wrong() -> None:
    large = torch.full((100,), 1e3)
    tiny = 1e-9 * vector()  # below the noise floor of all gradients
    reference = {"large": large, "tiny": tiny}
    narrow = {name: tensor.bfloat16() for name, tensor in reference.items()}
    assert differences({"large": large, "tiny": tiny}, reference, narrow) == {}
    assert differences({"large": large, "tiny": 0 * tiny}, reference, narrow).keys() == {"tiny"}


@pytest.mark.parametrize(
    ("floor", "dtype"),
    [(NOISE_FLOOR, torch.float32), (LOW_PRECISION_NOISE_FLOOR, torch.bfloat16)],
)
def test_compare_names_small_tensor(floor: float, dtype: torch.dtype) -> None:
    large = torch.full((100,), 1e3)
    small = 3 * floor * 1e4 / 5 * vector()  # three times the floor of all gradients, 1e4
    reference = {"large": large, "small": small}
    narrow = {name: tensor.to(dtype) for name, tensor in reference.items()}
    low_precision = narrow if dtype == torch.bfloat16 else None
    for factor in (0.5, 2.0, -1.0):
        wrong = differences({"large": large, "small": factor * small}, reference, low_precision)
        assert wrong == {"small": f"is {factor:.3g} of the reference"}
    assert differences({"large": large}, reference, low_precision).keys() == {"small"}


def test_compare_ignores_noise_and_unused() -> None:
    large = torch.full((100,), 1e3)
    unused = torch.zeros(2)
    reference = {"large": large, "noise": torch.tensor([1e-9, 0.0]), "unused": unused}
    noise = torch.tensor([0.0, 0.9e-4])  # the floor is 1e-8 of 1e4
    assert differences({"large": large, "noise": noise, "unused": unused}, reference) == {}
    assert differences({"large": large, "noise": noise}, reference) == {}
    assert differences({"large": large, "noise": 2 * noise}, reference).keys() == {"noise"}
    assert differences({"large": large}, reference).keys() == {"noise"}
    used = {**reference, "unused": 2 * noise}
    assert differences(used, reference).keys() == {"unused"}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_compare_rejects_non_finite(value: float) -> None:
    finite, other = {"w": vector()}, {"w": vector(value)}
    assert differences(other, finite).keys() == {"w"}
    assert differences(finite, other).keys() == {"w"}
    assert differences(other, other).keys() == {"w"}
    assert differences(finite, finite, {"w": vector(value).bfloat16()}).keys() == {"w"}


def test_compare_bits_counts_elements() -> None:
    reference = {name: vector() for name in "abc"}
    one_bit = torch.tensor([3.0 + 2**-21, 4.0, 0.0])
    not_a_number = torch.tensor([math.nan, 4.0, 0.0])
    results = compare_bits({"a": one_bit, "b": not_a_number}, reference)
    assert [result.wrong for result in results] == [1, 1, 2]
    [double] = compare_bits({"a": 2 * vector()}, {"a": vector()})
    assert str(double) == "a is 2 of the reference"


@pytest.mark.parametrize("dtype", DTYPES)
def test_compare_accepts_trained_gradients(dtype: torch.dtype) -> None:
    """Random tokens teach nothing: gradients of queries and keys become rounding errors."""
    shape = SHAPES["tiny"]
    cuts = [slice(start, start + 16) for start in range(0, shape.sequence, 16)]
    pairs = [(rows, keys) for rows in cuts for keys in cuts if keys.start <= rows.start]
    tiles = [Tile(rows, keys, causal=keys == rows) for rows, keys in pairs]
    blockwise = RingAttention(None, CpuFlash(), [tiles])

    def gradients(dtype: torch.dtype, core: object = None) -> Tensors:
        replica = build(shape, 0, CPU, dtype)
        with torch.no_grad():
            for name, parameter in replica.named_parameters():
                parameter.copy_(model.get_parameter(name))
        for layer in replica.layers if core else ():
            layer.get_submodule("attention").core = core  # type: ignore[assignment]
        loss_of(replica, tokens).backward()  # type: ignore[no-untyped-call]
        return {name: p.grad for name, p in replica.named_parameters() if p.grad is not None}

    model = build(shape, 0, CPU, dtype)
    optimizer = make_optimizer(model.parameters(), dtype)
    needs_noise_floor = False
    for number in range(72):
        tokens = draw_tokens(shape, 4, 0, number)
        optimizer.zero_grad()
        loss_of(model, tokens).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if number >= 40 and number % 8 == 7:
            reference = gradients(torch.float32)
            actual = gradients(dtype, blockwise)
            low_precision = None if dtype == torch.float32 else gradients(dtype)
            assert differences(actual, reference, low_precision) == {}
            without_floor = compare(actual, reference, low_precision, norm=0.0)
            needs_noise_floor |= any(result.wrong for result in without_floor)
    assert needs_noise_floor, "this training does not reach rounding errors"


def ring_sums(parts: Tensor) -> Tensor:
    """Return the sums of the ranks' parts, each begun by another rank, as in a ring's chunks."""
    return reduce(torch.add, [parts.roll(-rank) for rank in range(len(parts))])


def divide_first(parts: Tensor) -> Tensor:
    return ring_sums(parts * (1 / len(parts)))


def divide_by_rounded_factor(parts: Tensor) -> Tensor:
    """Return means as NCCL computes them: the factor is rounded too."""
    return ring_sums(parts * torch.tensor(1 / len(parts), dtype=parts.dtype))


def make_fills(ranks: int, dtype: torch.dtype, divisor: int) -> tuple[Tensor, float]:
    """Return the fill of each rank in a timed Linear's gradient, and their expected reduction."""
    fills, expected = [], 0.0
    for rank in range(ranks):
        model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(1, 1)])})
        make_timed(model, 1.0, TimedCompute(CPU))
        fill_distinct_gradients(model, rank, ranks, divisor)
        [linear] = [module for module in model.modules() if isinstance(module, TimedLinear)]
        fills.append(linear.fill)
        expected = linear.mean_fill * ranks / divisor
    return torch.tensor(fills, dtype=dtype), expected


@pytest.mark.parametrize("reduction", [divide_first, divide_by_rounded_factor, ring_sums])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 5, 16, 26, 96])
def test_count_unfilled_sees_missing_rank(
    ranks: int, dtype: torch.dtype, reduction: Callable[[Tensor], Tensor]
) -> None:
    fills, expected = make_fills(ranks, dtype, 1 if reduction is ring_sums else ranks)
    for microbatches in (1, 3):
        gradient = reduction(reduce(torch.add, [fills] * microbatches))
        assert count_unfilled(gradient, microbatches * expected, ranks) == 0
    for missing in range(ranks if ranks <= 26 else 0):
        rest = fills.clone()
        rest[missing] = 0
        assert count_unfilled(reduction(rest), expected, ranks) == ranks
    fills[: ranks // 2] = 0
    assert count_unfilled(reduction(fills), expected, ranks) == ranks


def test_count_unfilled_accepts_rounded_factor() -> None:
    gradient = divide_first(torch.arange(1.0, 7))
    assert bool((gradient != 3.5).any())
    assert count_unfilled(gradient, 3.5, 6) == 0


def test_count_unfilled_counts_non_finite() -> None:
    assert count_unfilled(None, 3.0, 2) == 1
    assert count_unfilled(torch.tensor([3.0, math.nan, math.inf, -3.0]), 3.0, 2) == 3
