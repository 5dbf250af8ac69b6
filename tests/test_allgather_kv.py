"""Attention over gathered keys is a single process's, and keeps no more than its part."""

from dataclasses import replace

import pytest
import torch
from cp_ranks import Sizes, assert_right
from ranks import Ranks

from bench.world import World
from workloads.context.allgather_kv import AllGatherAttention
from workloads.context.attention_block import Blocks
from workloads.context.attention_kernel import CpuFlash
from workloads.context.cp_plan import ContextPlan
from workloads.context.cp_recorder import Recorder
from workloads.memory import SavedTensors

GQA = Sizes(heads=6, kv_heads=2)


def core_of(world: World, sequence: int, recorder: Recorder) -> AllGatherAttention:
    plan = ContextPlan(method="allgather_kv", mask="causal", sequence=sequence, ranks=world.size, ulysses=1)
    blocks = Blocks(kernel=CpuFlash(), recorder=recorder, tiles=[plan.tiles(world.rank, 0)])
    return AllGatherAttention(world.group, blocks, plan.dealt(), world.device)


def gathered_and_scattered(world: World) -> tuple[list[float], list[float]]:
    """Return all positions as a rank gathers them, and what comes back of gradients that are the positions."""
    core = core_of(world, 8, Recorder(world.device))
    plan = ContextPlan(method="allgather_kv", mask="causal", sequence=8, ranks=world.size, ulysses=1)
    mine = torch.tensor(plan.tokens(world.rank), dtype=torch.float32).view(1, 1, 1, -1, 1).expand(2, 1, 1, -1, 1)
    everything = core.gathered(mine, "forward")
    back = core.scattered(everything, torch.float32)
    return everything[0].flatten().tolist(), back[1].flatten().tolist()


def kept_and_waited(world: World) -> tuple[int, int, list[tuple[str, str, int]]]:
    """Return the bytes saved for backward, those of q, k, v, output and log-sum-exp, and what was waited for."""
    recorder = Recorder(world.device)
    core = core_of(world, 16 * world.size, recorder)
    q, k, v = (torch.randn(2, heads, 16, 8, requires_grad=True) for heads in (4, 2, 2))
    with recorder.recording():
        with SavedTensors() as saved:
            out = core(q, k, v)
        out.sum().backward()  # type: ignore[no-untyped-call]
    part = 4 * (2 * 16 * 8 * (4 + 2 + 2 + 4) + 2 * 16 * 4)
    return saved.num_bytes, part, [(wait.direction, wait.what, wait.num_bytes) for wait in recorder.waits()]


def test_keys_come_in_the_sequences_order_and_sums_go_back_to_their_rank(two_ranks: Ranks) -> None:
    for rank, (everything, back) in enumerate(two_ranks.call("test_allgather_kv:gathered_and_scattered")):
        assert everything == [0, 1, 2, 3, 4, 5, 6, 7]
        assert back == [2 * position for position in ([0, 1, 6, 7], [2, 3, 4, 5])[rank]]  # of two ranks


def test_no_more_than_the_part_is_kept_and_keys_are_gathered_again(two_ranks: Ranks) -> None:
    keys = 2 * 2 * 2 * 16 * 8 * 4
    for saved, part, waits in two_ranks.call("test_allgather_kv:kept_and_waited"):
        assert saved == part
        assert waits == [
            ("forward", "keys and values", keys),
            ("backward", "keys and values", keys),
            ("backward", "gradients", 2 * keys),
        ]


@pytest.mark.parametrize("mask", ["causal", "full", "packed"])
def test_two_ranks_attend_as_one(two_ranks: Ranks, mask: str) -> None:
    sizes = [Sizes(), GQA, Sizes(heads=3, kv_heads=1, sequence=12)]
    cases = [("allgather_kv", mask, size, 0) for size in sizes]
    for found in two_ranks.call("cp_ranks:all_attended", cases=cases):
        for each in found:
            assert_right(each)


def test_four_ranks_attend_as_one(four_ranks: Ranks) -> None:
    cases = [("allgather_kv", mask, replace(GQA, sequence=56), 0) for mask in ("causal", "full", "packed")]
    for found in four_ranks.call("cp_ranks:all_attended", cases=cases):
        for each in found:
            assert_right(each)


def test_bfloat16_is_as_near_as_its_elements_allow(two_ranks: Ranks) -> None:
    cases = [("allgather_kv", "causal", replace(GQA, dtype="bfloat16"), 0)]
    for [found] in two_ranks.call("cp_ranks:all_attended", cases=cases):
        assert_right(found, limit=0.02)
        assert found.sent["backward"]["cp"] == 2 * found.sent["forward"]["cp"]
