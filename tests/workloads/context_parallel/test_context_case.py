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
    balance,
    balance_limit,
    causal_tiles,
    parse_attention,
    positions,
    split_rows,
    ulysses_of,
)
from tests.support.refusals import usage_error
from tests.support.training_steps import DEFINITION_BY_NAME


def make_plan(method: str, mask: str = "causal", sequence: int = 64, ranks: int = 4) -> ContextPlan:
    ulysses = ulysses_of(method, 0, ranks)
    return ContextPlan(method=method, mask=mask, sequence=sequence, ranks=ranks, ulysses=ulysses)


@pytest.mark.parametrize(
    ("order", "tokens_by_rank"),
    [
        ("contiguous", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("striped", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("zigzag", [[0, 1, 6, 7], [2, 3, 4, 5]]),
    ],
)
def test_positions_of_ranks(order: str, tokens_by_rank: list[list[int]]) -> None:
    assert [positions(order, 8, rank, 2) for rank in range(2)] == tokens_by_rank


def cover(tiles: Sequence[Tile]) -> list[tuple[int, int]]:
    """Return all pairs of a row and a column that the tiles compute."""
    pairs = []
    for tile in tiles:
        for offset, row in enumerate(range(tile.rows.start, tile.rows.stop)):
            stop = tile.columns.start + offset + 1 if tile.causal else tile.columns.stop
            pairs += [(row, column) for column in range(tile.columns.start, stop)]
    return sorted(pairs)


@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        ([0, 1, 2, 3], [0, 1, 2, 3]),
        ([1, 5, 6, 20], [0, 2, 5, 6, 7]),
        ([3, 9], [10, 11]),
        ([], [1, 2]),
    ],
)
def test_tiles_cover_each_allowed_pair_once(queries: list[int], keys: list[int]) -> None:
    tiles = causal_tiles(queries, keys)
    expected = [
        (row, column)
        for row, query in enumerate(queries)
        for column, key in enumerate(keys)
        if key <= query
    ]
    assert cover(tiles) == expected
    for row in range(len(queries)):
        before, after = split_rows(tiles, row)
        assert cover([*before, *after]) == expected
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
            assert len(cover(plan.tiles(rank, step))) == plan.pairs(rank, step)
            num_pairs += plan.pairs(rank, step)
    assert num_pairs == plan.all_pairs() == (64 * 64 if mask == "full" else 64 * 65 // 2)


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [([[4, 4], [4, 4]], 1), ([[4, 0], [4, 4]], 0.75), ([[4, 0], [0, 4]], 0.5)],
)
def test_balance_is_mean_over_slowest(pairs: list[list[int]], expected: float) -> None:
    assert balance(pairs) == expected


@pytest.mark.parametrize(("ranks", "limit"), [(2, 2 / 3), (4, 4 / 7), (16, 16 / 31)])
def test_balance_limit_of_contiguous_ring(ranks: int, limit: float) -> None:
    assert balance_limit("ring", ranks) == pytest.approx(limit)
    plan = make_plan("ring", sequence=256 * ranks, ranks=ranks)
    assert plan.load_balance() == pytest.approx(limit, abs=2e-3)


@pytest.mark.parametrize("method", ["zigzag", "allgather_kv", "ulysses", "usp"])
def test_balanced_methods(method: str) -> None:
    assert make_plan(method).load_balance() == balance_limit(method, 4) == 1


def refuse(ranks: int, **params: Value) -> str | None:
    sizes: dict[str, Value] = {"hidden": 48, "heads": 6, "kv_heads": 2, "sequence": 48}
    world = WorldSpec(nproc=ranks, backend="nccl", device="cuda")
    return DEFINITION_BY_NAME["cp"].refuse(
        {"shape": "tiny", "method": "ring", **sizes, **params}, world
    )


@pytest.mark.parametrize(
    ("ranks", "params", "message"),
    [
        (3, {"method": "zigzag", "sequence": 129}, "sequence(129) % (2 * cp(3)) != 0"),
        (5, {"method": "ring"}, "sequence(48) % cp(5) != 0"),
        (5, {"method": "striped"}, "sequence(48) % cp(5) != 0"),
        (4, {"method": "allgather_kv", "sequence": 20}, "sequence(20) % (2 * cp(4)) != 0"),
        (4, {"method": "ulysses"}, "heads(6) % ulysses(4) != 0"),
        (3, {"method": "ulysses"}, "kv_heads(2) % ulysses(3) != 0"),
        (4, {"method": "usp", "ulysses": 3}, "ulysses(3) * ring(1) != cp(4)"),
        (4, {"method": "ring", "ulysses": 2}, "ulysses = 2"),
        (2, {"hidden": 50}, "hidden(50) % heads(6) != 0"),
        (2, {"attention": "fast"}, "attention = 'fast'"),
        (2, {"attention": "timed:5 apples"}, "'5 apples'"),
        (2, {"attention": "timed:5ms"}, "compute = real"),
    ],
)
def test_context_case_refuses(ranks: int, params: dict[str, Value], message: str) -> None:
    assert message in str(refuse(ranks, **params))


@pytest.mark.parametrize(
    ("ranks", "params"),
    [
        (3, {"method": "ring"}),
        (2, {"method": "ulysses"}),
        (6, {"method": "usp", "sequence": 54, "ulysses": 2}),
        (2, {"attention": "timed:5ms", "compute": "timed:5ms"}),
    ],
)
def test_context_case_accepts(ranks: int, params: dict[str, Value]) -> None:
    assert refuse(ranks, **params) is None


def test_attention_is_real_or_timed() -> None:
    assert parse_attention("real") is None
    assert parse_attention("timed:20ms") == 0.02
    assert "real or timed:DURATION" in usage_error(parse_attention, "fast")
