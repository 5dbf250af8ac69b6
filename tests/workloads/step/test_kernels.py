"""Kernels of a device belong to the calls that launched them, whatever order they run in; what was not seen is unknown.

Events are drawn as kineto tells them of NCCL, in ns: an operator of c10d, within it ``record_param_comms``, within
that the launch; or the launch after all operators, where calls are coalesced.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from parbench.bench.results.spans import Span
from parbench.bench.results.traced import STEP, Trace, TraceEvent, on_device, rank_timeline
from parbench.bench.world.world import Clock
from parbench.workloads.step.overlap import (
    Observed,
    Overlap,
    broken_down,
    doubts_of_ect,
    held_against,
    waited,
)
from parbench.workloads.step.sent_bytes import OTHER, SentCall

CUDA = torch.device("cuda", 0)
NS = 1e-9


def event(name: str, span: Span, **rest: Any) -> TraceEvent:
    kind = {"thread": 1, "asynchronous": False, "device": False, **rest}
    return TraceEvent(name=name, start_ns=span[0], stop_ns=span[1], **kind)


class Drawn:
    """A step of 1000 ns with arithmetic on the device; ``linked`` False leaves the operators' numbers out."""

    def __init__(self, compute: Sequence[Span], *, linked: bool = True) -> None:
        self.events = [event(STEP, (0, 1000), annotation=True, correlation=1)]
        self.events += [
            event("sm90_xmma_gemm_bf16", span, device=True, correlation=900, linked=1)
            for span in compute
        ]
        self.linked, self._number = linked, 1

    def issue(
        self,
        op: str,
        at: int,
        kernel: Span | None = None,
        name: str = "ncclDevKernel_AllGather_RING_LL",
    ) -> None:
        """Issue a call for 20 ns, and launch its kernel in the middle."""
        self.events.append(event(f"c10d::{op}", (at, at + 20), correlation=self._next()))
        self.events.append(event("record_param_comms", (at + 1, at + 19), correlation=self._next()))
        if kernel is not None:
            self.launch(at + 10, kernel, name, of=self._number if self.linked else 0)

    def launch(
        self, at: int, kernel: Span, name: str = "ncclDevKernel_SendRecv", of: int = 0
    ) -> None:
        self.events.append(
            event("cuLaunchKernelEx", (at, at + 2), correlation=7000 + at, linked=of)
        )
        self.events.append(event(name, kernel, device=True, correlation=7000 + at, linked=of))

    def trace(self) -> Trace:
        return on_device(sorted(self.events, key=lambda one: one.start_ns), 1000 * NS)

    def _next(self) -> int:
        self._number += 1
        return self._number


def call(axis: str, op: str, ranks: int = 2) -> SentCall:
    return SentCall(axis=axis, op=op, num_bytes=1024, ranks=ranks)


HSDP = (
    call("shard", "all_gather"),
    call("replicate", "all_reduce"),
    call("shard", "reduce_scatter"),
)
RING = (call("cp", "send"), call("cp", "recv"))


def hsdp(*, linked: bool) -> Trace:
    """The shards' second kernel starts before the replicas', which was issued before it."""
    drawn = Drawn([(100, 400)], linked=linked)
    drawn.issue("_allgather_base_", 100, (130, 300))
    drawn.issue("allreduce_", 150, (450, 900), "ncclDevKernel_AllReduce_Sum_bf16_RING_LL")
    drawn.issue(
        "_reduce_scatter_base_", 200, (310, 500), "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL"
    )
    return drawn.trace()


def ring(hops: int = 1) -> Trace:
    """A send and a receive leave no kernel of their own, but one together once both have been issued."""
    drawn = Drawn([(0, 250)])
    for hop in range(hops):
        at = 300 * hop
        drawn.issue("send", at + 10)
        drawn.issue("recv_", at + 40)
        drawn.launch(at + 65, (at + 200, at + 300))
    return drawn.trace()


@pytest.mark.parametrize("linked", [True, False])
def test_kernels_of_two_communicators_are_told_apart_whatever_order_they_start_in(
    linked: bool,
) -> None:
    trace = hsdp(linked=linked)
    assert trace.comm == [(130, 300), (310, 500), (450, 900)]
    seen = held_against(trace, HSDP)
    assert seen.spans == [(130, 300), (450, 900), (310, 500)]
    assert (seen.named[1], seen.unseen) == (("replicate", "all_reduce", (450, 900)), set())
    exposed = broken_down(trace, seen).exposed_comm_seconds
    assert exposed == pytest.approx(
        {"shard": 100 * NS, "replicate": 400 * NS}
    )  # of two at once the first has it


def test_a_kernel_is_the_operators_that_it_is_linked_to_though_its_launch_was_not_recorded() -> (
    None
):
    drawn = Drawn([])
    drawn.issue("allreduce_", 150, (450, 900))
    drawn.events = [one for one in drawn.events if not one.name.startswith("cuLaunch")]
    assert held_against(drawn.trace(), [call("dp", "all_reduce")]).spans == [(450, 900)]


def test_one_kernel_is_a_send_and_a_receive_and_counts_once() -> None:
    trace = ring(hops=2)
    seen = held_against(trace, RING * 2)
    assert seen.spans == [(200, 300), (200, 300), (500, 600), (500, 600)]
    assert seen.named == [("cp", "send + recv", (200, 300)), ("cp", "send + recv", (500, 600))]
    assert broken_down(trace, seen).exposed_comm_seconds == pytest.approx({"cp": 150 * NS})
    shown = rank_timeline(0, trace, seen.named, 0).intervals
    assert [one.name for one in shown if one.stream == "comm cp"] == ["send + recv"] * 2


def test_a_group_of_calls_does_not_take_those_of_another_axis_or_with_kernels_of_their_own() -> (
    None
):
    drawn = Drawn([])
    drawn.issue("send", 50, (200, 300))
    drawn.issue("allreduce_", 100)  # of one rank, which launches none
    drawn.issue("send", 130)
    drawn.issue("recv_", 160)
    drawn.launch(190, (310, 400))
    drawn.launch(195, (400, 450))  # NCCL splits what is too much for one kernel
    calls = (call("cp", "send"), call("dp", "all_reduce", ranks=1), *RING)
    seen = held_against(drawn.trace(), calls)
    assert seen.spans == [(200, 300), None, (310, 450), (310, 450)]
    assert seen.unseen == set()


def test_calls_without_kernels_are_unseen_unless_they_are_of_one_rank() -> None:
    drawn = Drawn([(0, 500)])
    drawn.issue("allreduce_", 10)
    drawn.issue("allreduce_", 40, (100, 600))
    calls = (call("dp", "all_reduce"), call("tp", "all_reduce"))
    assert held_against(drawn.trace(), calls).unseen == {"dp"}
    assert held_against(drawn.trace(), [call("dp", "all_reduce")] * 2).spans == [None, (100, 600)]
    alone = (call("dp", "all_reduce", ranks=1), call("tp", "all_reduce"))
    assert held_against(drawn.trace(), alone).unseen == set()
    none = Drawn([])
    assert held_against(none.trace(), calls).unseen == {
        "dp",
        "tp",
    }  # nor does the trace have its operators


def test_a_kernel_that_no_call_launched_leaves_axes_apart_untold_unless_there_is_one() -> None:
    drawn = Drawn([])
    drawn.issue("allreduce_", 10, (100, 200))
    drawn.issue("allreduce_", 40, (200, 300))
    drawn.events.append(event("ncclDevKernel_Broadcast_RING_LL", (300, 400), device=True))
    for axes, shown in ((("dp", "tp"), OTHER), (("dp", "dp"), "dp")):
        seen = held_against(drawn.trace(), [call(axis, "all_reduce") for axis in axes])
        assert (seen.spans, {axis for axis, _, _ in seen.named}, seen.unseen) == (
            [],
            {shown},
            set(),
        )


def test_a_devices_wait_is_for_communication_that_nothing_hides_though_its_host_stands_still() -> (
    None
):
    drawn = Drawn([(0, 800)])
    drawn.issue("allreduce_", 10, (100, 850))
    assert waited(drawn.trace()) == pytest.approx(50 * NS)


def summed_up(trace: Trace, calls: Sequence[SentCall], *, watched: float = 1.0) -> Any:
    """Return what a rank's three traces say; watched steps take so many times as long as plain ones."""
    seen = held_against(trace, calls)
    axes = {one.axis: [0] for one in calls}
    kinds = {kind: [1.0, 1.0, 1.0] for kind in ("plain", "watched", "silenced", "traced")}
    observed = Observed(
        calls=tuple(calls),
        members=axes,
        walls={**kinds, "watched": [watched] * 3},
        arithmetic=kinds,
        breakdowns=[broken_down(trace, seen)] * 3,
        comm=[seen.spans] * 3,
        unseen=[seen.unseen] * 3,
        wait_seconds=[waited(trace)] * 3,
        middle=1,
        timeline=rank_timeline(0, trace, seen.named, 0),
        kernels=[trace.kernels] * 3,
    )
    clock = Clock(offsets_ns=(0,), uncertainty_ns=0, method="one")
    world: Any = SimpleNamespace(clock=clock, device=CUDA)
    layout: Any = SimpleNamespace(axes=axes, holds_stage_only=False)
    return Overlap(world, layout).summarise([observed])


def test_what_was_not_seen_is_unknown_and_never_zero() -> None:
    drawn = Drawn([(0, 500)])
    drawn.issue("allreduce_", 10)
    told = summed_up(drawn.trace(), [call("dp", "all_reduce")])
    found = {name: metric.value for name, metric in told.metrics.items()}
    unknown = {"exposed_comm.dp", "overlap", "idle", "comm_wait"}
    assert {name for name, value in found.items() if value is None} == unknown
    assert found["compute"] == pytest.approx(500 * NS)
    assert not {name for name in found if name.startswith(("comm_transfer", "straggler"))}
    assert told.notes == (
        "exposed, idle and wait are unknown: the profiler saw not all calls on dp",
    )


def test_what_was_seen_is_told_by_axis() -> None:
    told = summed_up(hsdp(linked=True), HSDP)
    found = {name: cast(float, metric.value) / NS for name, metric in told.metrics.items()}
    expected = {
        "exposed_comm.shard": 100,
        "exposed_comm.replicate": 400,
        "comm_wait": 500,
        "idle": 200,
    }
    expected |= {"comm_transfer.shard": 360, "comm_transfer.replicate": 450, "straggler_wait": 0}
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert told.notes == ()


def test_an_ect_of_a_device_that_waits_for_its_host_is_called_a_lower_bound() -> None:
    [note] = summed_up(hsdp(linked=True), HSDP, watched=1.3).notes
    assert note.startswith("ect is a lower bound: the watched step takes 1.30 times")
    assert (
        doubts_of_ect(CUDA, 0.04)
        == doubts_of_ect(CUDA, None)
        == doubts_of_ect(torch.device("cpu"), 0.5)
        == ()
    )
