"""The gate lets through what is equal within rounding, and nothing else."""

import math

import pytest
import torch
from ranks import Ranks
from torch import Tensor

from bench.world import World
from workloads.parity import RELATIVE_TOLERANCE, count_apart, count_unlike_rank_0

REFERENCE = torch.tensor([4.0, -8.0, 0.0, 1e-6])
LIMIT = RELATIVE_TOLERANCE * 8


def with_element(index: int, value: float, tensor: Tensor = REFERENCE) -> Tensor:
    changed = tensor.clone()
    changed[index] = value
    return changed


def test_equal_tensors_are_not_apart() -> None:
    assert count_apart([REFERENCE, REFERENCE * 2], [REFERENCE, REFERENCE * 2]) == 0
    assert count_apart([], []) == 0


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize(("by", "wrong"), [(0.9, 0), (-0.9, 0), (1.1, 1), (-1.1, 1), (1e9, 1)])
def test_the_tolerance_is_of_the_largest_reference_value(index: int, by: float, wrong: int) -> None:
    """Whichever element it is: a small one may be off by as much as a large one."""
    found = with_element(index, float(REFERENCE[index]) + by * LIMIT)
    assert count_apart([found], [REFERENCE]) == wrong


def test_the_largest_value_is_the_references_and_not_ours() -> None:
    assert count_apart([with_element(0, 1e9)], [REFERENCE]) == 1
    assert count_apart([torch.full((3,), 1e9)], [torch.zeros(3)]) == 3


def test_each_tensor_has_a_tolerance_of_its_own() -> None:
    small = torch.tensor([1e-6, 1e-6])
    assert count_apart([REFERENCE, small * 1.1], [REFERENCE, small]) == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_wrong(bad: float) -> None:
    assert count_apart([with_element(2, bad)], [REFERENCE]) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reference_that_is_no_number_passes_nothing_off_as_right(bad: float) -> None:
    """A limit that is infinite would let everything through."""
    reference = with_element(2, bad)
    assert count_apart([REFERENCE], [reference]) > 0
    assert count_apart([REFERENCE * 7], [reference]) > 0
    assert count_apart([reference], [reference]) > 0


def test_zeros_must_be_zeros() -> None:
    zeros = torch.zeros(3)
    assert count_apart([zeros], [zeros]) == 0
    assert count_apart([with_element(1, 1e-30, zeros)], [zeros]) == 1


def test_a_missing_tensor_is_all_wrong() -> None:
    assert count_apart([None, REFERENCE], [REFERENCE, REFERENCE]) == 4


def test_wrong_elements_of_all_tensors_are_summed() -> None:
    assert count_apart([-REFERENCE, None, with_element(0, 5.0)], [REFERENCE] * 3) == 2 + 4 + 1


def test_more_or_fewer_tensors_than_the_reference_are_our_mistake() -> None:
    for found, expected in ((1, 2), (2, 1)):
        with pytest.raises(ValueError, match="zip"):
            count_apart([REFERENCE] * found, [REFERENCE] * expected)


def test_a_reference_must_be_there() -> None:
    with pytest.raises(AssertionError):
        count_apart([REFERENCE], [None])


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
