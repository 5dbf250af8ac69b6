"""The flight recorder of torch shows which rank waits for which, on any stack."""

import json
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from parbench.bench.launch.flight_recorder import GroupState, find_waits, parse_groups
from parbench.bench.world.torch_compat import dump_flight_records
from parbench.bench.world.world import World
from tests.support.ranks import Ranks

NOW_NS = 10**18
SECOND_NS = 10**9
WORLD = {"0": (0, 1)}

Entry = dict[str, Any]
Groups = Mapping[str, Sequence[int]]


def make_entry(number: int, state: str = "completed", **overrides: Any) -> Entry:
    """Return the entry of a collective, 5 s old, as torch 2.11 and 2.13 write it in JSON."""
    fields = {
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "collective_seq_id": number,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": NOW_NS - 5 * SECOND_NS,
        "state": state,
        "retired": state == "completed",
        "is_p2p": False,
    }
    return {**fields, **overrides}


def make_group_entry(number: int, group: str, state: str = "scheduled") -> Entry:
    return make_entry(number, state, process_group=[group, ""])


def read_groups(entries: Sequence[Entry], groups: Groups = WORLD) -> dict[str, GroupState]:
    """Return the actions of a rank on its groups in the last minute."""
    dump = json.dumps({"version": "2.10", "pg_config": {}, "entries": entries}).encode()
    return parse_groups([dump], groups, NOW_NS - 60 * SECOND_NS)


def find_waiting(groups_by_rank: Mapping[int, Mapping[str, GroupState]]) -> dict[int, set[int]]:
    """Return the waiting ranks with the ranks they wait for."""
    return {rank: awaited for rank, awaited in find_waits(groups_by_rank).items() if awaited}


def find_waiting_in_world(
    first: Sequence[Entry], second: Sequence[Entry]
) -> dict[int, set[int]]:
    """Return the waiting ranks from the entries of two ranks in one group."""
    return find_waiting({0: read_groups(first), 1: read_groups(second)})


def test_rank_behind_in_a_collective_is_waited_for() -> None:
    stuck = [make_entry(4), make_entry(5, "scheduled")]
    assert find_waiting_in_world(stuck, [make_entry(4)]) == {0: {1}}


def test_blamed_rank_of_sub_groups_waits_for_nobody() -> None:
    first_row, second_row = {"tp0": (0, 1)}, {"tp1": (2, 3)}
    first_column, second_column = {"dp0": (0, 2)}, {"dp1": (1, 3)}
    late_entry = make_group_entry(2, "tp1", "completed")
    groups_by_rank = {
        0: read_groups([make_group_entry(3, "dp0")], first_row | first_column),
        1: read_groups([make_group_entry(3, "dp1")], first_row | second_column),
        2: read_groups([make_group_entry(3, "tp1")], second_row | first_column),
        3: read_groups([late_entry], second_row | second_column),
    }
    assert find_waiting(groups_by_rank) == {0: {2}, 1: {3}, 2: {3}}


def test_coalesced_calls_are_done_with_their_launch() -> None:
    parts = [make_entry(5, "scheduled", retired=False)] * 2
    launched = make_entry(5, "completed")
    assert read_groups(parts)["0"].pending == 5
    assert read_groups([*parts, launched])["0"].pending == 0


def test_old_calls_do_not_count() -> None:
    old = make_entry(9, time_created_ns=NOW_NS - 61 * SECOND_NS)
    assert read_groups([old])["0"].enqueued == 0


def record_late_rank(world: World, late_rank: int) -> dict[str, GroupState]:
    """Return torch's records of this rank while one rank came late to a barrier."""
    began_ns = time.time_ns()
    results: list[dict[str, GroupState]] = []
    group = dist.new_group(group_desc="both")
    dist.all_reduce(torch.zeros(1), group=group)

    def read_record() -> None:
        groups, dumps = dump_flight_records()
        results.append(parse_groups(dumps, groups, began_ns))

    timer = threading.Timer(0.8, read_record)
    timer.start()
    if world.rank == late_rank:
        timer.join()
        time.sleep(0.4)
    dist.barrier(group=group)
    timer.join()
    dist.destroy_process_group(group)
    return results[0]


def test_record_of_real_ranks_shows_the_late_one(two_ranks: Ranks) -> None:
    target = "tests.bench.launch.test_flight_recorder:record_late_rank"
    waiting, late = two_ranks.call(target, late_rank=1)
    assert find_waiting({0: waiting, 1: late}) == {0: {1}}
    assert [group.pending for group in waiting.values() if group.pending] == [2]
