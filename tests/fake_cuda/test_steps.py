"""Training steps on stub GPUs: results, communicators, order of communication, and waiting."""

from typing import Any

import pytest

from tests.fake_cuda.stub import RanksOnStub
from tests.fake_cuda.traces import (
    ALLOCATING,
    Call,
    collective_orders,
    left_communicators,
    timed_regions,
)

pytestmark = pytest.mark.cuda_stub
Step = tuple[str, dict[str, Any]]
SMALL = {"layers": 2, "microbatch": 2}
STEPS: dict[str, Step] = {
    "ddp": ("ddp", {}),
    "ddp_bf16": ("ddp", {"precision": "bfloat16", "grad_compression": "bf16"}),
    "zero1": ("zero1", {}),
    "fsdp": ("fsdp", {}),
    "fsdp_bf16": ("fsdp", {"precision": "bfloat16"}),
    "hsdp": ("hsdp", {}),
    "tp_fsdp": ("tp_fsdp", {}),
    "pp": ("pp", {"microbatches": 4}),
    "cp": ("cp", {}),
    "ep_dispatch": ("ep_dispatch", {}),
    "ep_layer": ("ep_layer", {}),
    "hybrid": ("hybrid", {"mesh": "dp=2"}),
    "tp": ("tp", {}),
    "tp_sp": ("tp_sp", {}),
    "ep_step": ("ep_step", {}),
}
"""Steps and their parameters."""

NUM_SPLITS = {"hsdp": 1, "tp_fsdp": 1, "cp": 1, "ep_dispatch": 1, "ep_layer": 1, "ep_step": 1}
"""Communicators that a case splits from the world's."""

MAX_WAITS = {"ep_dispatch": 12, "ep_layer": 16, "ep_step": 40, "hybrid": 40}
"""Most waits for the device in a timed step. Dispatch of tokens reads how many go where."""


def run_step(ranks: RanksOnStub, name: str) -> tuple[tuple[str, str, Any], list[list[Call]]]:
    """Measure a step, and return the answer of rank 0 and the calls of each rank meanwhile."""
    short_name, params = STEPS[name]
    [answer, *_] = ranks.call(
        "tests.fake_cuda.cases:measure_case",
        name=f"workload.{short_name}",
        params={**SMALL, **params},
        label=name,
    )
    return answer, [trace.between(f"{name}:start", f"{name}:end") for trace in ranks.traces()]


@pytest.mark.parametrize("name", STEPS)
def test_step_is_correct(two_ranks_on_stub: RanksOnStub, name: str) -> None:
    (status, reason, _), calls_by_rank = run_step(two_ranks_on_stub, name)
    assert (status, reason) == ("ok", "")
    for calls in calls_by_rank:
        names = [call.name for call in calls]
        assert names.count("ncclCommSplit") == NUM_SPLITS.get(name, 0)
        assert names.count("ncclCommDestroy") == names.count("ncclCommInit")
        region = list(timed_regions(calls))[-1]
        waits = [call.name for call in region.calls if call.waits_for_device]
        assert len(waits) <= MAX_WAITS.get(name, 0), waits
        assert [call.name for call in region.calls if call.name in ALLOCATING] == []


def test_step_uses_its_own_groups_after_another_step(two_ranks_on_stub: RanksOnStub) -> None:
    for name in ("ep_layer", "ep_step"):
        (status, reason, _), _ = run_step(two_ranks_on_stub, name)
        assert (status, reason) == ("ok", "")


def test_ranks_communicate_in_the_same_order(two_ranks_on_stub: RanksOnStub) -> None:
    run_step(two_ranks_on_stub, "hsdp")
    traces = two_ranks_on_stub.traces()
    for name, (order, *others) in collective_orders(traces).items():
        assert all(other == order for other in others), name


def test_only_the_world_communicator_is_left(two_ranks_on_stub: RanksOnStub) -> None:
    for trace in two_ranks_on_stub.traces():
        [first, *_] = trace.communicators
        assert left_communicators(trace) == {first}
