"""Calls and bytes of a step by axis and operation: means over ranks that any one rank's change shows in."""

import dataclasses

import torch
import torch.distributed as dist

from parbench.bench.world.world import World
from parbench.workloads.step.overlap import kernels_of
from parbench.workloads.step.sent_bytes import SentCall, Tally, counted, counts_of
from tests.support.ranks import Ranks


def call(axis: str, op: str, sent: float, **more: bool) -> SentCall:
    return SentCall(axis=axis, op=op, num_bytes=int(sent), ranks=2, sent=sent, **more)


def values(*told: Tally) -> dict[str, float | None]:
    return {name: metric.value for name, metric in counts_of(told).items()}


def test_calls_and_bytes_are_means_over_ranks_by_axis_and_operation() -> None:
    first = [call("dp", "all_reduce", 8.0), call("dp", "all_reduce", 4.0), call("pp", "send", 6.0)]
    one, other = (
        Tally.of(first, ["dp", "tp"]),
        Tally.of([call("dp", "all_reduce", 12.0), call("pp", "recv", 0.0)], ["dp"]),
    )
    assert values(one, other) == {
        "calls.dp": 1.5,
        "calls.tp": 0.0,
        "calls.pp": 1.0,
        "calls.dp.all_reduce": 1.5,
        "sent.dp.all_reduce": 12.0,
        "calls.pp.send": 0.5,
        "sent.pp.send": 3.0,
        "calls.pp.recv": 0.5,
        "sent.pp.recv": 0.0,
    }
    assert one.by_axis == {"dp": 12.0, "tp": 0.0, "pp": 6.0}
    more = dataclasses.replace(other, by_op={**other.by_op, ("dp", "all_gather"): (1, 5.0)})
    assert values(one, more)["calls.dp.all_gather"] == 0.5, "what one rank alone does more"


def test_bytes_that_data_tell_on_any_rank_are_no_count() -> None:
    even, uneven = (
        Tally.of([call("ep", "all_to_all", 8.0)], []),
        Tally.of([call("ep", "all_to_all", 8.0, by_data=True)], []),
    )
    assert values(even, even)["sent.ep.all_to_all"] == 8.0
    for told in ((even, uneven), (uneven, even), (uneven, uneven)):
        assert values(*told) == {"calls.ep": 1.0, "calls.ep.all_to_all": 1.0}


def exchanged(world: World) -> list[bool]:
    """Return of three exchanges which have bytes that data tell: even, uneven, and even by sizes that were given."""
    rows, received = torch.ones(4, 2), torch.empty(4, 2)
    sizes = [1, 3] if world.rank == 0 else [3, 1]

    def exchange() -> None:
        dist.all_to_all_single(received, rows, group=world.group)
        dist.all_to_all_single(received, rows, sizes, sizes, group=world.group)
        dist.all_to_all_single(received, rows, [2, 2], [2, 2], group=world.group)

    return [one.by_data for one in counted(exchange, {"ep": world.group})]


def test_an_exchange_whose_sizes_are_given_is_by_data(two_ranks: Ranks) -> None:
    assert (
        two_ranks.call("tests.workloads.step.test_tallies:exchanged") == [[False, True, True]] * 2
    )


def test_kernels_are_counted_where_all_traced_steps_of_a_rank_ran_as_many() -> None:
    for told, expected in (
        ([[10, 10, 10], [12, 12, 12]], {"kernels": 11.0}),
        ([[10, 11, 10], [12, 12, 12]], {"kernels": None}),
        ([[None, None], [None, None]], {}),
    ):
        assert {name: metric.value for name, metric in kernels_of(told).items()} == expected
