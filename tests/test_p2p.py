"""The ring sends to the next rank and receives from the one before, at once, whatever the size."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks

from bench.coding import Code, count_wrong
from bench.errors import UserError
from bench.p2p import sendrecv
from bench.world import World


def received_from(world: World, size_bytes: int, dtype: str) -> int | None:
    """Return the rank whose data a step brings, None if it is nobody's."""
    ring = sendrecv(world, size_bytes=size_bytes, dtype=dtype)
    ring.reset()
    ring.step()
    code = Code(dtype, 1, world.device)
    senders = [
        rank for rank in range(world.size) if not count_wrong(ring.output, code.values(rank, 0, len(ring.output)))
    ]
    return senders[0] if len(senders) == 1 else None


def wrong_the_other_way(world: World) -> int:
    """Send the same data backwards round the ring; return how much the check finds wrong."""
    ring = sendrecv(world, size_bytes=4096, dtype="float32")
    mine = Code("float32", 1, world.device).values(world.rank, 0, 1024)

    def backwards() -> None:
        ops = [
            dist.P2POp(dist.isend, mine, group=world.group, group_peer=(world.rank - 1) % world.size),
            dist.P2POp(dist.irecv, ring.output, group=world.group, group_peer=(world.rank + 1) % world.size),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    mutant = replace(ring, call=backwards)
    mutant.reset()
    mutant.step()
    return mutant.check()


def wrong_after_each(world: World, steps: int, *, reset: bool) -> list[int]:
    """Return how much is wrong after each of several steps, reset before each or only before the first."""
    ring = sendrecv(world, size_bytes=4096, dtype="int8")
    ring.reset()
    wrong = []
    for _ in range(steps):
        if reset:
            ring.reset()
            assert ring.check() == len(ring.output)
        ring.step()
        wrong.append(ring.check())
    return wrong


def refused_alone(world: World) -> str:
    try:
        sendrecv(replace(world, rank=0, size=1), size_bytes=4096, dtype="float32")
    except UserError as error:
        return str(error)
    return ""


def moved(world: World, size_bytes: int) -> dict[str, object]:
    description = sendrecv(world, size_bytes=size_bytes, dtype="float32").describe()
    return {"headline": description.headline, **{work.name: (work.amount, work.unit) for work in description.work}}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
@pytest.mark.parametrize("size_bytes", [64, 8 << 20])
def test_data_come_from_the_neighbour_even_beyond_what_sockets_buffer(
    two_ranks: Ranks, size_bytes: int, dtype: str
) -> None:
    """Two ranks that send first and receive afterwards would wait for each other: 8 MiB is in no buffer."""
    assert two_ranks.call("test_p2p:received_from", size_bytes=size_bytes, dtype=dtype) == [1, 0]


@pytest.mark.parametrize("reset", [True, False])
def test_a_ring_may_be_stepped_again_with_or_without_a_reset(two_ranks: Ranks, reset: bool) -> None:
    """Pipelined mode steps many times from one reset."""
    assert two_ranks.call("test_p2p:wrong_after_each", steps=4, reset=reset) == [[0] * 4] * 2


def test_a_rank_alone_has_no_neighbour_and_is_refused_in_words(two_ranks: Ranks) -> None:
    [message, _] = two_ranks.call("test_p2p:refused_alone")
    assert message == "sendrecv needs a neighbour: size(1) < 2 ranks"


def test_bytes_that_go_both_ways_are_counted_once(two_ranks: Ranks) -> None:
    expected = {"headline": "time", "algbw": (4096, "B/s"), "busbw": (4096, "B/s")}
    assert two_ranks.call("test_p2p:moved", size_bytes=4096) == [expected, expected]


@pytest.mark.slow
def test_with_three_ranks_only_one_way_round_is_right() -> None:
    with Ranks(3) as ranks:
        assert ranks.call("test_p2p:received_from", size_bytes=4096, dtype="float32") == [2, 0, 1]
        assert min(ranks.call("test_p2p:wrong_the_other_way")) > 900


def test_the_oracle_of_these_tests_tells_ranks_apart() -> None:
    code = Code("uint8", 1, torch.device("cpu"))
    assert count_wrong(code.values(0, 0, 64), code.values(1, 0, 64)) > 0
