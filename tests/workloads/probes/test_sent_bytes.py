"""The calls of a step are counted by axis and operation, and can be replaced by fake ones."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from parbench.bench.world.torch_compat import all_gather_single
from parbench.bench.world.world import World
from parbench.workloads.probes.sent_bytes import (
    OTHER,
    CommBytesProbe,
    NoCommMode,
    SentCall,
    make_fake_groups,
    record_calls,
    summarize_counts,
)
from tests.support.ranks import Ranks
from tests.support.workloads.training_steps import build_trained_step

Call = tuple[str, str, int, int]

LAYER = 50_688
EMBEDDINGS = 10_240
HEAD = 8_448
ACTIVATION = 4_096
LOSS = 128
CALLS: dict[str, dict[Call, int]] = {
    "ddp": {("dp", "all_reduce", 4 * 30_016, 2): 1},
    "fsdp": {
        ("fsdp", "all_gather", LAYER, 2): 4,
        ("fsdp", "all_gather", EMBEDDINGS, 2): 2,
        ("fsdp", "all_gather", HEAD, 2): 1,
        ("fsdp", "reduce_scatter", LAYER, 2): 2,
        ("fsdp", "reduce_scatter", EMBEDDINGS, 2): 1,
        ("fsdp", "reduce_scatter", HEAD, 2): 1,
    },
    "zero1": {
        ("dp", "all_gather", 4 * 30_016, 2): 1,
        ("dp", "reduce_scatter", 4 * 30_016, 2): 1,
    },
    "tp": {("tp", "all_reduce", ACTIVATION, 2): 10, ("tp", "all_reduce", LOSS, 2): 3},
}
"""Calls of a step by axis, operation, bytes and ranks."""


def count_calls(world: World, name: str) -> Counter[Call]:
    step = build_trained_step(world, name, kv_heads=4)
    calls = record_calls(step.step, step.mesh.groups)
    step.close()
    return Counter((call.axis, call.op, call.num_bytes, call.ranks) for call in calls)


@pytest.mark.parametrize("name", CALLS)
def test_counted_calls_of_step(two_ranks: Ranks, name: str) -> None:
    counts, _ = two_ranks.call(f"{__name__}:count_calls", name=name)
    assert counts == CALLS[name]


def step_on_rank_0(world: World, name: str) -> None:
    """Let only rank 0 take a step without communication."""
    step = build_trained_step(world, name)
    fake_groups = make_fake_groups(step.mesh.groups)
    if world.rank == 0:
        with NoCommMode(fake_groups):
            step.step()
    world.barrier()
    for group in fake_groups.values():
        dist.destroy_process_group(group)
    step.close()


@pytest.mark.parametrize("name", ["ddp", "fsdp", "tp_sp", "ep_step"])
def test_step_without_comm_needs_no_other_rank(two_ranks: Ranks, name: str) -> None:
    two_ranks.call(f"{__name__}:step_on_rank_0", name=name)


def communicate_without_devices(world: World) -> list[tuple[int, ...]]:
    """Return the shapes of results of tensors that no backend could communicate."""
    ops = torch.ops._c10d_functional
    group = world.group
    shard = torch.ones(3, 2, device="meta")
    output = torch.empty(6, 2, device="meta")
    with NoCommMode({group.group_name: group}):
        work = all_gather_single(output, shard, group, async_op=True)
        assert work is not None
        work.wait()
        dist.all_reduce(shard, group=group)
        name = group.group_name
        gathered = ops.all_gather_into_tensor(shard, world.size, name)
        scattered = ops.reduce_scatter_tensor(output, "sum", world.size, name)
    return [tuple(tensor.shape) for tensor in (gathered, scattered)]


def test_data_on_a_device_is_not_copied_without_comm(two_ranks: Ranks) -> None:
    shapes = two_ranks.call(f"{__name__}:communicate_without_devices")
    assert shapes == [[(6, 2), (3, 2)]] * 2


def sent_call(axis: str, op: str, sent: float, depends_on_data: bool = False) -> SentCall:
    return SentCall(
        axis=axis,
        op=op,
        num_bytes=int(sent),
        ranks=2,
        sent=sent,
        depends_on_data=depends_on_data,
    )


def test_counts_are_means_over_ranks() -> None:
    sums = [sent_call("dp", "all_reduce", 8.0), sent_call("dp", "all_reduce", 4.0)]
    first = [*sums, sent_call("pp", "send", 6.0)]
    counts = summarize_counts([first, [sent_call("dp", "all_reduce", 12.0)]], ["dp", "tp"])
    assert counts["calls.tp"].value == 0.0
    assert counts["calls.dp"].value == 1.5
    assert counts["calls.dp.all_reduce"].value == 1.5
    assert counts["sent.dp.all_reduce"].value == 12.0
    assert counts["calls.pp.send"].value == 0.5
    assert counts["sent.pp.send"].value == 3.0


def test_counts_leave_out_bytes_that_depend_on_data() -> None:
    even = [sent_call("ep", "all_to_all", 8.0)]
    uneven = [sent_call("ep", "all_to_all", 8.0, depends_on_data=True)]
    assert summarize_counts([even, even], [])["sent.ep.all_to_all"].value == 8.0
    assert summarize_counts([even, uneven], []).keys() == {"calls.ep", "calls.ep.all_to_all"}


def test_bytes_are_of_rank_that_differs_most() -> None:
    """Unexpected bytes have a ratio of 0."""
    first = [sent_call("tp", "all_reduce", 8.0), sent_call("ep", "all_to_all", 4.0)]
    second = [sent_call("tp", "all_reduce", 3.0)]
    samples = [(first, {"tp": 8.0, "ep": 0.0}), (second, {"tp": 4.0})]
    metrics = CommBytesProbe({}, dict).summarize(samples).metrics
    assert metrics["bytes_sent.tp"].value == 3
    assert metrics["bytes_expected.tp"].value == 4
    assert metrics["bytes_ratio.tp"].value == 0.75
    assert metrics["bytes_sent.ep"].value == 4
    assert metrics["bytes_ratio.ep"].value == 0


def exchange_rows(world: World) -> list[tuple[str, float, bool]]:
    """Return the axis, sent bytes and dependence on data of calls with and without sizes."""
    rows, received = torch.ones(4, 2), torch.empty(4, 2)
    sizes = [1, 3] if world.rank == 0 else [3, 1]

    def exchange() -> None:
        dist.all_to_all_single(received, rows, group=world.group)
        dist.all_to_all_single(received, rows, sizes, sizes, group=world.group)

    calls = [*record_calls(exchange, {"ep": world.group}), *record_calls(exchange, {})]
    return [(call.axis, call.sent, call.depends_on_data) for call in calls]


def test_exchange_with_sizes_depends_on_data(two_ranks: Ranks) -> None:
    for calls in two_ranks.call(f"{__name__}:exchange_rows"):
        assert calls == [
            ("ep", 16.0, False),
            ("ep", 24.0, True),
            (OTHER, 16.0, False),
            (OTHER, 24.0, True),
        ]
