"""Bare loops on a device that results of parbench are compared with, and rules of CUDA.

    python gpu_probes.py [--rehearse] PART

Prints a JSON line for each result as soon as it is known. Each part runs in its own process,
because a forbidden capture can break the CUDA context. In a rehearsal the CPU replaces the device.
"""

import json
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from parbench.bench.launch.flight_recorder import parse_groups
from parbench.bench.results.stats import median
from parbench.bench.world.torch_compat import dump_flight_records
from parbench.workloads.model.optimizer import make_optimizer
from parbench.workloads.model.shapes import shape_of
from parbench.workloads.model.simulated_compute import SimulatedCompute
from parbench.workloads.model.transformer import compute_loss, draw_tokens
from tests.support.workloads.training_steps import build_model

REHEARSE = "--rehearse" in sys.argv
DEVICE = torch.device("cpu") if REHEARSE else torch.device("cuda", 0)
MICROBATCH = 4
SPIN_CYCLES = 400_000  # about 0.2 ms
CALIBRATION_CYCLES = 20_000_000
IDLE_SECONDS = 0.3
WAIT_SECONDS = 0.005
MAX_GROUPED_ERROR = 0.02
H200_COPY_BYTES_PER_SECOND = 4.3e12
H200_FLOPS_PER_SECOND = 780e12
MIN_NCCL_TO_SHARE_A_GPU = (2, 30)
LLAMA: dict[str, Any] = {
    "recipe": "",
    "shape": "small-llama",
    "layers": 8,
    "hidden": 2048,
    "heads": 16,
    "kv_heads": 8,
    "ffn": 5632,
    "sequence": 2048,
    "vocabulary": 32000,
}
TINY_LLAMA: dict[str, Any] = {
    name: value if isinstance(value, str) else 0 for name, value in LLAMA.items()
} | {"shape": "tiny-llama"}


def report(name: str, passed: bool | None, figure: str, value: float | None = None) -> None:
    """Print a result; None stands for skipped, and ``value`` is compared with parbench's."""
    verdict = {True: "pass", False: "fail", None: "skip"}[passed]
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


def reference() -> None:
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
    shape = shape_of(TINY_LLAMA if REHEARSE else LLAMA)
    model = build_model(shape, 0, DEVICE, torch.bfloat16)
    optimizer = make_optimizer(model.parameters(), torch.bfloat16, is_simulated=False)
    tokens = draw_tokens(shape, MICROBATCH, 0, 0).to(DEVICE)

    def train() -> None:
        optimizer.zero_grad()
        compute_loss(model, tokens).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    seconds = measure_median_seconds(train, 3 if REHEARSE else 20, spin=False)
    figure = f"{seconds * 1e3:.2f} ms, bfloat16, {MICROBATCH} x {shape.sequence} tokens"
    report("bare llama-shaped step", True, figure, seconds)


def sleeping() -> None:
    """Calibrate the spinning kernel from idle clocks, bare and as parbench does."""
    rates = []
    errors = []
    with SimulatedCompute(DEVICE).taking(WAIT_SECONDS):  # the first wait calibrates
        pass
    for _ in range(3 if REHEARSE else 20):
        time.sleep(IDLE_SECONDS)
        seconds = measure_device_seconds(lambda: cuda._sleep(CALIBRATION_CYCLES), spin=False)
        rates.append(CALIBRATION_CYCLES / seconds)
        time.sleep(IDLE_SECONDS)
        waiter = SimulatedCompute(DEVICE)

        def wait(waiter: SimulatedCompute = waiter) -> None:
            with waiter.taking(WAIT_SECONDS):
                pass

        errors.append(measure_device_seconds(wait) / WAIT_SECONDS - 1)
    figure = f"{min(rates) / 1e6:.0f} to {max(rates) / 1e6:.0f} MHz from idle clocks"
    report("bare spin calibration", True, figure, max(rates) / min(rates))
    largest = max(errors, key=abs)
    figure = f"a wait of 5 ms is off by {largest:+.1%}"
    report("spin calibration of parbench", abs(largest) < 0.05 or REHEARSE, figure, largest)


def grouped() -> None:
    """Compare grouped GEMMs of uneven and empty groups with a loop over groups."""
    for counts in ([128, 128, 128, 128], [1, 0, 300, 211], [0, 0, 512, 0], [0, 0, 0, 0]):
        name = f"grouped_mm of {', '.join(map(str, counts))} rows"
        try:
            error = compute_grouped_error(counts)
        except RuntimeError as exception:
            report(name, False, first_line(exception))
            continue
        report(name, error < MAX_GROUPED_ERROR, f"largest relative error {error:.2g}", error)


def compute_grouped_error(counts: list[int]) -> float:
    """Return the largest relative error of the output and of both gradients."""
    multiply: Any = F.grouped_mm
    x = torch.randn(sum(counts), 256, device=DEVICE).bfloat16().requires_grad_()
    w = torch.randn(len(counts), 256, 128, device=DEVICE).bfloat16().requires_grad_()
    offsets = torch.tensor(counts, device=DEVICE).cumsum(0).to(torch.int32)
    output = multiply(x, w, offs=offsets)
    gradient = torch.randn(sum(counts), 128, device=DEVICE).bfloat16()
    output.backward(gradient)
    assert x.grad is not None
    assert w.grad is not None
    errors = [0.0]
    start = 0
    for index, count in enumerate(counts):
        rows = slice(start, start + count)
        start += count
        errors.append(relative_error(output[rows], x[rows] @ w[index]))
        errors.append(relative_error(x.grad[rows], gradient[rows] @ w[index].T))
        errors.append(relative_error(w.grad[index], x[rows].T @ gradient[rows]))
    return max(errors)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    if actual.numel() == 0:
        return 0.0
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1))


def capture() -> None:
    """Report what a graph can capture, also during other work, and read the flight recorder."""
    with single_rank_group():
        x = torch.ones(1024, device=DEVICE)
        graph = capture_graph(lambda: dist.all_reduce(x), 4)
        x.fill_(1)
        graph.replay()
        cuda.synchronize()
        is_correct = bool((x == 1).all())
        report("replay of a captured all_reduce", is_correct, "one rank: the sum is the input")
        read_flight_recorder()
        for mode in ("thread_local", "relaxed", "global"):
            outcome = attempt(partial(capture_during_other_work, x, mode))
            report(f"capture during work of another thread, {mode}", True, outcome)
        outcome = attempt(lambda: capture_graph(lambda: dist.barrier(), 1))
        report("capture of a barrier", True, outcome)
        # After a forbidden capture the group cannot be destroyed.
        os._exit(0)


def capture_during_other_work(x: Tensor, mode: str) -> None:
    """Capture while another thread launches kernels and waits for its stream."""
    stop = threading.Event()
    errors: list[str] = []

    def work() -> None:
        try:
            cuda.set_device(DEVICE)
            stream = cuda.Stream()
            y = torch.ones(256, 256, device=DEVICE)
            while not stop.is_set():
                with cuda.stream(stream):
                    y = (y @ y).clamp(0, 1)
                stream.synchronize()
        except RuntimeError as error:
            errors.append(f"in the thread: {first_line(error)}")

    thread = threading.Thread(target=work)
    thread.start()
    try:
        time.sleep(0.05)
        capture_graph(lambda: x.mul_(1.0), 64, mode).replay()
        cuda.synchronize()
    finally:
        stop.set()
        thread.join()
    if errors:
        raise RuntimeError(errors[0])


def read_flight_recorder() -> None:
    """Read the flight recorder as the monitor of a rank does."""
    groups, dumps = dump_flight_records()
    seen = parse_groups(dumps, groups, 0, time.time_ns()) or {}
    passed = REHEARSE or any(group.enqueued for group in seen.values())
    report("flight recorder", passed, f"{sum(map(len, dumps))} bytes; {seen}")


def pair() -> None:
    """Let two NCCL ranks share the GPU, which NCCL allows since 2.30 on request."""
    name = "two NCCL ranks on one GPU"
    if REHEARSE:
        report(name, None, "a rehearsal has no NCCL")
        return
    version = tuple(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    if version < MIN_NCCL_TO_SHARE_A_GPU:
        report(name, None, f"NCCL {'.'.join(map(str, version))}, sharing a GPU needs 2.30")
        return
    variables = {
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29555",
        "WORLD_SIZE": "2",
    }
    command = [sys.executable, __file__, "rank_of_pair"]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **variables, "RANK": str(rank)})
        for rank in range(2)
    ]
    exit_codes = [rank.wait() for rank in ranks]
    report(name, exit_codes == [0, 0], f"NCCL {version}: exit codes {exit_codes}")


def rank_of_pair() -> None:
    cuda.set_device(0)
    dist.init_process_group("nccl")
    x = torch.full((1 << 20,), float(dist.get_rank() + 1), device=DEVICE)
    dist.all_reduce(x)
    assert bool((x == 3).all())
    dist.destroy_process_group()


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


def capture_graph(work: Callable[[], object], count: int, mode: str = "thread_local") -> Any:
    """Return a graph of a number of calls."""
    side_stream = cuda.Stream()
    side_stream.wait_stream(cuda.current_stream())
    with cuda.stream(side_stream):
        work()
    cuda.current_stream().wait_stream(side_stream)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph, capture_error_mode=mode):
        for _ in range(count):
            work()
    return graph


def attempt(action: Callable[[], object]) -> str:
    """Return True if an action works, otherwise the first line of its exception."""
    try:
        action()
        cuda.synchronize()
    except RuntimeError as error:
        return f"raises: {first_line(error)}"
    return "works"


def first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:200]


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
    set_device=lambda device: None,
    stream=lambda stream: nullcontext(),
    graph=lambda graph, **options: nullcontext(),
    _sleep=lambda cycles: time.sleep(cycles / 2e9),
)
cuda: Any = HOST if REHEARSE else torch.cuda
PARTS = {
    part.__name__: part for part in (reference, sleeping, grouped, capture, pair, rank_of_pair)
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    PARTS[sys.argv[-1]]()
