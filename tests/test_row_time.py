"""How a row's calls add up: by hand where two or three numbers say it, and between the bounds that always hold."""

from dataclasses import replace
from typing import Any

import pytest

from workloads.definitions import with_defaults
from workloads.hybrid.hybrid_tensors import parts_of_rank
from workloads.pipeline.bubbles import closed_form
from workloads.planner.ddp_buckets import buckets_of
from workloads.planner.link_time import Call
from workloads.planner.row_calls import Step, expected
from workloads.planner.row_time import RowTime, declared_compute, row_time

RATE, LATENCY = 25e6, 1e-3


def step(name: str, ranks: int = 4, **params: Any) -> Step:
    return Step(name=name, params=with_defaults({"shape": "tiny", **params}, name), ranks=ranks, on_node=1)


def seconds(call: Call) -> float:
    return LATENCY + call.sent / call.count / RATE


def calls_of(asked: Step) -> list[Call]:
    wanted = expected(asked)
    assert not isinstance(wanted, str)
    return [call for call in wanted.calls if call.place.ranks > 1]


def took(asked: Step) -> float:
    return sum(call.count * seconds(call) for call in calls_of(asked))


def timed(asked: Step, compute: float = 0.3, **more: Any) -> RowTime:
    return row_time(asked, calls_of(asked), seconds, compute_seconds=compute, **more)


# --- compute that is known beforehand ---


def test_timed_compute_is_three_passes_of_each_microbatch() -> None:
    assert declared_compute(step("ddp", compute="timed:50ms", accumulation=2)) == pytest.approx(0.3)
    assert declared_compute(step("pp", compute="timed:50ms", microbatches=8)) == pytest.approx(1.2)


def test_a_checkpointed_forward_runs_again() -> None:
    assert declared_compute(step("ddp", compute="timed:50ms", checkpointing="full")) == pytest.approx(0.2)


def test_real_compute_is_not_known_beforehand() -> None:
    assert declared_compute(step("ddp")) is None


# --- what stands in the way ---


@pytest.mark.parametrize("name", ["tp", "tp_sp", "zero2", "zero3", "hsdp"])
def test_where_nothing_hides_a_step_is_compute_and_all_its_calls(name: str) -> None:
    asked = step(name)
    found = timed(asked)
    assert found.seconds == pytest.approx(0.3 + took(asked))
    assert sum(found.exposed_seconds.values()) == pytest.approx(took(asked))
    assert found.rule == "nothing hides communication"


def test_one_rank_waits_for_nobody() -> None:
    assert timed(step("ddp", ranks=1)).seconds == 0.3


# --- what passes beside compute ---


def test_one_bucket_comes_after_the_backward_pass() -> None:
    asked = step("ddp")
    assert timed(asked).seconds == pytest.approx(0.3 + took(asked))


def test_many_buckets_hide_all_but_the_last_where_links_are_fast_enough() -> None:
    asked = step("ddp", bucket_mb=1.0)
    found = timed(asked, compute=100.0)
    last = buckets_of(parts_of_rank(asked.shape, (0,), (4,)), cap_bytes=2**20, element_bytes=4)[-1]
    [call] = calls_of(asked)
    assert found.seconds == pytest.approx(100 + seconds(replace(call, num_bytes=last.size_bytes, count=1)))
    assert found.rule == "4 buckets summed in turn beside the backward pass"


def test_many_buckets_on_slow_links_show_what_the_backward_pass_does_not_cover() -> None:
    asked = step("ddp", bucket_mb=1.0)
    shown = sum(timed(asked, compute=0.03).exposed_seconds.values())
    assert took(asked) - 0.02 <= shown <= took(asked) * 1.05


def test_sums_after_each_microbatch_show_each_time() -> None:
    once, twice = step("ddp", accumulation=2, no_sync=True), step("ddp", accumulation=2)
    assert timed(twice).seconds - 0.3 == pytest.approx(2 * (timed(once).seconds - 0.3))


def test_the_broadcasts_of_zero1_come_after_the_update() -> None:
    asked = step("zero1", bucket_mb=0.2)
    broadcasts = sum(call.count * seconds(call) for call in calls_of(asked) if call.op == "broadcast")
    assert broadcasts > 0
    assert timed(asked, compute=1000.0).seconds > 1000 + broadcasts


def test_gathers_asked_for_ahead_hide_on_gloo_but_its_scatters_do_not() -> None:
    asked = step("zero3", prefetch="explicit")
    by_op = {
        op: sum(c.count * seconds(c) for c in calls_of(asked) if c.op == op) for op in ("all_gather", "reduce_scatter")
    }
    shown = sum(timed(asked, compute=1000.0).exposed_seconds.values())
    longest = max(seconds(call) for call in calls_of(asked) if call.op == "all_gather")
    assert shown == pytest.approx(by_op["reduce_scatter"] + longest)
    assert sum(timed(asked, compute=0.0).exposed_seconds.values()) == pytest.approx(took(asked))


def test_on_nccl_scatters_hide_too() -> None:
    asked = step("zero3")
    shown = sum(timed(asked, compute=1000.0, backend="nccl").exposed_seconds.values())
    longest = {
        op: max(seconds(call) for call in calls_of(asked) if call.op == op) for op in ("all_gather", "reduce_scatter")
    }
    assert shown == pytest.approx(sum(longest.values()))


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3", "hsdp", "tp", "tp_sp"])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("compute", [0.0, 0.1, 10.0])
def test_a_step_is_no_shorter_than_its_compute_and_no_longer_than_all_in_turn(
    name: str, backend: str, compute: float
) -> None:
    bucketed: list[dict[str, Any]] = [{}, {"bucket_mb": 1.0}]
    for params in bucketed if name in ("ddp", "zero1") else bucketed[:1]:
        asked = step(name, **params)
        found = timed(asked, compute=compute, backend=backend).seconds
        assert compute <= found <= compute + took(asked) * 1.2 + 1e-9  # more buckets pay more latency


# --- pipelines ---


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "interleaved"])
def test_a_pipeline_over_links_of_no_length_is_its_closed_form(schedule: str) -> None:
    asked = step("pp", schedule=schedule, microbatches=8, layers=8)
    found = row_time(asked, calls_of(asked), lambda call: 0.0, compute_seconds=2.4)
    chunks = 2 if schedule == "interleaved" else 1
    form = closed_form(schedule, ranks=4, microbatches=8, chunks=chunks, f=0.1, i=0.1, w=0.1)
    assert form.makespan_bubble_seconds is not None
    assert found.seconds == pytest.approx(2.4 + form.makespan_bubble_seconds)
    assert found.exposed_seconds == {"pp": 0.0}


def hops_of(schedule: str, backend: str) -> float:
    """Return how many messages' time a step of four stages and eight microbatches waits for."""
    asked = step("pp", schedule=schedule, microbatches=8)
    found = row_time(asked, calls_of(asked), lambda call: 0.01, compute_seconds=2.4, backend=backend)
    return found.exposed_seconds["pp"] / 0.01


def test_messages_that_pass_beside_compute_lengthen_gpipe_by_its_way_in_and_out() -> None:
    assert hops_of("gpipe", "nccl") == pytest.approx(2 * 3)


def test_1f1b_waits_for_messages_in_its_steady_state_too() -> None:
    # the last two ranks hold two microbatches between them: two messages are waited for in every two
    assert 2 * 3 + 8 <= hops_of("1f1b", "nccl") <= 2 * 3 + 2 * 8


def test_gloos_messages_set_out_when_their_receiver_asks_so_that_each_microbatch_waits() -> None:
    assert hops_of("gpipe", "gloo") == pytest.approx(2 * 3 + 2 * (8 - 1))
    assert hops_of("1f1b", "gloo") > hops_of("1f1b", "nccl")


def test_what_lies_outside_is_added() -> None:
    asked = step("pp", schedule="1f1b", microbatches=8)
    assert timed(asked, outside_seconds=1.0).seconds == pytest.approx(timed(asked).seconds + 1.0)


def test_uneven_stages_take_as_long_as_the_longest() -> None:
    even, uneven = (step("pp", schedule="1f1b", microbatches=8, layers=8, split=split) for split in ("", "5+1+1+1"))
    assert timed(uneven, compute=2.4).seconds > 1.5 * timed(even, compute=2.4).seconds


def test_on_a_mesh_tensor_calls_lengthen_the_pipelines_passes_and_sums_come_after() -> None:
    asked = step("hybrid", ranks=8, mesh="dp=2,pp=2,tp=2", microbatches=4)
    calls = calls_of(asked)
    parts = {axis: sum(c.count * seconds(c) for c in calls if c.axis == axis) for axis in ("dp", "tp")}
    found = row_time(asked, calls, lambda call: 0.0 if call.axis == "pp" else seconds(call), compute_seconds=0.4)
    busy = 0.4 + parts["tp"]
    assert found.seconds == pytest.approx(busy * (1 + 1 / 4) + parts["dp"])
