"""From what torch recorded on each rank it is read who waits for whom, whatever stacks look like."""

import json
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from parbench.bench.launch.flight_recorder import GroupSeen, groups_seen, waits
from parbench.bench.world.torch_compat import recorded_work
from parbench.bench.world.world import World
from tests.support.ranks import Ranks

NOW = 10**18
SECOND = 10**9
WORLD = {"0": (0, 1)}


def entry(
    number: int, state: str = "completed", *, group: str = "0", age: float = 5.0, **more: Any
) -> dict[str, Any]:
    """An entry as torch 2.11 and 2.13 write it in JSON, as far as it is read."""
    usual = {
        "pg_id": 0,
        "process_group": [group, "default_pg"],
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[4]],
        "time_created_ns": NOW - int(age * SECOND),
        "time_discovered_started_ns": 0,
        "state": state,
        "retired": state == "completed",
        "is_p2p": False,
    }
    return {**usual, **more}


def peer(number: int, name: str, state: str = "scheduled", **more: Any) -> dict[str, Any]:
    return entry(0, state, p2p_seq_id=number, profiling_name=f"nccl:{name}", is_p2p=True, **more)


def seen(
    entries: Sequence[Mapping[str, Any]],
    groups: Mapping[str, Sequence[int]] = WORLD,
    since: float = 60.0,
) -> dict[str, GroupSeen]:
    dump = {"version": "2.10", "pg_config": {}, "pg_status": {}, "comm_lib_version": ""}
    dumps = [json.dumps(dump | ({"entries": entries} if entries else {})).encode()]
    found = groups_seen(dumps, groups, NOW - int(since * SECOND), NOW)
    assert found is not None
    return found


def waiting(
    *ranks: Sequence[Mapping[str, Any]], groups: Mapping[str, Sequence[int]] = WORLD
) -> dict[int, set[int]]:
    """Return who waits for whom of ranks with these entries, each of its own groups."""
    own = [{name: of for name, of in groups.items() if rank in of} for rank in range(len(ranks))]
    return waits({rank: seen(entries, own[rank]) for rank, entries in enumerate(ranks)})


def test_a_rank_that_has_not_enqueued_what_others_wait_in_is_waited_for() -> None:
    assert waiting([entry(4), entry(5, "scheduled")], [entry(4)]) == {0: {1}, 1: set()}
    assert waiting([entry(1, "scheduled")], [entry(9, age=61.0)]) == {0: {1}, 1: set()}, (
        "not since its visit began"
    )
    assert seen([entry(4), entry(5, "scheduled")])["0"].name == "nccl:all_reduce"
    assert seen([entry(4)])["0"] == GroupSeen(ranks=(0, 1), enqueued=4, started=4)


def test_what_all_have_enqueued_waits_for_a_gpu_whose_rank_is_known_where_starts_are() -> None:
    spinning = [entry(5, "scheduled")]
    assert waiting(spinning, spinning) == {0: set(), 1: set()}
    assert waiting([entry(5, "started")], spinning) == {0: {1}, 1: set()}
    assert waiting([entry(5, "started")], [entry(5, "started")]) == {0: set(), 1: set()}
    # a host that runs ahead of a GPU that spins is not behind for having enqueued less of what comes later
    ahead = [entry(number, "scheduled") for number in range(5, 9)]
    assert waiting(ahead, ahead[:1]) == {0: set(), 1: set()}


def test_among_sub_groups_the_one_to_blame_is_waited_for_and_waits_for_nobody() -> None:
    groups = {"tp0": (0, 1), "tp1": (2, 3), "dp0": (0, 2), "dp1": (1, 3)}
    stuck = {name: [entry(3, "scheduled", group=name)] for name in groups}
    found = waiting(
        stuck["dp0"], stuck["dp1"], stuck["tp1"], [entry(2, group="tp1")], groups=groups
    )
    assert found == {0: {2}, 1: {3}, 2: {3}, 3: set()}
    chain = waiting(
        stuck["tp0"], stuck["dp1"], [entry(2, group="dp0")], stuck["tp1"], groups=groups
    )
    assert chain == {0: {1}, 1: {3}, 2: set(), 3: {2}}


def test_ranks_that_call_in_another_order_wait_for_one_another() -> None:
    groups = {"a": (0, 1), "b": (0, 1)}
    found = waiting(
        [entry(1, "scheduled", group="a")], [entry(1, "scheduled", group="b")], groups=groups
    )
    assert found == {0: {1}, 1: {0}}


def test_calls_launched_as_one_are_done_with_their_launch() -> None:
    parts = [entry(5, "scheduled", retired=False)] * 2
    for state, pending in (("completed", 0), ("scheduled", 5)):
        launch = entry(5, state, profiling_name="nccl:coalesced")
        assert seen([*parts, launch])["0"].pending == pending
    pair = [peer(7, "send 0->1"), peer(7, "recv 0<-1")]
    for is_p2p in (True, False):
        assert seen([*pair, peer(7, "coalesced", "completed") | {"is_p2p": is_p2p}])["0"].name == ""


def test_a_receive_waits_for_the_rank_that_does_not_send_and_a_send_for_the_one_that_does_not_receive() -> (
    None
):
    groups = {"pp": (4, 2)}  # whose own numbers are not the global ones
    receives = seen([peer(1, "recv 1<-0", group="pp")], groups)
    assert (receives["pp"].receives_from, receives["pp"].name) == ((4,), "nccl:recv 1<-0")
    sends = seen([peer(1, "send 0->1", group="pp")], groups)
    nothing = seen([entry(1, group="pp")], groups)
    assert waits({2: receives, 4: nothing}) == {2: {4}, 4: set()}
    assert waits({2: nothing, 4: sends}) == {2: set(), 4: {2}}
    assert waits({2: receives, 4: sends}) == {2: set(), 4: set()}
    assert seen([peer(1, "recv 1<-0", "completed", group="pp")], groups)["pp"].receives_from == ()


def test_what_may_still_move_or_was_of_an_older_group_of_that_name_does_not_count() -> None:
    assert not seen([entry(5, "scheduled", age=0.1)])["0"].pending
    assert seen([entry(9, "scheduled"), entry(1, pg_id=3)])["0"] == GroupSeen(
        ranks=(0, 1), enqueued=1, started=1
    )
    gone = waits({0: seen([entry(5, "scheduled")]), 1: {}})
    assert gone == {0: set(), 1: set()}, "a rank that has left the group is not waited for"


def test_where_torch_records_nothing_nothing_is_known() -> None:
    assert groups_seen([b'{"version":"2.10"}'], WORLD, 0, NOW) is None
    assert groups_seen([], WORLD, 0, NOW) is None


def recorded_while_one_is_late(world: World, late: int) -> dict[str, GroupSeen] | None:
    """Return what this rank's recorder shows while one rank comes late to a group of its own name."""
    began, seen_then = time.time_ns(), []
    group = dist.new_group(group_desc="both")
    dist.all_reduce(torch.zeros(1), group=group)

    def look() -> None:
        groups, dumps = recorded_work()
        seen_then.append(groups_seen(dumps, groups, began, time.time_ns()))

    watcher = threading.Timer(1.0, look)
    watcher.start()
    if world.rank == late:
        watcher.join()
        time.sleep(0.5)
    dist.barrier(group=group)
    watcher.join()
    dist.destroy_process_group(group)
    return seen_then[0]


def test_torchs_own_record_of_real_ranks_tells_the_late_one(two_ranks: Ranks) -> None:
    for late in (0, 1):
        told = two_ranks.call(
            "tests.bench.launch.test_flight_recorder:recorded_while_one_is_late", late=late
        )
        found = dict(enumerate(told))
        assert waits(found) == {1 - late: {late}, late: set()}
        [stuck] = [group for group in found[1 - late].values() if group.name]
        assert stuck == GroupSeen(
            ranks=(0, 1), enqueued=2, started=1, pending=2, name="gloo:barrier"
        )
