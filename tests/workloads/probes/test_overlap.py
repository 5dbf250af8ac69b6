"""The parts of a step's explanation add up to its wall time, and calls own their kernels."""

import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

import pytest

from parbench.bench.results.spans import compute_breakdown
from parbench.bench.results.step_trace import StepTrace
from parbench.bench.world.benchmark import Explanation
from parbench.bench.world.world import World
from parbench.workloads.probes import overlap
from parbench.workloads.probes.overlap import (
    compute_ect,
    match_spans_to_calls,
)
from parbench.workloads.probes.probe import trace_step
from parbench.workloads.probes.sent_bytes import OTHER, SentCall
from tests.support.ranks import Ranks
from tests.support.workloads.kernels import make_kernel
from tests.support.workloads.training_steps import build_trained_step, metric_value

MS = 1_000_000
NS = 1e-9


def test_ect_is_difference_of_slowest_ranks() -> None:
    first_rank = {"instrumented": [5.0, 1.0], "without_comm": [1.0, 1.0]}
    second_rank = {"instrumented": [2.0, 4.0], "without_comm": [3.0, 2.0]}
    ect = compute_ect([first_rank, second_rank])
    assert ect is not None
    assert ect.value == pytest.approx(2.0)


@pytest.mark.parametrize("ranks", [2, 32])
def test_ect_of_equal_times_is_zero(ranks: int) -> None:
    """The maxima over many ranks differ by chance, in both directions."""
    source = random.Random(5)

    def draw() -> list[float]:
        return [source.lognormvariate(0, 0.5) for _ in range(4)]

    values: list[float] = []
    covered = 0
    for _ in range(300):
        walls = [{"instrumented": draw(), "without_comm": draw()} for _ in range(ranks)]
        estimate = compute_ect(walls)
        assert estimate is not None
        assert estimate.low is not None
        assert estimate.high is not None
        values.append(estimate.value)
        covered += estimate.low <= 0 <= estimate.high
    assert abs(fmean(values)) < 0.15 * stdev(values)
    assert covered > 0.92 * 300


def explain(world: World, name: str) -> tuple[Explanation, float]:
    """Return the explanation, and the wall time of this rank's only trace with communication."""
    step = build_trained_step(world, name)
    traces = []

    def record_trace(*args: object) -> StepTrace:
        traces.append(trace_step(*args))  # type: ignore[arg-type]
        return traces[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "trace_step", record_trace)
        explanation = step.explain_step(step.reset, 0.0)
    step.close()
    return explanation, traces[0].seconds


def assert_adds_up(ranks: Ranks, name: str, axes: Sequence[str]) -> None:
    """The parts add up to the slowest rank's wall time, and bytes are the analytical ones."""
    results = ranks.call(f"{__name__}:explain", name=name)
    wall = max(wall for _, wall in results)
    explanation = results[0][0]
    parts = ["compute", "exposed_copy", "idle", *(f"exposed_comm.{axis}" for axis in axes)]
    seconds = [metric_value(explanation, part) for part in parts]
    assert seconds[0] > 0
    assert min(seconds) >= 0
    assert sum(seconds) == pytest.approx(wall, abs=1e-6)
    assert metric_value(explanation, f"bytes_ratio.{axes[-1]}") == pytest.approx(1)
    assert metric_value(explanation, f"bytes_sent.{axes[-1]}") > 0
    assert metric_value(explanation, f"comm_transfer.{axes[-1]}") > 0


def test_explanation_adds_up(two_ranks: Ranks) -> None:
    assert_adds_up(two_ranks, "ddp", ["dp"])


@pytest.mark.full
def test_explanation_of_two_axes_adds_up(four_ranks: Ranks) -> None:
    assert_adds_up(four_ranks, "tp_fsdp", ["fsdp", "tp"])


def explain_fake_traces(world: World, comm_is_seen: bool) -> Explanation:
    """Return the explanation of a DDP step in which rank 1 comes 5 ms late to the only call.

    The clock of rank 1 is 77 ms ahead, and it begins 2 us after rank 0.
    """
    offsets_ns = (0, 77 * MS)
    clock = replace(world.clock, offsets_ns=offsets_ns, uncertainty_ns=500)
    step = build_trained_step(replace(world, clock=clock), "ddp")
    late = 5 * MS * world.rank

    def make_trace(*_: object) -> StepTrace:
        return StepTrace(
            step=(0, (20 + world.rank) * MS),
            compute=[(0, 8 * MS)],
            comm=[make_kernel(4 * MS + late, 14 * MS)] if comm_is_seen else [],
            copies=[(12 * MS, 13 * MS)],
            start_ns=MS + 2_000 * world.rank + offsets_ns[world.rank],
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "trace_step", make_trace)
        explanation = step.explain_step(world.barrier, 1e-6)
    step.close()
    return explanation


def test_explanation_of_late_rank(two_ranks: Ranks) -> None:
    explanation, _ = two_ranks.call(f"{__name__}:explain_fake_traces", comm_is_seen=True)
    expected_ms = {
        "compute": 8,
        "exposed_comm.dp": 4,
        "exposed_copy": 1,
        "idle": 8,
        "comm_transfer.dp": 5,
        "straggler_wait": 5,
    }
    for name, milliseconds in expected_ms.items():
        assert 1e3 * metric_value(explanation, name) == pytest.approx(milliseconds), name
    assert explanation.timeline is not None
    assert explanation.timeline.uncertainty_seconds == 5e-7
    assert [rank.start_us for rank in explanation.timeline.ranks] == [0.0, 2.0]


def test_unseen_communication_is_unknown(two_ranks: Ranks) -> None:
    explanation, _ = two_ranks.call(f"{__name__}:explain_fake_traces", comm_is_seen=False)
    for name in ("exposed_comm.dp", "overlap", "idle"):
        assert explanation.metrics[name].value is None, name
    assert metric_value(explanation, "compute") == pytest.approx(8e-3)
    assert any("dp" in note for note in explanation.notes)


def sent_call(axis: str, op: str, ranks: int = 2) -> SentCall:
    return SentCall(axis=axis, op=op, num_bytes=1024, ranks=ranks)


def make_trace(**spans: Any) -> StepTrace:
    """Return the trace of a step of 1000 ns."""
    return StepTrace(step=(0, 1000), **spans)


SEND = sent_call("cp", "send")
RECV = sent_call("cp", "recv")


def test_kernel_of_send_and_recv_counts_once() -> None:
    """NCCL launches one kernel for both, after both have been issued."""
    trace = make_trace(
        compute=[(0, 250)],
        issue_spans=[(10, 30), (40, 60), (310, 330), (340, 360)],
        comm=[make_kernel(200, 300, 65), make_kernel(500, 600, 365)],
    )
    matched = match_spans_to_calls(trace, [SEND, RECV, SEND, RECV])
    assert matched.spans == [(200, 300), (200, 300), (500, 600), (500, 600)]
    assert matched.named == [
        ("cp", "send + recv", (200, 300), 1024),
        ("cp", "send + recv", (500, 600), 1024),
    ]
    parts = compute_breakdown(trace.step, trace.compute, matched.group_by_axis(), trace.copies)
    assert parts.exposed_comm_seconds == pytest.approx({"cp": 150 * NS})


def test_call_without_kernel_is_unseen() -> None:
    trace = make_trace(
        issue_spans=[(10, 30), (40, 60)],
        comm=[make_kernel(100, 600, 50)],
    )
    calls = [sent_call("dp", "all_reduce"), sent_call("tp", "all_reduce")]
    matched = match_spans_to_calls(trace, calls)
    assert matched.spans == [None, (100, 600)]
    assert matched.unseen == {"dp"}


@pytest.mark.parametrize("launched", [None, 5])
@pytest.mark.parametrize(("axes", "axis"), [(["dp", "tp"], OTHER), (["dp", "dp"], "dp")])
def test_kernel_of_no_call_hides_axes(axes: list[str], axis: str, launched: int | None) -> None:
    trace = make_trace(
        issue_spans=[(10, 30), (40, 60)],
        comm=[
            make_kernel(100, 200, 20),
            make_kernel(200, 300, 50),
            make_kernel(300, 400, launched),
        ],
    )
    calls = [sent_call(name, "all_reduce") for name in axes]
    matched = match_spans_to_calls(trace, calls)
    assert matched.spans == []
    assert {call.axis for call in matched.named} == {axis}
