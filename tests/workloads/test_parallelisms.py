"""Each parallelism sends, gathers and holds what its name means, for all of its options."""

import gc
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from parbench.bench.rank.runner import load_target
from parbench.bench.world.world import World
from parbench.workloads.step.sent_bytes import SentCall, counted
from tests.support.ranks import Ranks
from tests.support.training_steps import DEFINITION_BY_NAME, Params, build_small_step

PSI = 27_936  # parameters of the small model
ACTIVATION = 2 * 16 * 32 * 4
COMPRESSED = {"grad_compression": "bf16"}
DISTRIBUTED = {"optimizer": "distributed"}


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("ddp", {"bucket_mb": 0.001}),  # a bucket for nearly every parameter
        ("ddp", {"static_graph": True, "checkpointing": "full"}),
        ("ddp", {"no_sync": True, "accumulation": 3}),
        ("zero2", {"prefetch": "explicit", "vocabulary": 61}),
        ("zero3", {"prefetch": "explicit", "accumulation": 2, "no_sync": True}),
        ("hsdp", {"prefetch": "explicit", "accumulation": 2, "checkpointing": "full"}),
        ("ddp", {**COMPRESSED, "accumulation": 3, "vocabulary": 61}),
        ("ddp", {**COMPRESSED, "compute": "timed:1ms"}),
        ("zero1", {**DISTRIBUTED, "accumulation": 2, "vocabulary": 61, "kv_heads": 4}),
        ("zero1", {**DISTRIBUTED, "bucket_mb": 0.001, "precision": "bfloat16"}),
        ("zero1", {**DISTRIBUTED, "compute": "timed:1ms"}),
        ("zero1", {"accumulation": 2, "precision": "bfloat16"}),
    ],
)
def test_option_matches_one_process(two_ranks: Ranks, name: str, params: Params) -> None:
    arguments = {"name": name, "params": params}
    for result in two_ranks.call(
        "tests.support.training_steps:measure_wrong_and_bytes", **arguments
    ):
        wrong, sent, expected = result
        assert wrong == [0, 0]
        expected = {axis: num_bytes for axis, num_bytes in expected.items() if num_bytes}
        assert sent == pytest.approx(expected, rel=1e-12)


def list_calls(world: World, name: str, params: Params) -> list[SentCall]:
    """Return the calls of a third step; DDP makes its buckets after the first."""
    step = build_small_step(world, name, params)
    for _ in range(2):
        step.step()
    calls = list(counted(step.step, step.layout.axes))
    step.close()
    return calls


def calls_of(ranks: Ranks, name: str, **params: object) -> list[SentCall]:
    calls: list[SentCall]
    calls, _ = ranks.call("tests.workloads.test_parallelisms:list_calls", name=name, params=params)
    return calls


def test_ddp_sums_gradients_in_buckets(two_ranks: Ranks) -> None:
    for rounds, params in ((3, {"accumulation": 3}), (1, {"accumulation": 3, "no_sync": True})):
        calls = calls_of(two_ranks, "ddp", **params)
        assert {call.op for call in calls} == {"all_reduce"}
        assert sum(call.num_bytes for call in calls) == rounds * 4 * PSI
    assert len(calls_of(two_ranks, "ddp", bucket_mb=0.001)) > 10


@pytest.mark.parametrize(("params", "buckets"), [({}, 1), ({"bucket_mb": 0.01}, 11)])
def test_distributed_optimizer_calls(two_ranks: Ranks, params: Params, buckets: int) -> None:
    calls = calls_of(two_ranks, "zero1", **DISTRIBUTED, **params)
    counts = Counter(call.op for call in calls)
    assert counts == {"reduce_scatter": buckets, "all_gather": buckets}
    assert sum(call.num_bytes for call in calls) == 2 * 4 * PSI


@pytest.mark.parametrize(("name", "gathers"), [("zero2", 3), ("zero3", 6), ("hsdp", 5)])
def test_fsdp_calls(two_ranks: Ranks, name: str, gathers: int) -> None:
    """Of two layers and the root, whose parameters stay gathered in hsdp."""
    counts = Counter(call.op for call in calls_of(two_ranks, name))
    assert (counts["all_gather"], counts["reduce_scatter"]) == (gathers, 3)


def test_sequence_parallel_calls(two_ranks: Ranks) -> None:
    """Each of two layers gathers and scatters four activations, and each end gathers one."""
    calls = calls_of(two_ranks, "tp_sp")
    counts = Counter(call.op for call in calls if call.num_bytes == ACTIVATION)
    assert counts["all_gather"] == 8 + 2
    assert counts["reduce_scatter"] == 8


def wrong_gradients(world: World) -> list[int]:
    """Return wrong elements: with bfloat16 sums, with a microbatch twice, with float8."""
    step = build_small_step(world, "ddp", {**COMPRESSED, "accumulation": 2})
    step.reset()
    step.step()
    assert step.check() == 0
    wrong, microbatches = [step.check()], step._mine
    step._mine = (microbatches[0], microbatches[0])
    wrong.append(step.check())
    step._mine = microbatches
    weight = step.layout.model.get_parameter("layers.0.ffn.up.weight")
    weight.register_hook(lambda grad: grad.to(torch.float8_e4m3fn).to(grad.dtype))  # type: ignore[no-untyped-call]
    return [*wrong, step.check()]


def test_gradients_below_bfloat16_are_wrong(two_ranks: Ranks) -> None:
    for bfloat16, twice, float8 in two_ranks.call(
        "tests.workloads.test_parallelisms:wrong_gradients"
    ):
        assert bfloat16 == 0
        assert min(twice, float8) > 0


def count_leftovers(world: World, name: str) -> list[tuple[int, int]]:
    """Count threads and tensors after each of three benchmarks; the first may fill caches."""
    options: dict[str, Params] = {"pp": {"microbatches": 4}, "cp": {"method": "zigzag"}}
    shape = {"hidden": 32, "sequence": 16, "vocabulary": 64}
    case = DEFINITION_BY_NAME[name].case({**shape, **options.get(name, {})})
    counts = []
    for _ in range(3):
        benchmark = load_target(DEFINITION_BY_NAME[name].target)(world, **case.whole)
        benchmark.reset()
        benchmark.step()
        world.barrier()
        benchmark.close()
        del benchmark
        gc.collect()
        tensors = sum(issubclass(type(item), Tensor) for item in gc.get_objects())
        counts.append((len(list(Path("/proc/self/task").iterdir())), tensors))
    return counts


@pytest.mark.full
@pytest.mark.parametrize("name", ["hsdp", "tp_fsdp", "ep_step", "pp", "cp", "hybrid"])
def test_closed_step_leaves_nothing(two_ranks: Ranks, name: str) -> None:
    for _, second, third in two_ranks.call(
        "tests.workloads.test_parallelisms:count_leftovers", name=name
    ):
        assert third[0] <= second[0]
        assert third[1] <= second[1]
