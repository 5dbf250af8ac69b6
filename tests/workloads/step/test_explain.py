"""Calls are counted and silenced, and the parts of an explanation add up to the wall time."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parbench.bench.results.traced import Trace
from parbench.bench.world.benchmark import Explanation
from parbench.bench.world.world import World
from parbench.workloads.step.overlap import differences
from parbench.workloads.step.probe import trace_step
from parbench.workloads.step.sent_bytes import OTHER, Silenced, counted, fake_twins
from parbench.workloads.step.training_step import TrainingStep
from tests.support.ranks import Ranks
from tests.support.training_steps import build_trained_step

TRACE_STEP = "parbench.workloads.step.overlap.trace_step"
MS = 1_000_000
Call = tuple[str, str, int, int]

LAYER, ROOT, ACTIVATION = 50_688, 18_688, 4_096
CALLS: dict[str, dict[Call, int]] = {
    "ddp": {("dp", "all_reduce", 4 * 30_016, 2): 1},
    "zero3": {
        ("dp", "all_gather", LAYER, 2): 4,
        ("dp", "all_gather", ROOT, 2): 2,
        ("dp", "reduce_scatter", LAYER, 2): 2,
        ("dp", "reduce_scatter", ROOT, 2): 1,
    },
    "tp": {("tp", "all_reduce", ACTIVATION, 2): 8},
}
"""Calls of a step by axis, operation, bytes and ranks."""

AXES = {"ddp": ["dp"], "zero3": ["dp"], "tp_fsdp": ["dp", "tp"], "hsdp": ["replicate", "shard"]}


def make_step(world: World, name: str) -> TrainingStep:
    return build_trained_step(world, name, kv_heads=4, **({"tp": 2} if name == "tp_fsdp" else {}))


def count_calls(world: World, name: str) -> Counter[Call]:
    step = make_step(world, name)
    calls = counted(step.step, step.layout.axes)
    step.close()
    return Counter((call.axis, call.op, call.num_bytes, call.ranks) for call in calls)


@pytest.mark.parametrize("name", CALLS)
def test_counted_calls_of_step(two_ranks: Ranks, name: str) -> None:
    assert (
        two_ranks.call("tests.workloads.step.test_explain:count_calls", name=name)
        == [CALLS[name]] * 2
    )


def axes_without_name(world: World) -> list[str]:
    calls = counted(lambda: dist.all_reduce(torch.ones(6), group=world.group), {})
    return [call.axis for call in calls]


def test_counted_call_of_other_group(two_ranks: Ranks) -> None:
    assert two_ranks.call("tests.workloads.step.test_explain:axes_without_name") == [[OTHER]] * 2


def step_on_rank_0(world: World, names: list[str]) -> list[str]:
    """Let only rank 0 take a step of each kind."""
    for name in names:
        step = make_step(world, name)
        twins = fake_twins(step.layout.axes)
        if world.rank == 0:
            with Silenced(twins):
                step.step()
        world.barrier()
        for twin in twins.values():
            dist.destroy_process_group(twin)
        step.close()
    return names


def test_silenced_step_needs_no_other_rank(two_ranks: Ranks) -> None:
    names = ["ddp", "zero1", "zero2", "zero3", "tp", "tp_sp"]
    assert (
        two_ranks.call("tests.workloads.step.test_explain:step_on_rank_0", names=names)
        == [names] * 2
    )


def test_differences_of_walls_and_compute() -> None:
    walls = [
        {"plain": [1.0, 2.0], "traced": [2.0, 4.0], "watched": [5.0, 1.0], "silenced": [1.0, 1.0]},
        {"plain": [1.0, 1.0], "traced": [1.0, 1.0], "watched": [2.0, 4.0], "silenced": [3.0, 2.0]},
    ]
    compute = [
        {"watched": [4.0, 6.0], "silenced": [1.0, 1.0]},
        {"watched": [0.0, 0.0], "silenced": [1.0, 1.0]},
    ]
    expected = {"ect": 2.0, "compute_slowdown": 1.5, "tracing_overhead": 1.0}
    expected["watching_overhead"] = 10**0.5 - 1
    metrics = differences(walls, compute)
    assert {name: metric.value for name, metric in metrics.items()} == pytest.approx(expected)


def test_differences_need_two_turns() -> None:
    kinds = ("plain", "traced", "watched", "silenced")
    turn = [{kind: [1.0] for kind in kinds}]
    for metric in differences(turn, turn).values():
        assert metric.value is None
        assert metric.low is None


def explain(world: World, name: str) -> tuple[Explanation, list[float]]:
    """Return the explanation and the wall times of this rank's traces with communication."""
    step, traces = make_step(world, name), []

    def trace(*args: Any) -> Trace:
        traces.append(trace_step(*args))
        return traces[-1]

    def begin() -> None:
        step.reset()
        world.barrier()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TRACE_STEP, trace)
        explanation = step.explain(begin, 1e-6)
    step.close()
    return explanation, [traces[i].wall_seconds for i in (0, 5, 6)]


def value(explanation: Explanation, name: str) -> float:
    number = explanation.metrics[name].value
    assert number is not None
    return number


def assert_adds_up(ranks: Ranks, name: str) -> None:
    """The parts add up to the slowest rank's wall time in the trace of median wall time."""
    results = ranks.call("tests.workloads.step.test_explain:explain", name=name)
    walls = sorted(map(max, *(walls for _, walls in results)))
    for explanation, _ in results:
        exposed = [value(explanation, f"exposed_comm.{axis}") for axis in AXES[name]]
        parts = [value(explanation, part) for part in ("compute", "exposed_copy", "idle")]
        residual = value(explanation, "residual")
        assert sum([*parts, *exposed, residual]) == pytest.approx(walls[1], abs=1e-6)
        assert parts[0] > 0
        assert min([*parts, *exposed]) >= 0
        for axis in AXES[name] if ranks.size > 2 else AXES[name][-1:]:
            assert value(explanation, f"bytes_ratio.{axis}") == pytest.approx(1)
            assert value(explanation, f"bytes_sent.{axis}") > 0
            assert value(explanation, f"comm_transfer.{axis}") > 0


@pytest.mark.parametrize("name", ["ddp", "tp_fsdp"])
def test_explanation_adds_up(two_ranks: Ranks, name: str) -> None:
    assert_adds_up(two_ranks, name)


@pytest.mark.full
@pytest.mark.parametrize("name", ["zero3", "tp_fsdp", "hsdp"])
def test_explanation_of_four_ranks_adds_up(four_ranks: Ranks, name: str) -> None:
    assert_adds_up(four_ranks, name)


def explain_fake_traces(world: World, offsets_ns: tuple[int, ...]) -> Explanation:
    """Return the explanation of a DDP step in which rank 1 comes 5 ms late to the only call.

    Of nine traces, three are silenced: their compute takes 2, 3 and 2 ms less. The ranks begin
    2 us after one another, on clocks with offsets.
    """
    clock = replace(world.clock, offsets_ns=offsets_ns, uncertainty_ns=500)
    step = make_step(replace(world, clock=clock), "ddp")
    late = 5 * MS * world.rank
    traces: list[Trace] = []

    def trace(*_: object) -> Trace:
        saved = {2: 2, 3: 3, 8: 2}.get(len(traces), 0)
        traces.append(
            Trace(
                step=(0, 20 * MS),
                wall_seconds=0.021 + 0.001 * world.rank,
                compute=[(0, (8 - saved) * MS)],
                comm=[(4 * MS + late, 14 * MS)],
                copies=[(12 * MS, 13 * MS)],
                called=[(4 * MS + late, 5 * MS + late)],
                busy=[(0, 5 * MS + late)],
                began_ns=MS + 2_000 * world.rank + offsets_ns[world.rank],
            )
        )
        return traces[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TRACE_STEP, trace)
        return step.explain(world.barrier, 1e-6)


@pytest.mark.parametrize("offsets_ns", [(0, 0), (0, 77_000_000)])
def test_explanation_of_late_rank(two_ranks: Ranks, offsets_ns: tuple[int, int]) -> None:
    expected_ms = {
        "compute": 8,
        "exposed_comm.dp": 4,
        "exposed_copy": 1,
        "idle": 7,
        "residual": 2,
        "comm_wait": 5,
        "compute_slowdown": 7 / 3,
        "comm_transfer.dp": 5,
        "straggler_wait": 5,
    }
    for explanation in two_ranks.call(
        "tests.workloads.step.test_explain:explain_fake_traces", offsets_ns=offsets_ns
    ):
        milliseconds = {name: 1e3 * value(explanation, name) for name in expected_ms}
        assert milliseconds == pytest.approx(expected_ms)
        slowdown = explanation.metrics["compute_slowdown"]
        assert 1e3 * (slowdown.high or 0) == pytest.approx(7 / 3 + 4.302653 / 3)
        timeline = explanation.timeline
        assert timeline is not None
        assert timeline.uncertainty_seconds == 5e-7
        assert [rank.start_us for rank in timeline.ranks] == [0.0, 2.0]
