"""Each parallelism matches one process for all of its options, and leaves nothing behind."""

import gc
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from parbench.bench.rank.runner import load_target
from parbench.bench.world.world import World
from parbench.workloads.step.sent_bytes import counted
from tests.support.ranks import Ranks
from tests.support.training_steps import (
    DEFINITION_BY_NAME,
    Params,
    build_small_step,
    build_trained_step,
)

MODULE = "tests.workloads.test_parallelisms"
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
    target = "tests.support.training_steps:measure_wrong_and_bytes"
    for wrong, sent, expected in two_ranks.call(target, name=name, params=params):
        assert wrong == [0, 0]
        expected_bytes = {axis: num_bytes for axis, num_bytes in expected.items() if num_bytes}
        assert sent == pytest.approx(expected_bytes, rel=1e-12)


def count_calls(world: World, bucket_mb: float) -> Counter[str]:
    """Return the number of calls of a step with a distributed optimizer, by operation."""
    step = build_trained_step(world, "zero1", **DISTRIBUTED, bucket_mb=bucket_mb)
    calls = counted(step.step, step.layout.axes)
    step.close()
    return Counter(call.op for call in calls)


@pytest.mark.parametrize(("bucket_mb", "buckets"), [(25.0, 1), (0.01, 11)])
def test_distributed_optimizer_calls(two_ranks: Ranks, bucket_mb: float, buckets: int) -> None:
    counts, _ = two_ranks.call(f"{MODULE}:count_calls", bucket_mb=bucket_mb)
    assert counts == {"reduce_scatter": buckets, "all_gather": buckets}


def count_wrong_gradients(world: World) -> dict[str, int]:
    """Count wrong elements of compressed sums, of a microbatch taken twice, and of float8."""
    step = build_small_step(world, "ddp", {**COMPRESSED, "accumulation": 2})
    step.reset()
    step.step()
    assert step.check() == 0
    wrong = {"bfloat16": step.check()}
    microbatches = step._mine
    step._mine = (microbatches[0], microbatches[0])
    wrong["twice"] = step.check()
    step._mine = microbatches
    weight = step.layout.model.get_parameter("layers.0.ffn.up.weight")
    weight.register_hook(lambda grad: grad.to(torch.float8_e4m3fn).to(grad.dtype))  # type: ignore[no-untyped-call]
    wrong["float8"] = step.check()
    return wrong


def test_gradients_below_bfloat16_are_wrong(two_ranks: Ranks) -> None:
    for wrong in two_ranks.call(f"{MODULE}:count_wrong_gradients"):
        assert wrong["bfloat16"] == 0
        assert wrong["twice"] > 0
        assert wrong["float8"] > 0


def count_leftovers(world: World, name: str) -> list[tuple[int, int]]:
    """Count threads and tensors after each of three benchmarks; the first may fill caches."""
    options: dict[str, Params] = {"pp": {"microbatches": 4}, "cp": {"method": "zigzag"}}
    shape = {"hidden": 32, "sequence": 16, "vocabulary": 64}
    definition = DEFINITION_BY_NAME[name]
    case = definition.build_case({**shape, **options.get(name, {})})
    counts = []
    for _ in range(3):
        benchmark = load_target(definition.target)(world, **case.all_params)
        benchmark.reset()
        benchmark.step()
        world.barrier()
        benchmark.close()
        del benchmark
        gc.collect()
        num_threads = len(list(Path("/proc/self/task").iterdir()))
        num_tensors = sum(issubclass(type(item), Tensor) for item in gc.get_objects())
        counts.append((num_threads, num_tensors))
    return counts


@pytest.mark.full
@pytest.mark.parametrize("name", ["hsdp", "tp_fsdp", "ep_step", "pp", "cp", "hybrid"])
def test_closed_step_leaves_nothing(two_ranks: Ranks, name: str) -> None:
    for _, second, third in two_ranks.call(f"{MODULE}:count_leftovers", name=name):
        assert third[0] <= second[0]
        assert third[1] <= second[1]
