"""The test data is exact and reveals every kind of wrong result, and an operation uses it."""

from dataclasses import replace
from itertools import combinations
from typing import cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from parbench.bench.operations.data_pattern import (
    PERIOD,
    DataPattern,
    count_wrong,
    get_dtype,
    poison,
)
from parbench.bench.plan.catalogue import DTYPES
from tests.support.data_faults import try_all
from tests.support.filling import filling

CPU = torch.device("cpu")
COUNT = 97
FAULTS = {"dropped rank", "dropped ranks", "swapped chunks", "swapped results", "wrong root"}


@pytest.mark.parametrize("name", DTYPES)
def test_dtype_size_and_exact_limit(name: str) -> None:
    dtype = get_dtype(name)
    limit = DTYPES[name].exact_up_to
    assert dtype.itemsize == DTYPES[name].itemsize
    if not dtype.is_floating_point:
        assert limit == torch.iinfo(dtype).max
    else:
        # The first integer that rounds has one more bit than the mantissa with its leading 1.
        assert limit == 2 / torch.finfo(dtype).eps
        assert torch.tensor([limit, limit + 1]).to(dtype).double().tolist() == [limit, limit]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_ranks", [3, 300])
def test_sums_are_exact_in_any_order(dtype: str, num_ranks: int) -> None:
    pattern = DataPattern(dtype, num_ranks, CPU, "sum")
    values = [pattern.compute_values(rank, 0, COUNT).double() for rank in range(num_ranks)]
    terms = torch.stack(values)
    total = terms.sum(dim=0)
    # No term is negative and the total is exact, so every partial sum is.
    assert torch.equal(terms, terms.round())
    assert int(terms.min()) >= 0
    assert int(total.max()) <= DTYPES[dtype].exact_up_to
    result = pattern.compute_reduction(0, COUNT)
    assert result.dtype == get_dtype(dtype)
    assert torch.equal(result.double(), total)


def assert_all_faults_detected(dtype: str, num_ranks: int) -> None:
    tried = set()
    for fault, is_detected in try_all(dtype, num_ranks):
        assert is_detected, fault
        tried.add(fault)
    assert tried >= FAULTS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_every_fault_is_detected(dtype: str, num_ranks: int) -> None:
    assert_all_faults_detected(dtype, num_ranks)


@pytest.mark.parametrize(
    ("dtype", "num_ranks"),
    [("float32", 96), ("bfloat16", 96), pytest.param("bfloat16", 1024, marks=pytest.mark.full)],
)
def test_faults_of_many_ranks_are_detected(dtype: str, num_ranks: int) -> None:
    assert_all_faults_detected(dtype, num_ranks)


@pytest.mark.parametrize("length", [1000, 1 << 16, PERIOD - 1, 2 * PERIOD + 1])
def test_chunks_differ_at_any_length(length: int) -> None:
    """Tables repeat after ``PERIOD`` elements, which is not a multiple of a length of chunks."""
    moved = DataPattern("float32", 1024, CPU)
    reduced = DataPattern("float32", 3, CPU, "max")
    starts = [index * length for index in (0, 1, 2, 127)]
    chunks = [moved.compute_values(rank, start, 1152) for rank in (0, 1) for start in starts]
    results = [reduced.compute_reduction(start, 1152) for start in starts]
    for tensors in (chunks, results):
        for first, second in combinations(tensors, 2):
            assert count_wrong(first, second) > 0


@pytest.mark.parametrize("num_periods", [0, 2])
def test_filler_writes_the_values(num_periods: int) -> None:
    pattern = DataPattern("uint8", 2, CPU)
    out = pattern.allocate(num_periods * PERIOD + 100)
    fill = pattern.make_filler(out, 1)
    fill()
    assert torch.equal(out, pattern.compute_values(1, 0, len(out)))
    start = max(len(out) - PERIOD, 7)
    part = pattern.compute_values(1, start, len(out) - start)
    assert torch.equal(out[start:], part)


@pytest.mark.parametrize("dtype", DTYPES)
def test_poison_is_always_wrong(dtype: str) -> None:
    poisoned = poison(torch.empty(COUNT, dtype=get_dtype(dtype)))
    moved = DataPattern(dtype, 64, CPU).compute_values(63, 0, COUNT)
    reduced = DataPattern(dtype, 64, CPU, "sum").compute_reduction(0, COUNT)
    assert count_wrong(poisoned, moved) == COUNT
    assert count_wrong(poisoned, reduced) == COUNT


@pytest.mark.parametrize(("value", "wrong"), [(2.0, 0), (2.01, 4)])
def test_operation_check_counts_wrong_elements(value: float, wrong: int) -> None:
    operation = filling(value)
    operation.reset()
    assert operation.check() == 4
    operation.step()
    assert operation.check() == wrong


def test_operation_issue_returns_works() -> None:
    work = cast(dist.Work, object())
    call = mock.Mock(side_effect=[work, [work, work]])
    operation = replace(filling(), call=call)
    assert operation.issue() == [work]
    assert operation.issue() == [work, work]
    call.assert_called_with(async_op=True)
