"""Tokens are distributed to ranks, tiles cover the pairs of the mask, and bad sizes are refused."""

from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from parbench.bench.text import UserError
from parbench.workloads.context_parallel.context_methods import (
    CONTEXT_METHODS,
)
from parbench.workloads.context_parallel.sequence_split import split_sequence
from parbench.workloads.context_parallel.tiles import Tile
from parbench.workloads.model.shapes import SHAPES
from tests.support.workloads.cp_ranks import list_pairs

SHAPE = replace(SHAPES["tiny"], hidden=48, heads=6, kv_heads=2, sequence=48)


def test_tokens_of_two_ranks() -> None:
    shape = replace(SHAPE, sequence=8)
    tokens = {
        name: [split_sequence(name, shape, ranks=2).list_tokens(rank) for rank in range(2)]
        for name in ("ring", "zigzag")
    }
    assert tokens["ring"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert tokens["zigzag"] == [[0, 1, 6, 7], [2, 3, 4, 5]]


@pytest.mark.parametrize("method", CONTEXT_METHODS)
def test_tiles_cover_each_allowed_pair_once(method: str) -> None:
    split = split_sequence(method, SHAPES["tiny"], ranks=4)
    tokens = [split.list_tokens(rank) for rank in range(4)]
    assert [len(part) for part in tokens] == [16] * 4
    assert sorted(chain(*tokens)) == list(range(64))
    num_pairs = 0
    for rank in range(0, 4, split.ulysses):
        for tiles in split.list_tiles(rank):
            pairs = list_pairs(tiles)
            assert len(pairs) == len(set(pairs))
            num_pairs += len(pairs)
    assert num_pairs == 64 * 65 / 2


def test_rows_of_a_later_part_are_one_rectangle() -> None:
    """The later part of a zigzag attends to the first chunk of the earlier one."""
    split = split_sequence("zigzag", replace(SHAPE, sequence=8), ranks=2)
    assert split.list_tiles(1)[1] == [Tile(slice(0, 4), slice(0, 2))]


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("zigzag", {"ranks": 16}, "sequence(48) % (2 * cp(16)) != 0"),
        ("ring", {"ranks": 5}, "sequence(48) % cp(5) != 0"),
        ("allgather_kv", {"ranks": 16}, "sequence(48) % (2 * cp(16)) != 0"),
        ("ulysses", {"ranks": 4}, "heads(6) / tp(1) % cp(4) != 0"),
        ("ulysses", {"ranks": 3}, "kv_heads(2) / tp(1) % cp(3) != 0"),
        ("ulysses", {"ranks": 2, "tp": 2}, "heads(6) / tp(2) % cp(2) != 0"),
        ("usp", {"ranks": 4, "ulysses": 3}, "cp(4) % ulysses(3) != 0"),
        (
            "ring",
            {"ranks": 4, "ulysses": 2},
            "ulysses = 2 is not possible with cp_method = ring",
        ),
        ("zigzagging", {"ranks": 2}, "zigzag"),
    ],
)
def test_split_refuses(method: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        split_sequence(method, SHAPE, **options)
    assert message in str(error.value)
