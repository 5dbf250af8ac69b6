"""The ring sends to the next rank and receives from the one before, at once, whatever the size."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks

from bench.coding import Code, count_wrong
from bench.errors import UserError
from bench.p2p import round_of_pairs, sendrecv
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


def met(
    world: World, pairs: str, index: int = 0, size_bytes: int = 4096, ways: str = "at_once"
) -> tuple[int | None, int, int]:
    """Return whose data a round brings, None if nobody's, and how much the check finds wrong before and after."""
    operation = round_of_pairs(world, size_bytes=size_bytes, dtype="float32", round=index, pairs=pairs, ways=ways)
    operation.reset()
    before = operation.check()
    operation.step()
    code = Code("float32", 1, world.device)
    count = len(operation.output)
    found = [r for r in range(world.size) if count and not count_wrong(operation.output, code.values(r, 0, count))]
    return (found[0] if found else None), before, operation.check()


def told_of_a_round(world: World, index: int) -> dict[str, object]:
    description = round_of_pairs(world, size_bytes=4096, dtype="float32", round=index).describe()
    return {**description.details, **{work.name: work.amount for work in description.work}}


def round_alone(world: World) -> str:
    try:
        round_of_pairs(replace(world, rank=0, size=1), size_bytes=4096, dtype="float32")
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("ways", ["at_once", "in_turn"])
@pytest.mark.parametrize("size_bytes", [4096, 8 << 20])
@pytest.mark.parametrize(
    ("index", "pairs", "partners"), [(0, "", [3, 2, 1, 0]), (2, "", [1, 0, 3, 2]), (0, "0-2 1-3", [2, 3, 0, 1])]
)
def test_all_pairs_of_a_round_exchange_at_once(
    four_ranks: Ranks, index: int, pairs: str, partners: list[int], size_bytes: int, ways: str
) -> None:
    answers = four_ranks.call("test_p2p:met", pairs=pairs, index=index, size_bytes=size_bytes, ways=ways)
    assert answers == [(partner, size_bytes // 4, 0) for partner in partners]


@pytest.mark.parametrize("ways", ["at_once", "in_turn"])
def test_a_rank_in_no_pair_stands_by_and_the_others_are_right(four_ranks: Ranks, ways: str) -> None:
    assert four_ranks.call("test_p2p:met", pairs="1-3", ways=ways) == [
        (None, 0, 0),
        (3, 1024, 0),
        (None, 0, 0),
        (1, 1024, 0),
    ]


def order_of_calls(world: World, ways: str) -> list[str]:
    """Return which sends and receives a step makes, in order."""
    operation = round_of_pairs(world, size_bytes=64, dtype="float32", ways=ways)
    operation.reset()
    calls: list[str] = []
    known = {name: getattr(dist, name) for name in ("send", "recv", "batch_isend_irecv")}

    def noted(name: str) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            calls.append(name)
            return known[name](*args, **kwargs)

        return call

    try:
        for name in known:
            setattr(dist, name, noted(name))
        operation.step()
    finally:
        for name, function in known.items():
            setattr(dist, name, function)
    return calls


def test_there_and_back_the_smaller_rank_sends_first_and_the_other_waits_for_it(two_ranks: Ranks) -> None:
    assert two_ranks.call("test_p2p:order_of_calls", ways="in_turn") == [["send", "recv"], ["recv", "send"]]
    assert two_ranks.call("test_p2p:order_of_calls", ways="at_once") == [["batch_isend_irecv"]] * 2


def test_a_round_tells_the_same_on_every_rank(four_ranks: Ranks) -> None:
    [told, *others] = four_ranks.call("test_p2p:told_of_a_round", index=1)
    assert told["pairs"] == "0-2 1-3"
    assert (told["algbw"], told["busbw"], told["send_bytes"], told["recv_bytes"]) == (4096, 4096, 4096, 4096)
    assert others == [told] * 3


def test_a_rank_alone_meets_nobody_and_is_refused_in_words(two_ranks: Ranks) -> None:
    assert two_ranks.call("test_p2p:round_alone")[0] == "a round needs a pair: size(1) < 2 ranks"


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
