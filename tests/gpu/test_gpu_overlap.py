"""Where a step's time goes on a GPU: kernels by the calls that launched them, its own clock, waits in its stream."""

import time
from collections.abc import Iterator

import pytest
import torch

from parbench.bench.results.spans import intersection, length
from parbench.bench.results.traced import spans_of_calls
from parbench.bench.world.benchmark import Explanation
from parbench.bench.world.torch_compat import coalescing, profiling, trace_events
from parbench.bench.world.world import World, open_world
from parbench.workloads.model.timed_compute import TimedCompute
from parbench.workloads.pipeline_parallel.pipeline_probe import claims_bubble
from parbench.workloads.step.probe import moment, seconds_of, trace_step
from tests.support.ranks import Ranks
from tests.support.training_steps import build_small_step

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """One rank on NCCL."""
    from torch.distributed import HashStore  # type: ignore[attr-defined]  # exported at run time only

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with open_world("nccl", "cuda", seed=0, timeout_seconds=60.0, store=HashStore()) as world:
        yield world


def explained(world: World) -> tuple[Explanation, bool]:
    """Return what a DDP step tells, and whether a bubble would be claimed."""
    step = build_small_step(world, "ddp", {})
    step.reset()
    step.step()
    told = step.explain(step.reset, 2.0), claims_bubble(world, 0.01)
    step.close()
    return told


def spin(seconds: float) -> None:
    with TimedCompute(GPU).waiting(seconds):
        pass


def test_each_kernel_has_the_number_of_its_launch_and_is_linked_to_its_operator() -> None:
    a = torch.ones(256, 256, device=GPU)
    for _ in range(2):  # the first time the profiler misses some
        with profiling(GPU) as profiler:
            (a @ a).sum()
            torch.cuda.synchronize()
    events = trace_events(profiler)
    host = [event for event in events if not event.device]
    launches = {
        event.correlation for event in host if event.name.startswith(("cudaLaunch", "cuLaunch"))
    }
    operators = {event.correlation for event in host if event.name.startswith("aten::")}
    kernels = [event for event in events if event.device and not event.annotation]
    kernels = [event for event in kernels if not event.name.startswith(("Memset", "Memcpy"))]
    assert len(kernels) >= 2
    assert all(event.correlation in launches for event in kernels), (launches, kernels)
    assert all(event.linked in operators for event in kernels), (operators, kernels)


def test_a_message_to_oneself_is_one_kernel_of_two_calls(alone: World) -> None:
    there, here = torch.ones(1 << 20, device=GPU), torch.zeros(1 << 20, device=GPU)

    def exchange() -> None:
        with coalescing(alone.group, GPU):
            alone.group.send([there], 0, 0)
            alone.group.recv([here], 0, 0)

    for _ in range(2):
        here.zero_()
        trace = trace_step(exchange, GPU)
    assert float(here.min()) == 1
    assert trace.issued is not None
    assert len(trace.issued) == 2
    if not trace.comm:
        pytest.skip("NCCL launched no kernel for a message to oneself")
    assert None not in trace.launched
    [sent, received] = spans_of_calls(trace, ["pp", "pp"]) or [None, None]
    assert sent == received == (trace.comm[0][0], trace.comm[-1][1])
    assert length(intersection([trace.comm[0]], [trace.step])) > 0


def test_a_rank_alone_waits_for_nothing_and_knows_it(alone: World) -> None:
    found = {name: metric.value for name, metric in explained(alone)[0].metrics.items()}
    assert (found["exposed_comm.dp"], found["comm_wait"]) == (0, 0)
    parts = [found[name] for name in ("compute", "exposed_copy", "idle", "residual")]
    assert None not in parts
    assert (found["compute"] or 0) > 0
    assert claims_bubble(alone, None)


@pytest.mark.parametrize("prefetch", ["default", "explicit"])
def test_fsdp_is_right_however_it_gathers_ahead(alone: World, prefetch: str) -> None:
    step = build_small_step(alone, "fsdp", {"prefetch": prefetch})
    step.reset()
    step.step()
    assert step.check() == 0, step.differences()
    step.close()


def test_two_ranks_on_one_gpu_do_not_know_what_gloo_exposes_and_claim_no_bubble() -> None:
    with Ranks(2, "cuda") as ranks:
        for explanation, claims in ranks.call("tests.gpu.test_gpu_overlap:explained"):
            found = {name: metric.value for name, metric in explanation.metrics.items()}
            assert [found[name] for name in ("exposed_comm.dp", "idle", "comm_wait")] == [None] * 3
            assert (found["compute"] or 0) > 0
            assert any("saw not all calls on dp" in note for note in explanation.notes)
            assert not claims


def test_moments_of_a_stream_lie_on_the_hosts_clock() -> None:
    spin(0.001)
    torch.cuda.synchronize()
    before = time.perf_counter()
    first = moment(GPU)
    after = time.perf_counter()
    spin(0.02)
    last = moment(GPU)
    torch.cuda.synchronize()
    ended = time.perf_counter()
    told, uncertainty = seconds_of(GPU)
    assert 0 < uncertainty < 100e-6
    assert (
        before - uncertainty <= told(first) <= after + uncertainty + 100e-6
    )  # the device comes to it a little later
    assert told(last) <= ended + uncertainty
    assert told(last) - told(first) == pytest.approx(0.02, rel=0.03)


def test_waits_are_as_long_as_asked_from_an_idle_clock() -> None:
    waiter = TimedCompute(GPU)
    assert waiter.doubts == ()
    for seconds in (0.005, 0.05):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        spin(seconds)
        end.record()
        end.synchronize()
        assert start.elapsed_time(end) / 1e3 == pytest.approx(seconds, rel=0.03)
