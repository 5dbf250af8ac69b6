"""The test data is exact and shows every kind of wrong result, and an operation uses it."""

from dataclasses import replace
from itertools import combinations
from typing import cast
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from parbench.bench.operations.operation import DataPattern, count_wrong, dtype_of, poison
from parbench.bench.plan.catalogue import DTYPES
from tests.studies.data_coding import caught
from tests.support.filling import filling

# A bool is only moved or joined by a logical operation.
NUMERIC = [name for name in DTYPES if name != "bool"]
NUMPY_FLOATS = ["float64", "float32", "float16"]
NUMPY_INTEGERS = ["int64", "int32", "int8", "uint8"]
# Stored mantissa bits: bfloat16 (Intel 2018), FP8 formats (Micikevicius et al., arXiv 2209.05433).
MANTISSA_BITS = {"bfloat16": 7, "float8_e4m3fn": 3, "float8_e5m2": 2}
CPU = torch.device("cpu")
COUNT = 97
TABLE_LENGTH = 65_521
KINDS_OF_WRONG = {
    "dropped rank",
    "dropped ranks",
    "swapped chunks",
    "swapped results",
    "wrong root",
}


def test_dtype_sizes_match_torch_and_numpy() -> None:
    assert set(DTYPES) == {*NUMPY_FLOATS, *NUMPY_INTEGERS, *MANTISSA_BITS, "bool"}
    for name, dtype in DTYPES.items():
        assert dtype_of(name).itemsize == dtype.itemsize, name
    for name in NUMPY_FLOATS + NUMPY_INTEGERS:
        assert np.dtype(name).itemsize == DTYPES[name].itemsize, name


@pytest.mark.parametrize("name", NUMPY_FLOATS)
def test_exact_limit_of_numpy_floats(name: str) -> None:
    limit = DTYPES[name].exact_up_to
    around_limit = np.array([limit, limit + 1]).astype(name)
    assert around_limit.astype(int).tolist() == [limit, limit]


@pytest.mark.parametrize("name", NUMPY_INTEGERS)
def test_exact_limit_of_integers(name: str) -> None:
    assert DTYPES[name].exact_up_to == np.iinfo(name).max


@pytest.mark.parametrize(("name", "mantissa_bits"), MANTISSA_BITS.items())
def test_exact_limit_of_short_floats(name: str, mantissa_bits: int) -> None:
    """The first integer that rounds has an odd part of more than the stored bits and one."""
    odd_part_limit = 1 << (mantissa_bits + 1)
    first_rounded = next(n for n in range(1, 1 << 10) if n // (n & -n) >= odd_part_limit)
    assert DTYPES[name].exact_up_to == first_rounded - 1


@pytest.mark.parametrize("dtype", NUMERIC)
@pytest.mark.parametrize("num_ranks", [1, 3, 64, 2048])
def test_sums_are_exact_in_any_order(dtype: str, num_ranks: int) -> None:
    pattern = DataPattern(dtype, num_ranks, CPU, "sum")
    values = [pattern.values(rank, 0, COUNT).double() for rank in range(num_ranks)]
    terms = torch.stack(values)
    total = terms.sum(dim=0)
    # No term is negative and the total is exact, so every partial sum is.
    assert torch.equal(terms, terms.round())
    assert int(terms.min()) >= 0
    assert int(total.max()) <= DTYPES[dtype].exact_up_to
    assert pattern.reduced(0, COUNT).dtype == dtype_of(dtype)
    assert torch.equal(pattern.reduced(0, COUNT).double(), total)


def assert_all_wrong_results_detected(dtype: str, num_ranks: int) -> None:
    counts = caught(dtype, num_ranks)
    assert counts.keys() >= KINDS_OF_WRONG
    for kind, (detected, tried) in counts.items():
        assert detected == tried, (dtype, num_ranks, kind)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_every_wrong_result_is_detected(dtype: str, num_ranks: int) -> None:
    assert_all_wrong_results_detected(dtype, num_ranks)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
def test_wrong_results_of_96_ranks_are_detected(dtype: str) -> None:
    assert_all_wrong_results_detected(dtype, 96)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
@pytest.mark.parametrize("num_ranks", [64, 128])
def test_wrong_results_of_many_ranks_are_detected(dtype: str, num_ranks: int) -> None:
    assert_all_wrong_results_detected(dtype, num_ranks)


@pytest.mark.full
def test_wrong_results_of_1024_ranks_are_detected() -> None:
    assert_all_wrong_results_detected("bfloat16", 1024)


@pytest.mark.parametrize("dtype", ["float32", "bool"])
@pytest.mark.parametrize("length", [1000, TABLE_LENGTH - 1, TABLE_LENGTH, 2 * TABLE_LENGTH])
def test_chunks_differ_at_any_length(dtype: str, length: int) -> None:
    """Values repeat after the length of a table, so chunks of that length could be the same."""
    moved = DataPattern(dtype, 1024, CPU)
    reduced = DataPattern(dtype, 3, CPU, "max")
    starts = [index * length for index in (0, 1, 2, 127)]
    chunks = [moved.values(0, start, 1152) for start in starts]
    chunks += [moved.values(1, start, 1152) for start in starts]
    results = [reduced.reduced(start, 1152) for start in starts]
    for tensors in (chunks, results):
        for first, second in combinations(tensors, 2):
            assert count_wrong(first, second) > 0


@pytest.mark.parametrize("dtype", NUMERIC)
def test_poison_is_always_wrong(dtype: str) -> None:
    poisoned = poison(torch.empty(COUNT, dtype=dtype_of(dtype)))
    for num_ranks in (1, 2, 64):
        moved = DataPattern(dtype, num_ranks, CPU).values(num_ranks - 1, 0, COUNT)
        reduced = DataPattern(dtype, num_ranks, CPU, "sum").reduced(0, COUNT)
        assert count_wrong(poisoned, moved) == COUNT
        assert count_wrong(poisoned, reduced) == COUNT
    if dtype_of(dtype).is_floating_point:
        assert count_wrong(poisoned, poisoned) == COUNT


@pytest.mark.parametrize(("value", "wrong"), [(2.0, 0), (2.01, 4)])
def test_operation_check_counts_wrong_elements(value: float, wrong: int) -> None:
    operation = filling(value)
    operation.reset()
    assert operation.check() == 4
    operation.step()
    assert operation.check() == wrong


def test_operation_issue_returns_works() -> None:
    work = cast(dist.Work, object())
    call = mock.Mock(side_effect=[work, [work, work], None])
    operation = replace(filling(), call=call)
    assert operation.issue() == [work]
    assert operation.issue() == [work, work]
    assert operation.issue() == []
    call.assert_called_with(async_op=True)
