"""Coded data is exact and differs where it could be swapped; an operation restores, calls and checks."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from typing import cast
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from parbench.bench.operations.local import Gemm, copy, from_device, gemm, to_device
from parbench.bench.operations.operation import DataPattern, count_wrong, dtype_of, poison
from parbench.bench.plan.catalogue import DTYPES, PRODUCTS
from parbench.bench.world.world import World
from tests.studies.data_coding import RANKS, caught
from tests.support.filling import filling

NUMERIC = [name for name in DTYPES if name != "bool"]  # a bool is only moved, or joined by and, or
NUMPY_HAS = ["float64", "float32", "float16", "int64", "int32", "int8", "uint8"]
# stored mantissa bits: bfloat16 (Intel 2018), FP8 formats (Micikevicius et al., arXiv 2209.05433)
MANTISSA_BITS = {"bfloat16": 7, "float8_e4m3fn": 3, "float8_e5m2": 2}
CPU = torch.device("cpu")
COUNT = 97
SUMMED = [1, 2, 3, 8, 64, 300, 2048]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Thousands of short calls: on a busy machine threads that wait for one another make them ten times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def integers(code: DataPattern, rank: int, start: int = 0, count: int = COUNT) -> torch.Tensor:
    """Return a rank's elements as whole numbers; the cast must lose nothing."""
    values = code.values(rank, start, count).double()
    assert torch.equal(values, values.round())
    return values.long()


def test_a_type_has_the_size_of_numpys_and_torchs_of_its_name() -> None:
    assert set(DTYPES) == {*NUMPY_HAS, *MANTISSA_BITS, "bool"}
    for name, dtype in DTYPES.items():
        assert str(dtype_of(name)) == f"torch.{name}"
        assert dtype_of(name).itemsize == dtype.itemsize, name
        assert name not in NUMPY_HAS or np.dtype(name).itemsize == dtype.itemsize, name
    with pytest.raises(AssertionError, match="matmul"):
        dtype_of("matmul")


def test_the_integer_after_the_exact_ones_is_the_first_that_rounds() -> None:
    assert DTYPES["bool"].exact_up_to == 1
    for name in ("float64", "float32", "float16"):
        limit, cast = DTYPES[name].exact_up_to, np.dtype(name).type
        assert (int(cast(limit)), int(cast(limit - 1))) == (limit, limit - 1), name
        assert int(cast(limit + 1)) != limit + 1, name
    for name in ("int64", "int32", "int8", "uint8"):
        assert DTYPES[name].exact_up_to == np.iinfo(name).max, name
    # n is exact when its odd part fits into the mantissa and the bit before it
    for name, bits in MANTISSA_BITS.items():
        first_rounded = next(n for n in range(1, 1 << 10) if n // (n & -n) >= 1 << (bits + 1))
        assert DTYPES[name].exact_up_to == first_rounded - 1, name


def test_sums_are_exact_in_any_order_of_ranks_and_every_rank_and_index_counts() -> None:
    """No term is negative and the whole sum is exact, so every partial sum is."""
    for dtype, num_summed in product(NUMERIC, SUMMED):
        code = DataPattern(dtype, num_summed, CPU, "sum")
        terms = torch.stack([integers(code, rank) for rank in range(num_summed)])
        total = terms.sum(dim=0)
        assert int(terms.min()) >= 0, (dtype, num_summed)
        assert int(total.max()) <= DTYPES[dtype].exact_up_to, (dtype, num_summed)
        assert code.reduced(0, COUNT).dtype == dtype_of(dtype)
        assert torch.equal(code.reduced(0, COUNT).double().long(), total), (dtype, num_summed)
        first, last = (integers(code, rank, count=20_000) for rank in (0, num_summed - 1))
        assert len({*last.tolist()} - {0}) >= 3, (dtype, num_summed)
        assert num_summed == 1 or not torch.equal(first, last), (
            "a rank that is counted for another changes the sums"
        )
        assert int(code.reduced(0, 20_000 // num_summed).double().min()) > 0, (dtype, num_summed)


def test_every_reduction_of_coded_values_is_exact() -> None:
    for dtype, num_ranks in product(
        ["float32", "float16", "bfloat16", "int8", "int64", "bool"], [2, 3, 8, 64]
    ):
        for redop in (
            ("avg", "min", "max", "product")
            if dtype.endswith(("16", "32"))
            else ("min", "max", "product")
        ):
            code = DataPattern(dtype, num_ranks, CPU, redop)
            values = torch.stack([code.values(rank, 5, 3000) for rank in range(num_ranks)]).double()
            joined = {
                "avg": (values.sum(dim=0) / num_ranks).to(dtype_of(dtype)).double(),
                "min": values.min(dim=0).values,
                "max": values.max(dim=0).values,
                "product": values.prod(dim=0),
            }[redop]
            assert torch.equal(code.reduced(5, 3000).double(), joined), (dtype, num_ranks, redop)


def test_every_kind_of_wrong_is_seen_in_every_type_and_reduction() -> None:
    for n in RANKS:
        for dtype in (
            DTYPES
            if n in (2, 3, 8, 96)
            else ("float32", "bfloat16", "bool")
            if n < 1000
            else ("bfloat16",)
        ):
            found = caught(dtype, n)
            assert found.keys() >= {
                "dropped rank",
                "dropped ranks",
                "swapped chunks",
                "swapped results",
                "wrong root",
            }
            assert all(seen == tried for seen, tried in found.values()), (dtype, n, found)


def test_52_of_96_ranks_that_drop_out_are_seen_in_64_elements() -> None:
    for redop, join in (("min", torch.amin), ("max", torch.amax), ("avg", torch.sum)):
        code = DataPattern("float32", 96, CPU, redop)
        held = torch.stack([code.values(rank, 0, 64) for rank in range(96)])
        for first in range(96):
            kept = [(first + offset) % 96 for offset in range(44)]
            assert not torch.equal(join(held[kept], 0), join(held, 0)), (redop, first)


def test_chunks_differ_whatever_their_length_and_where_they_begin() -> None:
    """Also those of a table's length, a prime, and its multiples, at which the values would repeat."""
    for dtype, length in product(["float32", "bool"], [1000, 65_520, 65_521, 2 * 65_521]):
        moved, joined = DataPattern(dtype, 1024, CPU), DataPattern(dtype, 3, CPU, "max")
        starts = [index * length for index in (0, 1, 2, 127, 1023)]
        chunks = [moved.values(rank, start, 1152) for rank in (0, 1) for start in starts]
        results = [joined.reduced(start, 1152) for start in starts]
        for alike in (chunks, results):
            assert all(count_wrong(a, b) for a, b in combinations(alike, 2)), (dtype, length)


def test_single_elements_differ_among_ranks_and_chunks_while_the_type_has_enough_values() -> None:
    for dtype, n in (
        ("float32", 1024),
        ("int64", 1024),
        ("float16", 32),
        ("bfloat16", 16),
        ("float8_e4m3fn", 4),
    ):
        code = DataPattern(dtype, n, CPU)
        held = torch.stack([code.values(rank, 0, n) for rank in range(n)]).double()
        assert len(set(held.flatten().tolist())) == n * n, dtype


def test_a_part_is_a_window_of_the_whole_whatever_was_drawn_before() -> None:
    for dtype, start, num_summed in product(
        ["float32", "int8"], [1, 4093, 65_521, 1_000_003], [1, 300]
    ):
        n, redop = max(num_summed, 6), "" if num_summed == 1 else "sum"
        whole = DataPattern(dtype, n, CPU, redop).values(5, 0, start + COUNT)
        torch.rand(3)
        code = DataPattern(dtype, n, CPU, redop)
        assert torch.equal(code.values(5, start, COUNT), whole[start:]), (dtype, start, num_summed)
        if redop:
            assert torch.equal(code.reduced(start, COUNT), code.reduced(start - 1, COUNT + 1)[1:])


def test_poison_is_never_a_sum_nor_a_value_that_is_only_moved_and_not_a_number_is_always_wrong() -> (
    None
):
    for dtype in NUMERIC:
        bad = torch.empty(COUNT, dtype=dtype_of(dtype))
        poison(bad)
        for num_summed in (1, 2, 64):
            assert (
                count_wrong(bad, DataPattern(dtype, num_summed, CPU, "sum").reduced(0, COUNT))
                == COUNT
            ), (
                dtype,
                num_summed,
            )
            assert (
                count_wrong(
                    bad, DataPattern(dtype, num_summed, CPU).values(num_summed - 1, 0, COUNT)
                )
                == COUNT
            ), dtype
        if dtype.startswith(("float", "bfloat")):
            assert bad.double().isnan().all(), dtype
            assert count_wrong(bad, bad) == COUNT, dtype


class Place:
    """What a benchmark of one rank knows of the world."""

    device = CPU
    rank = 1
    size = 2


WORLD = cast(World, Place())


def test_a_small_difference_is_wrong_and_poison_always_is() -> None:
    for found, wrong in ((2.0, 0), (2.01, 4)):
        operation = filling(found)
        operation.reset()
        assert operation.check() == 4
        operation.step()
        assert operation.check() == wrong, found
    assert operation.describe().headline == "here"


def test_what_was_issued_is_what_to_wait_for() -> None:
    work = cast(dist.Work, object())
    for answer, waits in ((work, [work]), ([work, work], [work, work]), (None, []), ([], [])):
        call = mock.Mock(return_value=answer)
        assert replace(filling(), call=call).issue() == waits
        call.assert_called_once_with(async_op=True)


def test_a_copy_is_right_after_a_step_alone_and_one_wrong_element_is_seen() -> None:
    for dtype in ("float32", "bfloat16", "int8", "bool"):
        for size_bytes in (0, 4, 4 * 65_521):
            benchmark = copy(WORLD, size_bytes=size_bytes, dtype=dtype)
            benchmark.reset()
            assert (benchmark.check() > 0) == (size_bytes > 0), (dtype, size_bytes)
            benchmark.step()
            assert benchmark.check() == 0, (dtype, size_bytes)
    benchmark = copy(WORLD, size_bytes=4096, dtype="float32")
    benchmark.step()
    benchmark.corrupt()
    assert benchmark.check() == 1
    description = benchmark.describe()
    assert [(work.name, work.amount) for work in description.work] == [("algbw", 4096)]
    assert (description.details["read_bytes"], description.details["written_bytes"]) == (4096, 4096)


ALONE = mock.Mock(device=CPU, seed=0, rank=0, size=1)


@pytest.mark.parametrize("dtype", PRODUCTS)
def test_a_product_is_right_after_a_step_and_all_wrong_before_it(dtype: str) -> None:
    for m in (1, 9, 33, 512):
        benchmark = Gemm(ALONE, m=m, dtype=dtype)
        for _ in range(2):
            benchmark.reset()
            assert benchmark.check() == m * m
            benchmark.step()
            assert benchmark.check() == 0
        exact = benchmark._a.double() @ benchmark._b.double()
        assert torch.equal(benchmark._c.double(), exact)
        so_far = (benchmark._a.double()[:5, :, None] * benchmark._b.double()[:, :7]).cumsum(1)
        assert float(so_far.abs().max()) <= DTYPES["bfloat16"].exact_up_to, (
            "exact in any splitting, too"
        )
        assert m == 1 or float(exact.std()) > 1
    other = Gemm(mock.Mock(device=CPU, seed=1), m=33, dtype=dtype)
    assert not torch.equal(other._reference, Gemm(ALONE, m=33, dtype=dtype)._reference)


def test_a_wrong_element_of_any_product_and_swapped_factors_are_seen() -> None:
    benchmark = Gemm(ALONE, m=16)
    for row, column in ((0, 3), (5, -1)):
        for _ in range(3):
            benchmark.reset()
            benchmark.step()
        benchmark._c[row, column] += 1
        for _ in range(2):
            benchmark.reset()
            benchmark.step()
        assert benchmark.check() == 1, "though later products were right"
        assert benchmark.check() == 0
    torch.mm(benchmark._b, benchmark._a, out=benchmark._c)
    assert benchmark.check() > 0
    benchmark.reset()
    benchmark.step()
    benchmark.corrupt()
    assert benchmark.check() == 1
    description = gemm(ALONE, m=10, dtype="bfloat16").describe()
    assert [(work.name, work.amount) for work in description.work] == [("flops", 2000)]
    assert description.details == {"m": 10, "dtype": "bfloat16"}


def test_copies_to_and_from_a_device_are_whole() -> None:
    for benchmark in (
        to_device(WORLD, size_bytes=4096, dtype="float32"),
        from_device(WORLD, size_bytes=4096, dtype="int8"),
    ):
        benchmark.reset()
        assert benchmark.check() > 0
        benchmark.step()
        assert benchmark.check() == 0
        benchmark.corrupt()
        assert benchmark.check() == 1
        assert [(work.name, work.amount) for work in benchmark.describe().work] == [("algbw", 4096)]
