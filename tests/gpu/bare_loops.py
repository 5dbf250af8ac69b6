"""Bare loops on a device that results of parbench are compared with.

    python bare_loops.py [--rehearse]

Prints a JSON line for each result as soon as it is known. In a rehearsal the CPU replaces the
device.
"""

import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from parbench.bench.results.stats import median
from parbench.workloads.model.optimizer import make_optimizer
from parbench.workloads.model.shapes import SHAPES
from parbench.workloads.model.transformer import compute_loss, draw_tokens
from tests.support.workloads.training_steps import build_model

REHEARSE = "--rehearse" in sys.argv
DEVICE = torch.device("cpu") if REHEARSE else torch.device("cuda", 0)
MICROBATCH = 4
SPIN_CYCLES = 400_000  # about 0.2 ms
H200_COPY_BYTES_PER_SECOND = 4.3e12
H200_FLOPS_PER_SECOND = 780e12
TINY_LLAMA = SHAPES["tiny-llama"]
LLAMA = replace(
    SHAPES["small-llama"],
    hidden=2048,
    heads=16,
    kv_heads=8,
    ffn=5632,
    sequence=2048,
    vocabulary=32000,
)


def report(name: str, passed: bool, figure: str, value: float) -> None:
    """Print a result; ``value`` is compared with parbench's."""
    verdict = "pass" if passed else "fail"
    result = {"name": name, "verdict": verdict, "figure": figure, "value": value}
    print(json.dumps(result), flush=True)


def measure_device_seconds(work: Callable[[], object], *, spin: bool = True) -> float:
    """Return the seconds on the device; a spin lets the host launch all work before it starts."""
    start = cuda.Event(enable_timing=True)
    end = cuda.Event(enable_timing=True)
    cuda.synchronize()
    if spin:
        cuda._sleep(SPIN_CYCLES)
    start.record()
    work()
    end.record()
    cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def measure_median_seconds(
    work: Callable[[], object], num_rounds: int, *, spin: bool = True
) -> float:
    for _ in range(3):
        work()
    return median([measure_device_seconds(work, spin=spin) for _ in range(num_rounds)])


def is_expected_of_h200(rate: float, expected_rate: float) -> bool:
    """Return True if a rate is within 10 % of that of an H200, or the device is another one."""
    if REHEARSE or "H200" not in torch.cuda.get_device_name():
        return True
    return abs(rate / expected_rate - 1) <= 0.1


def measure_all() -> None:
    """Measure events, memory copies, GEMMs, collectives of one rank and a Llama-shaped step."""
    measure_event_overhead()
    measure_copy()
    measure_gemm()
    with single_rank_group():
        measure_collectives()
    measure_llama_step()


def measure_event_overhead() -> None:
    x = torch.zeros(1024, device=DEVICE)
    without_spin = measure_median_seconds(lambda: x.add_(1), 50, spin=False)
    with_spin = measure_median_seconds(lambda: x.add_(1), 50, spin=True)
    figure = f"{without_spin * 1e6:.1f} us without a spin, {with_spin * 1e6:.1f} us with one"
    passed = with_spin <= without_spin or REHEARSE
    report("events around a small kernel", passed, figure, with_spin)


def measure_copy() -> None:
    num_bytes = 1 << (20 if REHEARSE else 30)
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    # A copy reads and writes every byte.
    rate = 2 * num_bytes / measure_median_seconds(lambda: target.copy_(source), 10)
    passed = is_expected_of_h200(rate, H200_COPY_BYTES_PER_SECOND)
    report("bare copy", passed, f"{rate / 1e12:.3f} TB/s read and written (H200: 4.3)", rate)


def measure_gemm() -> None:
    edge = 256 if REHEARSE else 8192
    a = torch.randn(edge, edge, device=DEVICE).bfloat16()
    b = torch.randn(edge, edge, device=DEVICE).bfloat16()
    bare = 2 * edge**3 / measure_median_seconds(lambda: torch.mm(a, b), 10)
    passed = is_expected_of_h200(bare, H200_FLOPS_PER_SECOND)
    report("bare GEMM", passed, f"{bare / 1e12:.1f} TFLOP/s bf16, random (H200: 780)", bare)


def measure_collectives() -> None:
    """Measure an all-reduce, for which NCCL launches nothing on one rank, and an all-gather."""
    data = torch.ones(256, device=DEVICE)
    output = torch.empty(256, device=DEVICE)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(data),
        "all_gather": lambda: dist.all_gather_into_tensor(output, data),
    }
    for name, call in calls.items():
        seconds = measure_median_seconds(call, 100)
        title = f"blocking {name} of 1K, one rank"
        report(f"bare {title}", True, f"{seconds * 1e6:.2f} us", seconds)
        graph = capture_graph(call, 64)
        seconds = measure_median_seconds(graph.replay, 30) / 64
        title = f"graph {name} of 1K, one rank"
        report(f"bare {title}", True, f"{seconds * 1e6:.3f} us per step", seconds)


def measure_llama_step() -> None:
    """Train a model of the size that parbench measures, without parbench."""
    shape = TINY_LLAMA if REHEARSE else LLAMA
    model = build_model(shape, 0, DEVICE, torch.bfloat16)
    optimizer = make_optimizer(model.parameters(), torch.bfloat16)
    tokens = draw_tokens(shape, MICROBATCH, 0, 0).to(DEVICE)

    def train() -> None:
        optimizer.zero_grad()
        compute_loss(model, tokens).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    seconds = measure_median_seconds(train, 3 if REHEARSE else 20, spin=False)
    figure = f"{seconds * 1e3:.2f} ms, bfloat16, {MICROBATCH} x {shape.sequence} tokens"
    report("bare llama-shaped step", True, figure, seconds)


@contextmanager
def single_rank_group() -> Iterator[None]:
    """Make this process the only rank of an NCCL group, in a rehearsal of a gloo group."""
    from torch.distributed import HashStore  # type: ignore[attr-defined]  # exported at run time only

    backend = "gloo" if REHEARSE else "nccl"
    device = None if REHEARSE else DEVICE
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, device_id=device)
    try:
        yield
    finally:
        dist.destroy_process_group()


def capture_graph(work: Callable[[], object], count: int) -> Any:
    """Return a graph of a number of calls."""
    side_stream = cuda.Stream()
    side_stream.wait_stream(cuda.current_stream())
    with cuda.stream(side_stream):
        work()
    cuda.current_stream().wait_stream(side_stream)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(count):
            work()
    return graph


class HostEvent:
    """Replaces an event, a stream and a graph in a rehearsal: work is done when it is called."""

    def __init__(self, **options: object) -> None:
        self.seconds = 0.0

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: "HostEvent") -> float:
        return max((end.seconds - self.seconds) * 1e3, 1e-6)

    def synchronize(self, *args: object) -> None:
        return

    replay = wait_stream = synchronize


HOST = SimpleNamespace(
    Event=HostEvent,
    Stream=HostEvent,
    CUDAGraph=HostEvent,
    current_stream=HostEvent,
    synchronize=lambda: None,
    stream=lambda stream: nullcontext(),
    graph=lambda graph, **options: nullcontext(),
    _sleep=lambda cycles: time.sleep(cycles / 2e9),
)
cuda: Any = HOST if REHEARSE else torch.cuda

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    measure_all()
