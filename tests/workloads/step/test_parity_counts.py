"""Tensors and fills are counted as wrong where rounding errors do not explain them."""

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
from parbench.workloads.model.timed_compute import TimedCompute, TimedLinear, fill_distinct_gradients, make_timed
from parbench.workloads.model.transformer import build, draw_tokens, loss_of
from parbench.workloads.step.parity import (
    LOW_PRECISION_EPSILONS,
    LOW_PRECISION_FACTOR,
    LOW_PRECISION_NOISE_FLOOR,
    NOISE_FLOOR,
    RELATIVE_TOLERANCE,
    Tensors,
    compare,
    compare_bits,
    count_unfilled,
    norm_of_all,
)

DTYPES = [torch.float32, torch.bfloat16]
FACTORS = (0.0, 0.5, 2.0, -1.0)


def wrong(found: Tensors, expected: Tensors, low_precision: Tensors | None = None) -> dict[str, str]:
    """Return what is wrong of each wrong tensor."""
    compared = list(compare(found, expected, low_precision, norm_of_all(expected.values())))
    assert all(one.wrong in (0, expected[one.name].numel()) for one in compared)
    return {one.name: one.how for one in compared if one.wrong}


def with_element(index: int, value: float, tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    changed[index] = value
    return changed


def away(distance: float, index: int = 2) -> Tensor:
    """Return a tensor at a distance from (3, 4, 0), in units of its norm, which is 5."""
    moved = torch.tensor([3.0, 4.0, 0.0])
    moved[index] += 5 * distance
    return moved


def test_compare_limits_float32_relative_to_its_norm() -> None:
    limit = RELATIVE_TOLERANCE + NOISE_FLOOR
    for index in (0, 2):
        assert wrong({"w": away(0.99 * limit, index)}, {"w": away(0)}) == {}
        assert wrong({"w": away(1.01 * limit, index)}, {"w": away(0)}).keys() == {"w"}


def test_compare_limits_low_precision_by_the_references_error() -> None:
    for error in (0.0, 0.01, 0.1):
        limit = LOW_PRECISION_FACTOR * error + LOW_PRECISION_EPSILONS * torch.finfo(torch.bfloat16).eps
        reference = {"w": away(0)}
        low_precision = {"w": away(error).bfloat16()}
        assert wrong({"w": away(0.97 * limit)}, reference, low_precision) == {}
        assert wrong({"w": away(1.03 * limit)}, reference, low_precision).keys() == {"w"}


def test_compare_names_a_wrong_gradient_of_a_small_tensor() -> None:
    """A gradient of a millionth of all is wrong if it is missing, halved, doubled or negated."""
    expected = {"large": torch.full((100,), 1e3), "small": 1e-3 * away(0)}
    floor = norm_of_all(expected.values())
    for low_precision, size in ((None, 3 * NOISE_FLOOR), (expected, 3 * LOW_PRECISION_NOISE_FLOOR)):
        low = low_precision and {name: tensor.bfloat16() for name, tensor in expected.items()}
        expected["small"] = size * floor / 5 * away(0)
        if low is not None:
            low["small"] = expected["small"].bfloat16()
        for factor in FACTORS:
            found = wrong({**expected, "small": factor * expected["small"]}, expected, low)
            assert found == {"small": f"is {factor:.3g} of the reference" if factor else "is zero"}
        assert wrong({"large": expected["large"]}, expected, low) == {"small": "is missing"}


def test_compare_accepts_noise_and_unused_parameters() -> None:
    expected = {"large": torch.full((100,), 1e3), "noise": torch.tensor([1e-9, 0.0]), "unused": torch.zeros(2)}
    noise = torch.tensor([0.0, 0.9 * NOISE_FLOOR * 1e4])
    assert wrong({"large": expected["large"], "noise": noise}, expected) == {}
    assert wrong({"large": expected["large"], "noise": 2 * noise}, expected).keys() == {"noise"}
    assert wrong({"large": expected["large"]}, expected) == {"noise": "is missing"}
    assert wrong({**expected, "unused": noise * 2}, expected) == {"unused": "is not zero, as the reference is"}


def test_compare_rejects_values_that_are_not_finite() -> None:
    for value in (math.nan, math.inf, -math.inf):
        assert wrong({"w": away(value)}, {"w": away(0)}).keys() == {"w"}
        for found in (away(0), away(value)):
            assert wrong({"w": found}, {"w": away(value)}).keys() == {"w"}
        assert wrong({"w": away(0)}, {"w": away(0)}, {"w": away(value).bfloat16()}).keys() == {"w"}


def test_compare_bits_counts_elements() -> None:
    expected = {"a": away(0), "b": away(0), "c": away(0)}
    found = {"a": with_element(0, 3.0 + 2**-21, away(0)), "b": with_element(0, math.nan, away(0))}
    assert [one.wrong for one in compare_bits(found, expected)] == [1, 1, 2]
    [one] = compare_bits({"a": 2 * away(0)}, {"a": away(0)})
    assert str(one) == "a is 2 of the reference"


@pytest.mark.parametrize("dtype", DTYPES)
def test_compare_accepts_right_gradients_of_a_trained_model(dtype: torch.dtype) -> None:
    """Random tokens teach nothing: gradients of queries and keys become rounding errors."""
    shape = SHAPES["tiny"]
    cuts = [slice(start, start + 16) for start in range(0, shape.sequence, 16)]
    tiles = [Tile(rows, keys, causal=keys == rows) for rows in cuts for keys in cuts if keys.start <= rows.start]
    in_blocks = RingAttention(None, CpuFlash(), [tiles])

    def gradients(dtype: torch.dtype, core: object = None) -> Tensors:
        alone = build(shape, 0, torch.device("cpu"), dtype)
        with torch.no_grad():
            for name, parameter in alone.named_parameters():
                parameter.copy_(model.get_parameter(name))
        for layer in alone.layers if core else ():
            layer.get_submodule("attention").core = core  # type: ignore[assignment]
        loss_of(alone, tokens).backward()  # type: ignore[no-untyped-call]
        return {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}

    model = build(shape, 0, torch.device("cpu"), dtype)
    optimizer = make_optimizer(model.parameters(), dtype)
    needs_noise_floor = False
    for number in range(72):
        tokens = draw_tokens(shape, 4, 0, number)
        optimizer.zero_grad()
        loss_of(model, tokens).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if number >= 40 and number % 8 == 7:
            expected, found = gradients(torch.float32), gradients(dtype, in_blocks)
            low_precision = None if dtype == torch.float32 else gradients(dtype)
            assert wrong(found, expected, low_precision) == {}
            needs_noise_floor |= any(one.wrong for one in compare(found, expected, low_precision, norm=0.0))
    assert needs_noise_floor, "this training does not reach rounding errors"


Mean = Callable[[Tensor], Tensor]


def not_divided(parts: Tensor) -> Tensor:
    """Return the sums of all ranks' parts (n) by a ring's chunks (n), each begun by another rank, rounded at each.

    So a hybrid step takes them over its data axes.
    """
    return reduce(torch.add, [parts.roll(-rank) for rank in range(len(parts))])


def divided_first(parts: Tensor) -> Tensor:
    return not_divided(parts * (1 / len(parts)))


def divided_in_the_type(parts: Tensor) -> Tensor:
    """Return the means as NCCL takes them: the factor is rounded too."""
    return not_divided(parts * torch.tensor(1 / len(parts), dtype=parts.dtype))


MEANS: list[Mean] = [divided_first, divided_in_the_type, not_divided]


def filled(ranks: int, dtype: torch.dtype, mean: Mean) -> tuple[Tensor, float]:
    """Return what each rank (n) fills in a timed Linear's gradient, and what comes of all."""
    divisor = 1 if mean is not_divided else ranks
    fills, expected = [], 0.0
    for rank in range(ranks):
        model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(1, 1)])})
        make_timed(model, 1.0, TimedCompute(torch.device("cpu")))
        fill_distinct_gradients(model, rank, ranks, divisor)
        [linear] = [module for module in model.modules() if isinstance(module, TimedLinear)]
        fills.append(linear.fill)
        expected = linear.mean_fill * ranks / divisor
    return torch.tensor(fills, dtype=dtype), expected


@pytest.mark.parametrize("mean", MEANS)
def test_fills_are_right_in_whatever_order_ranks_are_summed_and_a_rank_that_is_missing_is_seen(mean: Mean) -> None:
    for ranks in (2, 3, 5, 8, 13, 16, 26, 31, 96):
        for dtype in DTYPES:
            parts, expected = filled(ranks, dtype, mean)
            for microbatches in (1, 2, 3):
                found = mean(reduce(torch.add, [parts] * microbatches))
                assert count_unfilled(found, microbatches * expected, ranks) == 0, (ranks, dtype, microbatches)
            for missing in range(ranks if ranks <= 26 else 0):
                rest = with_element(missing, 0, parts)
                assert count_unfilled(mean(rest), expected, ranks) == ranks, (ranks, dtype, missing)
            parts[: ranks // 2] = 0
            assert count_unfilled(mean(parts), expected, ranks) == ranks, (ranks, dtype, "half")


def test_fills_that_differ_by_the_rounding_of_a_factor_are_right_and_no_number_is_wrong() -> None:
    """With numbers of ranks as fills: DDP's factor is rounded before the sum."""
    for ranks in (5, 6, 7, 9):
        found, expected = divided_first(torch.arange(1.0, ranks + 1)), (ranks + 1) / 2
        assert bool((found != expected).any())
        assert count_unfilled(found, expected, ranks) == 0
    assert count_unfilled(None, 3.0, 2) == 1
    assert count_unfilled(torch.tensor([3.0, math.nan, math.inf, -3.0]), 3.0, 2) == 3
