"""A copy is right, its check sees where it is not, and its rate counts each byte once."""

from typing import cast

import pytest
import torch

from bench.memory import copy
from bench.world import World


class Place:
    device = torch.device("cpu")
    rank = 1
    size = 2


WORLD = cast(World, Place())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
@pytest.mark.parametrize("size_bytes", [0, 4, 4 * 65_521])
def test_a_copy_is_right_after_a_step_alone(dtype: str, size_bytes: int) -> None:
    subject = copy(WORLD, size_bytes=size_bytes, dtype=dtype)
    subject.reset()
    assert (subject.check() > 0) == (size_bytes > 0)
    subject.step()
    assert subject.check() == 0


def test_one_wrong_element_is_seen() -> None:
    subject = copy(WORLD, size_bytes=4096, dtype="float32")
    subject.step()
    subject.corrupt()
    assert subject.check() == 1


def test_the_rate_counts_each_byte_once() -> None:
    description = copy(WORLD, size_bytes=4096, dtype="float32").describe()
    (work,) = description.work
    assert (work.name, work.amount, work.unit) == ("algbw", 4096, "B/s")
    assert (description.details["read_bytes"], description.details["written_bytes"]) == (4096, 4096)
