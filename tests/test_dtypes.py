"""The table of element types, against numpy where numpy has them and against the formats' definitions elsewhere."""

import numpy as np
import pytest

from bench.dtypes import DTYPES, supports

NUMPY_HAS = ["float64", "float32", "float16", "int64", "int32", "int8", "uint8"]
# stored mantissa bits: bfloat16 (Intel 2018), FP8 formats (Micikevicius et al., arXiv 2209.05433)
MANTISSA_BITS = {"bfloat16": 7, "float8_e4m3fn": 3, "float8_e5m2": 2}


def test_every_type_is_held_against_an_oracle() -> None:
    assert set(DTYPES) == {*NUMPY_HAS, *MANTISSA_BITS, "bool"}


@pytest.mark.parametrize("name", NUMPY_HAS)
def test_itemsize_is_numpys(name: str) -> None:
    assert DTYPES[name].itemsize == np.dtype(name).itemsize


@pytest.mark.parametrize(("name", "itemsize"), [("bfloat16", 2), ("float8_e4m3fn", 1), ("float8_e5m2", 1)])
def test_itemsize_of_what_numpy_lacks_is_in_the_name(name: str, itemsize: int) -> None:
    assert DTYPES[name].itemsize == itemsize


def test_a_bool_is_a_byte_and_exact_up_to_one() -> None:
    assert (DTYPES["bool"].itemsize, DTYPES["bool"].exact_up_to) == (1, 1)


@pytest.mark.parametrize("name", ["float64", "float32", "float16"])
def test_the_integer_after_the_exact_ones_is_the_first_that_rounds(name: str) -> None:
    limit = DTYPES[name].exact_up_to
    cast = np.dtype(name).type
    assert int(cast(limit)) == limit
    assert int(cast(limit - 1)) == limit - 1
    assert int(cast(limit + 1)) != limit + 1


@pytest.mark.parametrize("name", ["int64", "int32", "int8", "uint8"])
def test_an_integer_type_is_exact_to_its_end(name: str) -> None:
    assert DTYPES[name].exact_up_to == np.iinfo(name).max


@pytest.mark.parametrize("name", MANTISSA_BITS)
def test_a_short_float_is_exact_as_far_as_its_significand_has_bits(name: str) -> None:
    """An integer n is exact when its odd part fits into the mantissa and the bit before it."""
    odd_limit = 1 << (MANTISSA_BITS[name] + 1)
    first_rounded = next(n for n in range(1, 1 << 10) if n // (n & -n) >= odd_limit)
    assert DTYPES[name].exact_up_to == first_rounded - 1


@pytest.mark.parametrize("name", DTYPES)
def test_gloo_carries_all_but_float8_and_nccl_carries_all(name: str) -> None:
    assert supports("gloo", name) is not name.startswith("float8")
    assert supports("nccl", name)
