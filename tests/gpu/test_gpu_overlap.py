"""The parts of a step's time on a GPU: kernels by call, device clock, waits in a stream."""

import time

import pytest
import torch
from torch.distributed import distributed_c10d

from parbench.bench.results.spans import intersection, length
from parbench.bench.results.step_trace import TraceEvent
from parbench.bench.world.benchmark import Explanation
from parbench.bench.world.world import World
from parbench.workloads.model.simulated_compute import SimulatedCompute
from parbench.workloads.probes.call_spans import find_call_spans
from parbench.workloads.probes.probe import make_moment_clock, record_moment, trace_step
from parbench.workloads.step.pipeline_probe import can_measure_bubble
from parbench.workloads.torch_internals import open_profiler, trace_events
from tests.support.ranks import Ranks
from tests.support.workloads.training_steps import build_small_step

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
MAX_DEVICE_DELAY_SECONDS = 100e-6


def explain_ddp_step(world: World) -> tuple[Explanation, bool]:
    """Return the explanation of a DDP step, and whether a pipeline bubble would be claimed."""
    step = build_small_step(world, "ddp", {})
    step.reset()
    step.step()
    explanation = step.explain_step(step.reset, 2.0)
    has_bubble = can_measure_bubble(world, 0.01)
    step.close()
    return explanation, has_bubble


def spin(seconds: float) -> None:
    with SimulatedCompute(GPU).take_seconds(seconds):
        pass


def profile_matrix_product() -> list[TraceEvent]:
    matrix = torch.ones(256, 256, device=GPU)
    # The first profile of a process misses kernels.
    for _ in range(2):
        with open_profiler(GPU) as profiler:
            (matrix @ matrix).sum()
            torch.cuda.synchronize()
    return list(trace_events(profiler))


def test_kernels_are_linked_to_launch_and_operator() -> None:
    events = profile_matrix_product()
    launches = set()
    operators = set()
    for event in events:
        if not event.is_device and event.name.startswith(("cudaLaunch", "cuLaunch")):
            launches.add(event.correlation)
        if not event.is_device and event.name.startswith("aten::"):
            operators.add(event.correlation)
    kernels = [
        event
        for event in events
        if event.is_device
        and not event.is_annotation
        and not event.name.startswith(("Memset", "Memcpy"))
    ]
    assert len(kernels) >= 2
    for kernel in kernels:
        assert kernel.correlation in launches
        assert kernel.operator_correlation in operators


def test_send_to_self_is_one_kernel_of_two_calls(nccl_world: World) -> None:
    sent = torch.ones(1 << 20, device=GPU)
    received = torch.zeros(1 << 20, device=GPU)

    def exchange() -> None:
        with distributed_c10d._coalescing_manager(group=nccl_world.group, device=GPU):
            nccl_world.group.send([sent], 0, 0)
            nccl_world.group.recv([received], 0, 0)

    for _ in range(2):
        received.zero_()
        trace = trace_step(exchange, GPU)
    assert float(received.min()) == 1
    assert trace.issue_spans is not None
    assert len(trace.issue_spans) == 2
    if not trace.comm:
        pytest.skip("NCCL launched no kernel for a message of a rank to itself")
    assert None not in [kernel.launch_ns for kernel in trace.comm]
    spans = find_call_spans(trace, ["pp", "pp"])
    assert spans is not None
    expected_span = (trace.comm[0].start_ns, trace.comm[-1].stop_ns)
    assert list(spans) == [expected_span, expected_span]
    assert length(intersection([trace.comm[0].span], [trace.step])) > 0


def test_single_rank_has_no_exposed_communication(nccl_world: World) -> None:
    explanation, _ = explain_ddp_step(nccl_world)
    values = {name: metric.value for name, metric in explanation.metrics.items()}
    assert not any(name.startswith("exposed_comm.") for name in values)
    for name in ("compute", "exposed_copy", "idle"):
        assert values[name] is not None
    assert values["compute"] != 0
    assert can_measure_bubble(nccl_world, None)


@pytest.mark.parametrize("prefetch", ["default", "explicit"])
def test_fsdp_is_correct_with_prefetch(nccl_world: World, prefetch: str) -> None:
    step = build_small_step(nccl_world, "fsdp", {"prefetch": prefetch})
    step.reset()
    step.step()
    assert step.check() == 0, step.differences()
    step.close()


def test_gloo_on_one_gpu_claims_no_exposed_time(ranks_on_one_gpu: Ranks) -> None:
    results = ranks_on_one_gpu.call("tests.gpu.test_gpu_overlap:explain_ddp_step")
    for explanation, has_bubble in results:
        values = {name: metric.value for name, metric in explanation.metrics.items()}
        for name in ("exposed_comm.dp", "idle"):
            assert values[name] is None
        assert values["compute"]
        assert any("dp" in note for note in explanation.notes)
        assert not has_bubble


def test_stream_moments_lie_on_host_clock() -> None:
    spin(0.001)
    torch.cuda.synchronize()
    host_before = time.perf_counter()
    first = record_moment(GPU)
    host_after = time.perf_counter()
    spin(0.02)
    last = record_moment(GPU)
    torch.cuda.synchronize()
    host_end = time.perf_counter()
    to_seconds = make_moment_clock(GPU)
    uncertainty = 100e-6
    assert to_seconds(first) >= host_before - uncertainty
    assert to_seconds(first) <= host_after + uncertainty + MAX_DEVICE_DELAY_SECONDS
    assert to_seconds(last) <= host_end + uncertainty
    assert to_seconds(last) - to_seconds(first) == pytest.approx(0.02, rel=0.03)


@pytest.mark.parametrize("seconds", [0.005, 0.05])
@pytest.mark.parametrize("idle_seconds", [0.0, 0.5])
def test_simulated_compute_lasts_as_requested(seconds: float, idle_seconds: float) -> None:
    """The clocks of an idle GPU are low when the wait is calibrated."""
    time.sleep(idle_seconds)
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    spin(0.002)  # The host launches the measured wait while the device is busy with this one.
    start.record()
    spin(seconds)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) / 1e3 == pytest.approx(seconds, rel=0.03)
