"""Training steps on stub GPUs: results, communicators, order of communication, and waiting."""

from collections import Counter
from typing import Any

import pytest

from tests.fake_cuda.stub import RanksOnStub
from tests.fake_cuda.traces import ALLOCATING, Call, collective_orders, left_communicators

pytestmark = pytest.mark.cuda_stub
SMALL = {"layers": 2, "microbatch": 2}
STEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "ddp_bf16": ("ddp", {"precision": "bfloat16", "reduce_dtype": "bfloat16"}),
    "zero1": ("zero1", {}),
    "fsdp": ("fsdp", {}),
    "fsdp_bf16": ("fsdp", {"precision": "bfloat16"}),
    "hsdp": ("hsdp", {}),
    "tp_fsdp": ("tp_fsdp", {}),
    "pp": ("pp", {"microbatches": 4}),
    "cp": ("cp", {}),
    "ep_dispatch": ("ep_dispatch", {}),
    "ep_layer": ("ep_layer", {}),
    "ep_layer_bf16": ("ep_layer", {"precision": "bfloat16"}),
    "hybrid": ("hybrid", {"mesh": "dp=2"}),
    "tp_linear": ("tp_linear", {"style": "row"}),
    "tp_ffn": ("tp_ffn", {"style": "megatron"}),
    "tp": ("tp", {}),
    "tp_sp": ("tp_sp", {}),
    "ep_step": ("ep_step", {}),
    "ep_step_bf16": ("ep_step", {"precision": "bfloat16"}),
}
"""Steps and their parameters."""

NUM_SPLITS = dict.fromkeys(STEPS, 1) | {
    "cp": 2,  # dp sums gradients, and cp exchanges keys and values
    "ep_step": 2,  # dp sums gradients, and ep exchanges tokens
    "ep_step_bf16": 2,
}
"""Communicators that a case splits from the world's: one for each axis that communicates."""

NUM_READS = Counter(
    ep_dispatch=1,  # how many tokens travel, once for each dispatch
    ep_layer_bf16=1,
    ep_layer=1 + 6,  # torch's grouped_mm of float32 reads its groups: 2 forward and 4 backward
    ep_step_bf16=2,  # two layers
    ep_step=2 * (1 + 6),
)
"""Copies from the device that a step waits for."""


def run_on_ranks(ranks: RanksOnStub, function: str, name: str) -> tuple[Any, list[list[Call]]]:
    """Run a function of cases.py; return rank 0's answer and the calls of each rank meanwhile."""
    short_name, params = STEPS[name]
    label = f"{function}:{name}"
    [answer, *_] = ranks.call(
        f"tests.fake_cuda.cases:{function}",
        name=f"workload.{short_name}",
        params={**SMALL, **params},
        label=label,
    )
    return answer, [trace.between(f"{label}:start", f"{label}:end") for trace in ranks.traces()]


@pytest.mark.parametrize("name", STEPS)
def test_step_is_correct(two_ranks_on_stub: RanksOnStub, name: str) -> None:
    (status, reason, _), calls_by_rank = run_on_ranks(two_ranks_on_stub, "measure_case", name)
    assert (status, reason) == ("ok", "")
    for calls in calls_by_rank:
        names = [call.name for call in calls]
        assert names.count("ncclCommSplit") == NUM_SPLITS[name]
        assert names.count("ncclCommDestroy") == names.count("ncclCommInit")


@pytest.mark.parametrize("name", STEPS)
def test_step_neither_waits_nor_allocates(two_ranks_on_stub: RanksOnStub, name: str) -> None:
    _, calls_by_rank = run_on_ranks(two_ranks_on_stub, "take_step", name)
    for calls in calls_by_rank:
        waits = [call.name for call in calls if call.waits_for_device]
        assert waits == ["cudaMemcpyAsync", "cudaStreamSynchronize"] * NUM_READS[name]
        assert [call.name for call in calls if call.name in ALLOCATING] == []


def test_ranks_communicate_in_the_same_order(two_ranks_on_stub: RanksOnStub) -> None:
    run_on_ranks(two_ranks_on_stub, "measure_case", "hsdp")
    traces = two_ranks_on_stub.traces()
    for name, (first_order, *orders) in collective_orders(traces).items():
        assert all(order == first_order for order in orders), name


def test_only_the_world_communicator_is_left(two_ranks_on_stub: RanksOnStub) -> None:
    for trace in two_ranks_on_stub.traces():
        [first, *_] = trace.communicators
        assert left_communicators(trace) == {first}
