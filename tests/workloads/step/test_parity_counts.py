"""Elements, distances and fills are counted as wrong where rounding does not explain them."""

import math
from collections.abc import Callable
from functools import reduce

import pytest
import torch
from torch import Tensor, nn

from workloads.model.timed_compute import TimedCompute, TimedLinear, fill_distinct_gradients, make_timed
from workloads.step.parity import FLOOR, RELATIVE_TOLERANCE, count_apart, count_unfilled, distance

REFERENCE = torch.tensor([4.0, -8.0, 0.0, 1e-6])
LIMIT = RELATIVE_TOLERANCE * 8
DTYPES = [torch.float32, torch.bfloat16]


def with_element(index: int, value: float, tensor: Tensor = REFERENCE) -> Tensor:
    changed = tensor.clone()
    changed[index] = value
    return changed


def apart(found: Tensor, reference: Tensor = REFERENCE) -> int:
    return count_apart({"w": found}, {"w": reference})


def test_the_tolerance_is_of_the_largest_reference_value_whichever_element_it_is() -> None:
    for index in range(4):
        for by, wrong in ((0.9, 0), (-0.9, 0), (1.1, 1), (-1.1, 1), (1e9, 1)):
            assert apart(with_element(index, float(REFERENCE[index]) + by * LIMIT)) == wrong, (index, by)
    assert apart(with_element(0, 1e9)) == 1, "the largest value is not ours"
    assert apart(torch.full((3,), 1e9), zeros := torch.zeros(3)) == 3
    assert (apart(zeros, zeros), apart(with_element(1, 1e-30, zeros), zeros)) == (0, 1)


def test_a_tensor_has_a_tolerance_of_its_own_but_at_least_the_floors() -> None:
    """Beside gradients of 8, those of a millionth are the roundings of sums that cancel."""
    large, tiny = torch.full((2,), 2 * FLOOR * 8), torch.full((2,), 1e-6)
    for part, wrong in ((0.9, 0), (1.1, 2)):
        for reference, limit in ((large, RELATIVE_TOLERANCE * large), (tiny, FLOOR * LIMIT)):
            found = {"large": REFERENCE, "small": reference + part * limit}
            assert count_apart(found, {"large": REFERENCE, "small": reference}) == wrong, (part, reference)


def test_what_is_no_number_is_wrong_and_passes_nothing_off_as_right() -> None:
    """A limit that is infinite would let everything through."""
    for bad in (math.nan, math.inf, -math.inf):
        assert apart(with_element(2, bad)) == 1, bad
        reference = with_element(2, bad)
        assert min(apart(found, reference) for found in (REFERENCE, REFERENCE * 7, reference)) > 0, bad


def test_tensors_are_compared_by_name_and_a_missing_one_is_all_wrong() -> None:
    assert count_apart({}, {}) == 0
    expected = dict.fromkeys("abc", REFERENCE)
    assert count_apart({"b": REFERENCE, "c": REFERENCE}, expected) == 4
    assert count_apart({"a": -REFERENCE, "c": with_element(0, 5.0)}, expected) == 2 + 4 + 1
    assert count_apart({"b": REFERENCE, "a": -REFERENCE}, {"a": -REFERENCE, "b": REFERENCE}) == 0
    assert count_apart({"a": REFERENCE, "b": -REFERENCE}, {"a": -REFERENCE, "b": REFERENCE}) == 4


def test_the_distance_is_of_all_together_relative_to_the_references_length() -> None:
    expected = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}
    assert distance(expected, expected) == 0.0
    assert distance({"a": torch.tensor([3.0, 3.0]), "b": torch.tensor([[8.0]])}, expected) == pytest.approx(1.0)
    assert distance({"a": torch.zeros(2), "b": torch.zeros(1, 1)}, expected) == pytest.approx(1.0)
    assert distance({name: 1.5 * value for name, value in expected.items()}, expected) == pytest.approx(0.5)
    reference = {"a": torch.tensor([1.0, 1 + 2**-9])}
    assert distance({"a": reference["a"].bfloat16()}, reference) == pytest.approx(2**-9 / math.sqrt(2), rel=0.01)
    assert distance({}, {"a": REFERENCE}) == distance({"a": REFERENCE, "b": REFERENCE}, {"a": REFERENCE}) == math.inf


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
