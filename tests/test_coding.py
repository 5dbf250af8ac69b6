"""Coded data is exact in every type, differs wherever it could be swapped, and poison is seen."""

from collections.abc import Iterator
from itertools import combinations

import pytest
import torch

from bench.coding import Code, count_wrong, dtype_of, poison
from bench.dtypes import DTYPES

NUMERIC = [name for name in DTYPES if name != "bool"]  # a bool is only moved, or joined by and, or

CPU = torch.device("cpu")
COUNT = 97
SUMMED = [1, 2, 3, 8, 64, 2048]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Thousands of short calls: on a busy machine threads that wait for one another make them ten times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def integers(code: Code, rank: int, start: int = 0, count: int = COUNT) -> torch.Tensor:
    """Return a rank's elements as whole numbers; the cast must lose nothing."""
    values = code.values(rank, start, count).double()
    assert torch.equal(values, values.round())
    return values.long()


@pytest.mark.parametrize("dtype", NUMERIC)
def test_a_name_is_torchs_type_of_the_declared_size(dtype: str) -> None:
    assert dtype_of(dtype).itemsize == DTYPES[dtype].itemsize
    assert str(dtype_of(dtype)) == f"torch.{dtype}"


def test_a_name_that_is_no_type_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="matmul"):
        dtype_of("matmul")


@pytest.mark.parametrize("num_summed", SUMMED)
@pytest.mark.parametrize("dtype", NUMERIC)
def test_sums_are_exact_in_any_order_of_ranks(dtype: str, num_summed: int) -> None:
    """No term is negative and the whole sum is exact, so every partial sum is."""
    code = Code(dtype, num_summed, CPU)
    terms = torch.stack([integers(code, rank) for rank in range(num_summed)])
    total = terms.sum(dim=0)
    assert int(terms.min()) >= 0
    assert int(total.max()) <= DTYPES[dtype].exact_up_to
    assert code.reduced(0, COUNT).dtype == dtype_of(dtype)
    assert torch.equal(code.reduced(0, COUNT).double().long(), total)


@pytest.mark.parametrize("dtype", NUMERIC)
def test_adding_in_the_type_itself_gives_the_sums(dtype: str) -> None:
    """Rounding after each addition, as a reduction does, and from the last rank to the first."""
    code = Code(dtype, 9, CPU)
    total = torch.zeros(COUNT, dtype=dtype_of(dtype))
    for rank in reversed(range(9)):
        term = code.values(rank, 0, COUNT)
        # float8 adds in no type of its own
        total = (total.float() + term.float()).to(total.dtype) if dtype.startswith("float8") else total + term
    assert count_wrong(total, code.reduced(0, COUNT)) == 0


@pytest.mark.parametrize("num_summed", SUMMED)
@pytest.mark.parametrize("dtype", NUMERIC)
def test_every_rank_has_at_least_three_codes_and_every_index_a_rank(dtype: str, num_summed: int) -> None:
    code = Code(dtype, num_summed, CPU)
    values = integers(code, num_summed - 1, count=20_000)
    assert len({*values.tolist()} - {0}) >= 3
    assert int(code.reduced(0, 20_000 // num_summed).double().min()) > 0


@pytest.mark.parametrize("num_summed", [2, 8, 300])
@pytest.mark.parametrize("dtype", NUMERIC)
def test_a_rank_that_is_lost_or_counted_for_another_changes_the_sums(dtype: str, num_summed: int) -> None:
    code = Code(dtype, num_summed, CPU)
    count = 4 * 1024
    total = code.reduced(0, count).double().long()
    first, last = integers(code, 0, count=count), integers(code, num_summed - 1, count=count)
    assert not torch.equal(total - last, total)
    assert not torch.equal(total - last + first, total)


@pytest.mark.parametrize("summed", [1, 8])
@pytest.mark.parametrize("dtype", NUMERIC)
def test_no_two_chunks_of_any_ranks_are_alike(dtype: str, summed: int) -> None:
    code = Code(dtype, summed, CPU)
    chunks = torch.cat([integers(code, rank, count=64 * 64).reshape(64, 64) for rank in range(8)])
    assert len({*map(tuple, chunks.tolist())}) == 8 * 64


@pytest.mark.parametrize("dtype", NUMERIC)
def test_no_two_chunks_of_the_sums_are_alike(dtype: str) -> None:
    sums = Code(dtype, 8, CPU).reduced(0, 64 * 64).double().reshape(64, 64)
    assert len({*map(tuple, sums.tolist())}) == 64


@pytest.mark.parametrize("length", [4093, 65_520, 1 << 16, 16 * 4093])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_chunks_as_long_as_a_pattern_differ_in_most_of_their_elements(dtype: str, length: int) -> None:
    """Where one pattern repeats from chunk to chunk the other tells them apart."""
    code = Code(dtype, 1, CPU)
    chunks = [code.values(rank, i * length, length) for rank in range(2) for i in range(3)]
    assert all(count_wrong(a, b) > 0.9 * length for a, b in combinations(chunks, 2))


@pytest.mark.parametrize("num_summed", [1, 300])
@pytest.mark.parametrize("start", [1, 4093, 65521, 1_000_003])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_part_is_a_window_of_the_whole(dtype: str, start: int, num_summed: int) -> None:
    code = Code(dtype, num_summed, CPU)
    whole = code.values(5, 0, start + COUNT)
    assert torch.equal(code.values(5, start, COUNT), whole[start:])
    assert torch.equal(code.reduced(start, COUNT), code.reduced(start - 1, COUNT + 1)[1:])


def test_codes_do_not_depend_on_when_or_after_what_they_are_made() -> None:
    first = Code("float32", 4, CPU).values(2, 10, COUNT)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(Code("float32", 4, CPU).values(2, 10, COUNT), first)
    torch.set_rng_state(state)


@pytest.mark.parametrize("num_summed", [1, 2, 64])
@pytest.mark.parametrize("dtype", NUMERIC)
def test_poison_is_never_a_sum_nor_a_value_that_is_only_moved(dtype: str, num_summed: int) -> None:
    bad = torch.empty(COUNT, dtype=dtype_of(dtype))
    poison(bad)
    assert count_wrong(bad, Code(dtype, num_summed, CPU).reduced(0, COUNT)) == COUNT
    assert count_wrong(bad, Code(dtype, 1, CPU).values(num_summed - 1, 0, COUNT)) == COUNT


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name.startswith(("float", "bfloat"))])
def test_not_a_number_is_wrong_even_where_it_is_expected(dtype: str) -> None:
    bad = torch.empty(3, dtype=dtype_of(dtype))
    poison(bad)
    assert bad.double().isnan().all()
    assert count_wrong(bad, bad) == 3


@pytest.mark.parametrize("dtype", NUMERIC)
def test_each_element_that_differs_is_counted_once(dtype: str) -> None:
    expected = Code(dtype, 1, CPU).values(0, 0, COUNT)
    found = expected.clone()
    assert count_wrong(found, expected) == 0
    for number, index in enumerate((0, 50, COUNT - 1), start=1):
        found[index] = 0
        assert count_wrong(found, expected) == number


@pytest.mark.parametrize("redop", ["avg", "min", "max", "product"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "int64", "bool"])
@pytest.mark.parametrize("num_ranks", [2, 3, 8, 64])
def test_every_reduction_of_coded_values_is_exact(dtype: str, redop: str, num_ranks: int) -> None:
    if redop == "avg" and not dtype.endswith(("16", "32")):
        return
    code = Code(dtype, num_ranks, torch.device("cpu"), redop)
    values = torch.stack([code.values(rank, 5, 3000) for rank in range(num_ranks)]).double()
    joined = {
        "avg": values.mean(dim=0),
        "min": values.min(dim=0).values,
        "max": values.max(dim=0).values,
        "product": values.prod(dim=0),
    }[redop]
    assert torch.equal(code.reduced(5, 3000).double(), joined)


@pytest.mark.parametrize("length", [0, 1, 65_520, 65_521, 65_522, 200_000])
def test_filling_a_buffer_writes_what_values_are(length: int) -> None:
    for num_ranks in (2, 2048):
        code = Code("bfloat16", num_ranks, torch.device("cpu"))
        out = torch.empty(length, dtype=torch.bfloat16)
        code.fill(out, rank=1, start=7)
        assert torch.equal(out, code.values(1, 7, length))
