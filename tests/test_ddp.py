"""DDP sums gradients in the buckets that were asked for, when it should, and its gate sees every way it might not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from test_training import small
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from bench.world import World
from workloads.communication import Call, counted
from workloads.training import TrainingStep

NUM_SMALL = 27_936  # 2 (2 h^2 + h^2 + 8 h^2 + 4 h + 3 h + h / 2 + 4 h) + (2 * 64 + 16) h + 2 h with h = 32


def module_of(step: TrainingStep) -> DistributedDataParallel:
    module = step.layout.module
    assert isinstance(module, DistributedDataParallel)
    return module


def stepped(step: TrainingStep) -> TrainingStep:
    step.reset()
    step.step()
    assert step.check() == 0
    return step


# ---- what ranks do


def calls_of_step(world: World, params: dict[str, Any]) -> list[Call]:
    step = small(world, "ddp", params)
    for _ in range(2):
        step.step()  # the first finds the order of gradients, after which DDP makes its buckets anew
    return list(counted(step.step, step.layout.axes))


def wrong_of_hook(world: World, hook: str) -> int:
    """Return how much is wrong in a check alone where DDP sums what a hook makes of each bucket."""
    step = stepped(small(world, "ddp", {}))
    change = HOOKS[hook]

    def summed(_: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        changed = change(bucket.buffer(), world)
        dist.all_reduce(changed, group=world.group)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(changed)
        return done

    module_of(step).register_comm_hook(None, summed)
    return step.check()


HOOKS: dict[str, Callable[[Tensor, World], Tensor]] = {
    "averaged": lambda buffer, world: buffer / world.size,
    "summed": lambda buffer, world: buffer,
    "travels in bfloat16": lambda buffer, world: (buffer / world.size).bfloat16().float(),
    "of rank 0 twice": lambda buffer, world: buffer * (1 - world.rank),
}


def wrong_without_sync(world: World, params: dict[str, Any]) -> int:
    """Return how much is wrong in a check alone whose gradients stay on their ranks."""
    step = stepped(small(world, "ddp", params))
    with module_of(step).no_sync():
        return step.check()


def wrong_with_a_parameter_left_out(world: World) -> int:
    """Return how much is wrong where a parameter's gradient is there, but of this rank's tokens alone."""
    step = small(world, "ddp", {})
    module_of(step)._set_params_and_buffers_to_ignore_for_model(step.layout.model, ["head.weight"])  # type: ignore[no-untyped-call]
    alone = DistributedDataParallel(step.layout.model, process_group=world.group)
    object.__setattr__(step.layout, "module", alone)
    step.reset()
    return step.check()


# ---- tests


@pytest.mark.parametrize(
    "params",
    [
        {"bucket_mb": 0.001},  # a bucket for nearly every parameter
        {"static_graph": True},
        {"no_sync": True, "accumulation": 3},
        {"no_sync": True, "accumulation": 2, "precision": "bfloat16"},
        {"static_graph": True, "checkpointing": "full"},
    ],
    ids=str,
)
def test_every_way_of_summing_computes_what_one_process_would(two_ranks: Ranks, params: dict[str, Any]) -> None:
    found = two_ranks.call("test_training:wrong_after", name="ddp", params=params)
    assert found == [[0, 0, 0]] * 2


@pytest.mark.parametrize(("params", "rounds"), [({}, 1), ({"accumulation": 3}, 3)])
def test_all_gradients_go_round_once_a_synchronisation(two_ranks: Ranks, params: dict[str, Any], rounds: int) -> None:
    for calls in two_ranks.call("test_ddp:calls_of_step", params=params):
        assert {(call.axis, call.op, call.ranks) for call in calls} == {("dp", "all_reduce", 2)}
        assert sum(call.num_bytes for call in calls) == rounds * 4 * NUM_SMALL


def test_without_sync_only_the_last_microbatch_sums(two_ranks: Ranks) -> None:
    for calls in two_ranks.call("test_ddp:calls_of_step", params={"accumulation": 3, "no_sync": True}):
        assert sum(call.num_bytes for call in calls) == 4 * NUM_SMALL


@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_bytes_are_those_of_the_closed_form(two_ranks: Ranks, precision: str, no_sync: bool) -> None:
    variants = [{"precision": precision, "no_sync": no_sync, "accumulation": number} for number in (1, 2)]
    for found in two_ranks.call("test_training:sent_and_expected", name="ddp", variants=variants):
        assert [sent == expected for sent, expected in found] == [True, True]


def test_small_buckets_are_really_many(two_ranks: Ranks) -> None:
    few, many = (
        two_ranks.call("test_ddp:calls_of_step", params={"bucket_mb": bucket_mb})[0] for bucket_mb in (25.0, 0.001)
    )
    assert len(few) == 1
    assert len(many) > 10


@pytest.mark.parametrize("hook", [hook for hook in HOOKS if hook != "averaged"])
def test_wrong_sums_are_caught(two_ranks: Ranks, hook: str) -> None:
    assert max(two_ranks.call("test_ddp:wrong_of_hook", hook=hook)) > 0


def test_the_hooks_themselves_are_right_when_they_average(two_ranks: Ranks) -> None:
    assert two_ranks.call("test_ddp:wrong_of_hook", hook="averaged") == [0, 0]


@pytest.mark.parametrize("params", [{}, {"precision": "bfloat16"}, {"accumulation": 2}], ids=str)
def test_gradients_that_stay_on_their_ranks_are_caught(two_ranks: Ranks, params: dict[str, Any]) -> None:
    assert max(two_ranks.call("test_ddp:wrong_without_sync", params=params)) > 0


def test_a_parameter_left_out_is_caught(two_ranks: Ranks) -> None:
    assert max(two_ranks.call("test_ddp:wrong_with_a_parameter_left_out")) > 0
