"""How a row's calls add up: by hand where two or three numbers say it, DDP's buckets as torch fills them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parbench.workloads.catalogue import STRATEGIES
from parbench.workloads.costs.communication_pattern import calls
from parbench.workloads.costs.parameter_table import ParameterPart, num_parameters, parts_of
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.model.shapes import SHAPES
from parbench.workloads.model.transformer import Transformer
from parbench.workloads.pipeline_parallel.bubbles import closed_form
from parbench.workloads.planner.link_time import PlacedCall
from parbench.workloads.planner.measured.validate import (
    Bucket,
    RowTime,
    buckets_of,
    declared_compute,
    exposed_seconds,
    row_time,
)
from parbench.workloads.planner.placement import Place
from tests.support.training_steps import DEFINITION_BY_NAME, resolve_preset

RATE, LATENCY = 25e6, 1e-3
MEBI = 2**20
TINY = SHAPES["tiny"]


def step(name: str, ranks: int = 4, **params: Any) -> StepSpec:
    name, params = resolve_preset(name, params)
    return STRATEGIES[name](
        DEFINITION_BY_NAME[name].whole({"shape": "tiny", **params}), ranks, "cpu"
    )


def seconds(call: PlacedCall) -> float:
    return LATENCY + call.sent / call.count / RATE


def calls_of(asked: StepSpec) -> list[PlacedCall]:
    busiest = max(
        (calls(asked.at(rank)) for rank in range(asked.world)),
        key=lambda of: sum(one.sent for one in of),
    )
    return [PlacedCall.of(one, Place(ranks=one.ranks, on_node=1)) for one in busiest]


def took(asked: StepSpec, op: str = "") -> float:
    return sum(call.count * seconds(call) for call in calls_of(asked) if op in ("", call.op))


def longest(asked: StepSpec, op: str) -> float:
    return max(seconds(call) for call in calls_of(asked) if call.op == op)


def timed(asked: StepSpec, compute: float = 0.3, **more: Any) -> RowTime:
    return row_time(asked, calls_of(asked), seconds, compute_seconds=compute, **more)


def shown(asked: StepSpec, compute: float, **more: Any) -> float:
    return sum(timed(asked, compute, **more).exposed_seconds.values())


def test_where_nothing_hides_a_step_is_compute_and_all_its_calls() -> None:
    for name in ("tp", "tp_sp", "zero2", "zero3", "hsdp"):
        asked = step(name)
        found = timed(asked)
        assert found.seconds == pytest.approx(0.3 + took(asked)), name
        assert sum(found.exposed_seconds.values()) == pytest.approx(took(asked)), name
        assert found.rule == "nothing hides communication"
    assert timed(step("ddp", ranks=1)).seconds == 0.3


def test_buckets_pass_beside_the_backward_pass_after_each_microbatch_that_synchronises() -> None:
    one, many = step("ddp"), step("ddp", bucket_mb=1.0)
    assert timed(one).seconds == pytest.approx(0.3 + took(one))
    found = timed(many, compute=100.0)
    buckets, [call] = buckets_of(parts(), cap_bytes=MEBI, element_bytes=4), calls_of(many)

    def summed(size_bytes: int) -> float:
        return seconds(replace(call, num_bytes=size_bytes, count=1))

    assert found.seconds == pytest.approx(100 + summed(buckets[-1].size_bytes))
    assert found.rule == "4 buckets summed in turn beside the backward pass"
    for compute in (0.03, 0.3):
        assert shown(many, compute) == pytest.approx(
            exposed_seconds(buckets, summed, compute * 2 / 3)
        ), compute
    once, twice = step("ddp", accumulation=2, no_sync=True), step("ddp", accumulation=2)
    assert timed(twice).seconds - 0.3 == pytest.approx(2 * (timed(once).seconds - 0.3))
    zero1 = step("zero1", bucket_mb=0.2)  # whose broadcasts come after the update
    assert timed(zero1, compute=1000.0).seconds > 1000 + took(zero1, "broadcast") > 1000


def test_gathers_asked_for_ahead_hide_on_gloo_and_on_nccl_scatters_too() -> None:
    ahead, plain = step("zero3", prefetch="explicit"), step("zero3")
    assert shown(ahead, 1000.0) == pytest.approx(
        took(ahead, "reduce_scatter") + longest(ahead, "all_gather")
    )
    assert shown(ahead, 0.0) == pytest.approx(took(ahead))
    both = longest(plain, "all_gather") + longest(plain, "reduce_scatter")
    assert shown(plain, 1000.0, backend="nccl") == pytest.approx(both)


def test_a_pipeline_over_links_of_no_length_is_its_closed_form() -> None:
    for schedule, chunks in (("gpipe", 1), ("1f1b", 1), ("zb_h1", 1), ("interleaved", 2)):
        asked = step("pp", schedule=schedule, microbatches=8, layers=8)
        found = row_time(asked, calls_of(asked), lambda call: 0.0, compute_seconds=2.4)
        form = closed_form(schedule, ranks=4, microbatches=8, chunks=chunks, f=0.1, i=0.1, w=0.1)
        assert form.makespan_bubble_seconds is not None
        assert found.seconds == pytest.approx(2.4 + form.makespan_bubble_seconds), schedule
        assert found.exposed_seconds == {"pp": 0.0}


def test_messages_lengthen_a_pipeline_and_gloos_set_out_only_when_their_receiver_asks() -> None:
    def hops_of(schedule: str, backend: str) -> float:
        asked = step("pp", schedule=schedule, microbatches=8)
        found = row_time(
            asked, calls_of(asked), lambda call: 0.01, compute_seconds=2.4, backend=backend
        )
        return found.exposed_seconds["pp"] / 0.01

    assert hops_of("gpipe", "nccl") == pytest.approx(2 * 3)
    # the last two ranks hold two microbatches between them: two messages are waited for in every two
    assert 2 * 3 + 8 <= hops_of("1f1b", "nccl") <= 2 * 3 + 2 * 8
    assert hops_of("gpipe", "gloo") == pytest.approx(2 * 3 + 2 * (8 - 1))
    assert hops_of("1f1b", "gloo") > hops_of("1f1b", "nccl")


def test_a_pipeline_waits_for_its_longest_stage_and_what_lies_outside_is_added() -> None:
    asked = step("pp", schedule="1f1b", microbatches=8)
    assert timed(asked, outside_seconds=1.0).seconds == pytest.approx(timed(asked).seconds + 1.0)
    even, uneven = (
        step("pp", schedule="1f1b", microbatches=8, layers=8, split=split)
        for split in ("", "5+1+1+1")
    )
    assert timed(uneven, compute=2.4).seconds > 1.5 * timed(even, compute=2.4).seconds


def test_row_time_adds_tp_within_the_pipeline_and_dp_after_it() -> None:
    asked = step("hybrid", ranks=8, mesh="dp=2,pp=2,tp=2", microbatches=4)
    made = calls_of(asked)
    each = {
        axis: sum(c.count * seconds(c) for c in made if c.axis == axis) for axis in ("dp", "tp")
    }
    found = row_time(
        asked, made, lambda call: 0.0 if call.axis == "pp" else seconds(call), compute_seconds=0.4
    )
    assert found.seconds == pytest.approx((0.4 + each["tp"]) * (1 + 1 / 4) + each["dp"])


def test_declared_compute_is_three_passes_or_four_with_recomputation() -> None:
    assert declared_compute(step("ddp", compute="timed:50ms", accumulation=2)) == pytest.approx(0.3)
    assert declared_compute(step("pp", compute="timed:50ms", microbatches=8)) == pytest.approx(1.2)
    assert declared_compute(
        step("ddp", compute="timed:50ms", checkpointing="full")
    ) == pytest.approx(0.2)
    assert declared_compute(step("ddp")) is None


def parts() -> list[ParameterPart]:
    return list(parts_of(step("ddp").at(0)))


def test_buckets_are_filled_as_torch_fills_them_with_every_gradient_once() -> None:
    order = [part.name for part in parts()]
    with torch.device("meta"):
        named = sorted(Transformer(TINY).named_parameters(), key=lambda each: order.index(each[0]))
    tensors = [parameter for _, parameter in reversed(named)]
    assign: Any = vars(dist)["_compute_bucket_assignment_by_size"]
    for cap in (50_000, MEBI):
        [reducer, _] = assign([torch.empty(tensor.shape) for tensor in tensors], [cap])
        torchs = [sum(tensors[i].numel() * 4 for i in bucket) for bucket in reducer]
        assert [
            bucket.size_bytes for bucket in buckets_of(parts(), cap_bytes=cap, element_bytes=4)
        ] == torchs
        assert sum(torchs) == 4 * num_parameters(TINY)
    [whole], [half] = (
        buckets_of(parts(), cap_bytes=25 * MEBI, element_bytes=size) for size in (4, 2)
    )
    assert whole.size_bytes == 2 * half.size_bytes


def test_short_buckets_show_the_last_alone_and_long_ones_all_that_the_pass_does_not_cover() -> None:
    assert exposed_seconds([Bucket(size_bytes=10, ready=1.0)], lambda size: size / 10, 5.0) == 1.0
    four = [Bucket(size_bytes=1, ready=(i + 1) / 4) for i in range(4)]
    assert exposed_seconds(four, lambda size: 0.5, 8.0) == 0.5
    assert exposed_seconds(four, lambda size: 4.0, 8.0) == 8 / 4 + 4 * 4.0 - 8.0
