"""Pairs and rings of ranks exchange data with the right partner."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from parbench.bench.operations.data_pattern import DataPattern, count_wrong
from parbench.bench.operations.p2p import pairwise, sendrecv
from parbench.bench.world.world import World
from tests.support.ranks import Ranks

THIS_MODULE = "tests.bench.operations.test_p2p"
# Two ranks that both sent first would wait for each other: no socket buffers as much.
UNBUFFERED = 8 << 20


def find_sender(output: torch.Tensor, world: World) -> int | None:
    """Return the rank whose float32 data the output contains, None if no single rank's."""
    pattern = DataPattern("float32", world.size, world.device)
    senders = []
    for rank in range(world.size):
        if count_wrong(output, pattern.compute_values(rank, 0, len(output))) == 0:
            senders.append(rank)
    return senders[0] if len(senders) == 1 else None


def find_ring_sender(world: World, size_bytes: int) -> int | None:
    """Return the rank that this rank receives from in a ring, after two steps in a row."""
    ring = sendrecv(world, size_bytes=size_bytes, dtype="float32")
    ring.reset()
    ring.step()
    ring.step()
    assert ring.check() == 0
    return find_sender(ring.output, world)


def test_ring_receives_from_previous_rank(two_ranks: Ranks, four_ranks: Ranks) -> None:
    target = f"{THIS_MODULE}:find_ring_sender"
    assert two_ranks.call(target, size_bytes=UNBUFFERED) == [1, 0]
    assert four_ranks.call(target, size_bytes=4096) == [3, 0, 1, 2]


def run_round(world: World, **params: Any) -> tuple[int | None, int, str]:
    """Return the rank's sender, its wrong elements before a step, and all pairs."""
    operation = pairwise(world, dtype="float32", **params)
    operation.reset()
    wrong = operation.check()
    operation.step()
    assert operation.check() == 0
    sender = find_sender(operation.output, world)
    return sender, wrong, operation.describe().details["pairs"]


@pytest.mark.parametrize("direction", ["at_once", "in_turn"])
@pytest.mark.parametrize(
    ("params", "senders", "pairs"),
    [
        ({"round": 0, "size_bytes": UNBUFFERED}, [3, 2, 1, 0], "0-3 1-2"),
        ({"round": 1, "size_bytes": 4096}, [2, 3, 0, 1], "0-2 1-3"),
        ({"pairs": "1-3", "size_bytes": 4096}, [None, 3, None, 1], "1-3"),
    ],
)
def test_pairs_of_a_round_exchange_data(
    four_ranks: Ranks,
    params: dict[str, Any],
    senders: list[int | None],
    pairs: str,
    direction: str,
) -> None:
    results = four_ranks.call(f"{THIS_MODULE}:run_round", direction=direction, **params)
    num_elements = params["size_bytes"] // 4
    for result, sender in zip(results, senders, strict=True):
        wrong = 0 if sender is None else num_elements
        assert result == (sender, wrong, pairs)


@pytest.mark.parametrize(("direction", "num_hops"), [("at_once", 1), ("in_turn", 2)])
def test_in_turn_time_is_half_the_round_trip(direction: str, num_hops: int) -> None:
    world = cast(World, SimpleNamespace(size=2, rank=0, device=torch.device("cpu"), group=None))
    operation = pairwise(world, size_bytes=64, dtype="float32", direction=direction)
    assert operation.describe().hops == num_hops
