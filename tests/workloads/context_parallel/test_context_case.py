"""Tokens are distributed to ranks, tiles cover the pairs of the mask, and bad sizes are refused."""

from collections.abc import Sequence
from itertools import chain

import pytest

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.params import Value
from parbench.workloads.context_parallel.context_case import (
    MASKS,
    METHODS,
    ContextPlan,
    Tile,
    causal_tiles,
    positions,
    split_rows,
    ulysses_of,
)
from tests.support.training_steps import DEFINITION_BY_NAME

Params = dict[str, Value]


def make_plan(
    method: str, mask: str = "causal", sequence: int = 64, ranks: int = 4
) -> ContextPlan:
    ulysses = ulysses_of(method, 0, ranks)
    return ContextPlan(
        method=method, mask=mask, sequence=sequence, ranks=ranks, ulysses=ulysses
    )


@pytest.mark.parametrize(
    ("order", "first", "second"),
    [
        ("contiguous", [0, 1, 2, 3], [4, 5, 6, 7]),
        ("striped", [0, 2, 4, 6], [1, 3, 5, 7]),
        ("zigzag", [0, 1, 6, 7], [2, 3, 4, 5]),
    ],
)
def test_positions_of_two_ranks(order: str, first: list[int], second: list[int]) -> None:
    assert positions(order, 8, 0, 2) == first
    assert positions(order, 8, 1, 2) == second


def list_pairs(tiles: Sequence[Tile]) -> list[tuple[int, int]]:
    """Return all pairs of a row and a column that the tiles compute."""
    pairs = []
    for tile in tiles:
        first_column = tile.columns.start
        for offset, row in enumerate(range(tile.rows.start, tile.rows.stop)):
            stop = first_column + offset + 1 if tile.causal else tile.columns.stop
            pairs += [(row, column) for column in range(first_column, stop)]
    return sorted(pairs)


@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        ([0, 1, 2, 3], [0, 1, 2, 3]),
        ([1, 5, 6, 20], [0, 2, 5, 6, 7]),
        ([3, 9], [10, 11]),
    ],
)
def test_tiles_cover_each_allowed_pair_once(queries: list[int], keys: list[int]) -> None:
    tiles = causal_tiles(queries, keys)
    expected = []
    for row, query in enumerate(queries):
        expected += [(row, column) for column, key in enumerate(keys) if key <= query]
    assert list_pairs(tiles) == expected
    for row in range(len(queries)):
        before, after = split_rows(tiles, row)
        assert list_pairs([*before, *after]) == expected
        assert all(tile.rows.stop <= row for tile in before)
        assert all(tile.rows.start >= row for tile in after)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("method", METHODS)
def test_plan_covers_tokens_and_pairs(method: str, mask: str) -> None:
    plan = make_plan(method, mask)
    tokens = [plan.tokens(rank) for rank in range(4)]
    assert [len(part) for part in tokens] == [16] * 4
    assert sorted(chain(*tokens)) == list(range(64))
    num_pairs = 0
    for rank in range(0, 4, plan.ulysses):
        for step in range(plan.num_steps):
            num_pairs += plan.pairs(rank, step)
            assert len(list_pairs(plan.tiles(rank, step))) == plan.pairs(rank, step)
    assert num_pairs == plan.all_pairs()
    assert num_pairs == (64 * 64 if mask == "full" else 64 * 65 // 2)


def refuse(ranks: int, params: Params) -> str | None:
    defaults: Params = {"shape": "tiny", "method": "ring"}
    sizes: Params = {"hidden": 48, "heads": 6, "kv_heads": 2, "sequence": 48}
    world = WorldSpec(nproc=ranks, backend="nccl", device="cuda")
    return DEFINITION_BY_NAME["cp"].refuse({**defaults, **sizes, **params}, world)


@pytest.mark.parametrize(
    ("ranks", "params", "message"),
    [
        (3, {"method": "zigzag", "sequence": 129}, "sequence(129) % (2 * cp(3)) != 0"),
        (5, {"method": "ring"}, "sequence(48) % cp(5) != 0"),
        (4, {"method": "allgather_kv", "sequence": 20}, "sequence(20) % (2 * cp(4)) != 0"),
        (4, {"method": "ulysses"}, "heads(6) % ulysses(4) != 0"),
        (3, {"method": "ulysses"}, "kv_heads(2) % ulysses(3) != 0"),
        (4, {"method": "usp", "ulysses": 3}, "ulysses(3) * ring(1) != cp(4)"),
        (2, {"attention": "timed:5 apples"}, "'5 apples'"),
        (2, {"attention": "timed:5ms"}, "compute = real"),
    ],
)
def test_context_case_refuses(ranks: int, params: Params, message: str) -> None:
    assert message in str(refuse(ranks, params))
