"""The matrix product is right, and its check sees where it is not."""

from typing import cast

import pytest
import torch

from bench.compute import Gemm, gemm
from bench.world import World

CPU = torch.device("cpu")


@pytest.mark.parametrize("m", [1, 2, 33, 512])
def test_a_product_is_right_after_a_step_and_all_wrong_before_it(m: int) -> None:
    subject = Gemm(m, CPU)
    subject.reset()
    assert subject.check() == 2 * m
    subject.step()
    assert subject.check() == 0
    subject.reset()
    assert subject.check() == 2 * m


def test_every_element_of_the_product_is_that_of_whole_numbers() -> None:
    subject = Gemm(64, CPU)
    subject.step()
    assert torch.equal(subject._c.long(), subject._a.long() @ subject._b.long())
    assert float(subject._c.std()) > 1


@pytest.mark.parametrize(("row", "column"), [(0, 3), (5, -1)])
def test_one_wrong_element_of_the_first_row_or_last_column_is_seen(row: int, column: int) -> None:
    subject = Gemm(16, CPU)
    subject.step()
    subject._c[row, column] += 1
    assert subject.check() == 1


def test_a_product_with_swapped_factors_is_seen() -> None:
    subject = Gemm(16, CPU)
    torch.mm(subject._b, subject._a, out=subject._c)
    assert subject.check() > 0


def test_a_step_is_two_operations_for_each_of_three_dimensions() -> None:
    class Place:
        device = CPU

    description = gemm(cast(World, Place()), m=10).describe()
    (work,) = description.work
    assert (work.name, work.amount, work.unit) == ("flops", 2000, "FLOP/s")
    assert description.details == {"m": 10, "dtype": "float32"}
