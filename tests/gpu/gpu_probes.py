"""What ``one_gpu.py`` asks of the device itself: bare loops to hold parbench's figures against, and rules.

python gpu_probes.py [--rehearse] PART prints a JSON line for each finding as soon as it is known. A part is a process
of its own, for a forbidden capture may spoil the device's context; in a rehearsal the CPU takes the device's place.
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

from parbench.bench.launch.flight_recorder import groups_seen
from parbench.bench.results.stats import median
from parbench.bench.world.torch_compat import recorded_work
from parbench.workloads.model.optimizer import make_optimizer
from parbench.workloads.model.shapes import shape_of
from parbench.workloads.model.timed_compute import TimedCompute
from parbench.workloads.model.transformer import build, draw_tokens, loss_of
from parbench.workloads.step.peaks import measured_peak

REHEARSE = "--rehearse" in sys.argv
DEVICE = torch.device("cpu") if REHEARSE else torch.device("cuda", 0)
LLAMA: dict[str, Any] = {"shape": "tiny-llama"}
if not REHEARSE:
    LLAMA = {
        "shape": "small-llama",
        "layers": 8,
        "hidden": 2048,
        "heads": 16,
        "kv_heads": 8,
        "ffn": 5632,
    }
    LLAMA |= {"sequence": 2048, "vocabulary": 32000}
MICROBATCH = 4


def tell(name: str, passed: bool | None, figure: str, value: float | None = None) -> None:
    """Print a finding: passed, failed or, with None, skipped; ``value`` is what parbench's own figure is held to."""
    verdict = {True: "pass", False: "fail", None: "skip"}[passed]
    print(
        json.dumps({"name": name, "verdict": verdict, "figure": figure, "value": value}), flush=True
    )


def device_seconds(work: Callable[[], object], *, spin: bool = True) -> float:
    """Return how long the device takes; with ``spin`` the host issues all before the device begins."""
    start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    cuda.synchronize()
    if spin:
        cuda._sleep(400_000)  # about 0.2 ms
    start.record()
    work()
    end.record()
    cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def typical(work: Callable[[], object], count: int, *, spin: bool = True) -> float:
    for _ in range(3):
        work()
    return median([device_seconds(work, spin=spin) for _ in range(count)])


def near(found: float, known: float) -> bool:
    """Say whether a figure is within 10 % of an H200's; of other devices nothing is known."""
    return REHEARSE or "H200" not in torch.cuda.get_device_name() or abs(found / known - 1) <= 0.1


def reference() -> None:
    """Bare loops: events, memory, matrix products, one rank's all_reduce, a llama-shaped step."""
    x = torch.zeros(1024, device=DEVICE)
    without, with_spin = (typical(lambda: x.add_(1), 50, spin=spin) for spin in (False, True))
    figure = f"a small kernel: {without * 1e6:.1f} us without a spin before the start, {with_spin * 1e6:.1f} us with"
    tell("events with and without a spin", with_spin <= without or REHEARSE, figure, with_spin)
    source = torch.zeros(1 << (20 if REHEARSE else 30), dtype=torch.uint8, device=DEVICE)
    rate = 2 * source.numel() / typical(partial(torch.empty_like(source).copy_, source), 10)
    tell(
        "bare copy", near(rate, 4.3e12), f"{rate / 1e12:.3f} TB/s read + written (H200: 4.3)", rate
    )
    m = 256 if REHEARSE else 8192
    bare = (
        2
        * m**3
        / typical(
            partial(torch.mm, *(torch.randn(m, m, device=DEVICE).bfloat16() for _ in "ab")), 10
        )
    )
    tell(
        "bare matrix product",
        near(bare, 780e12),
        f"{bare / 1e12:.1f} TFLOP/s bf16, random data (H200: 780)",
        bare,
    )
    ours = measured_peak(DEVICE, torch.bfloat16, sizes=(256,) if REHEARSE else ())
    told = f"{ours / 1e12:.1f} TFLOP/s bf16 at best, of equal numbers; {ours / bare:.3f} of the bare product's"
    tell("parbench's matrix products", near(ours, 780e12), told, ours)
    with one_rank():
        small, copy = torch.ones(256, device=DEVICE), torch.empty(256, device=DEVICE)
        for name, call in (
            ("all_reduce", lambda: dist.all_reduce(small)),
            ("all_gather", lambda: dist.all_gather([copy], small)),
        ):
            seconds = typical(call, 100)
            tell(f"bare blocking {name} of 1K, one rank", True, f"{seconds * 1e6:.2f} us", seconds)
            seconds = typical(captured(call, 64).replay, 30) / 64
            tell(
                f"bare graph {name} of 1K, one rank",
                True,
                f"{seconds * 1e6:.3f} us a step",
                seconds,
            )
    step()


def step() -> None:
    """Train a plain model as large as the one that parbench measures."""
    shape = shape_of({"recipe": "", **dict.fromkeys(NUMBERS, 0), **LLAMA})
    model = build(shape, 0, DEVICE, torch.bfloat16)
    optimizer = make_optimizer(model.parameters(), torch.bfloat16, timed=False)
    tokens = draw_tokens(shape, MICROBATCH, 0, 0).to(DEVICE)

    def train() -> None:
        optimizer.zero_grad()
        loss_of(model, tokens).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    seconds = typical(train, 3 if REHEARSE else 20, spin=False)
    tell(
        "bare llama-shaped step",
        True,
        f"{seconds * 1e3:.2f} ms, bfloat16, {MICROBATCH} x {shape.sequence}",
        seconds,
    )


NUMBERS = ("layers", "hidden", "heads", "kv_heads", "ffn", "sequence", "vocabulary")


def sleeping() -> None:
    """Calibrate the spinning kernel 20 times, each time from idle clocks, as parbench does and bare."""
    rates, errors, cycles = [], [], 20_000_000
    for _ in range(3 if REHEARSE else 20):
        time.sleep(0.3)
        rates.append(cycles / device_seconds(lambda: cuda._sleep(cycles), spin=False))
        time.sleep(0.3)
        waiter = TimedCompute(DEVICE)

        def wait(waiter: TimedCompute = waiter) -> None:
            with waiter.waiting(0.005):
                pass

        errors.append(device_seconds(wait, spin=False) / 0.005 - 1)
    told = f"bare {min(rates) / 1e6:.0f} to {max(rates) / 1e6:.0f} MHz over {len(rates)} trials from idle"
    tell("sleep calibration, bare", True, told, max(rates) / min(rates))
    worst = max(errors, key=abs)
    tell(
        "sleep calibration of parbench",
        abs(worst) < 0.05 or REHEARSE,
        f"a wait of 5 ms is off by {worst:+.1%}",
        worst,
    )


def grouped() -> None:
    """Multiply uneven and empty groups of rows, forward and backward, against a loop over groups."""
    multiply: Any = F.grouped_mm
    for counts in ((128, 128, 128, 128), (1, 0, 300, 211), (0, 0, 512, 0), (0, 0, 0, 0)):
        rows, told = sum(counts), ", ".join(map(str, counts))
        x = torch.randn(rows, 256, device=DEVICE).bfloat16().requires_grad_()
        w = torch.randn(len(counts), 256, 128, device=DEVICE).bfloat16().requires_grad_()
        ends = torch.tensor(counts, device=DEVICE).cumsum(0).to(torch.int32)
        try:
            y = multiply(x, w, offs=ends)
            gradient = torch.randn(rows, 128, device=DEVICE).bfloat16()
            y.backward(gradient)
            begins = [sum(counts[:i]) for i in range(len(counts))]
            parts = [slice(begin, begin + n) for begin, n in zip(begins, counts, strict=True)]
            right = [
                (
                    y[p],
                    x[p] @ w[i],
                    x.grad[p],
                    gradient[p] @ w[i].T,
                    w.grad[i],
                    x[p].T @ gradient[p],
                )
                for i, p in enumerate(parts)
                if x.grad is not None and w.grad is not None
            ]
            pairs = [pair for six in right for pair in (six[:2], six[2:4], six[4:])]
            wrong = [
                float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1))
                if ours.numel()
                else 0.0
                for ours, theirs in pairs
            ]
            tell(
                f"grouped_mm of {told} rows",
                max(wrong) < 0.02,
                f"largest error {max(wrong):.2g}",
                max(wrong),
            )
        except RuntimeError as error:
            tell(f"grouped_mm of {told} rows", False, first_line(error))


def capture() -> None:
    """Say what may be captured in a graph, alone and beside a busy thread, and read the flight recorder."""
    with one_rank():
        x = torch.ones(1024, device=DEVICE)
        graph = captured(lambda: dist.all_reduce(x), 4)
        x.fill_(1)
        graph.replay()
        cuda.synchronize()
        tell(
            "a captured all_reduce replays", bool((x == 1).all()), "one rank: the sum is the input"
        )
        records()
        for mode in ("thread_local", "relaxed", "global"):
            tell(
                f"capture beside a busy thread, {mode}",
                True,
                attempt(partial(beside_thread, x, mode)),
            )
        tell("capture of a barrier", True, attempt(lambda: captured(lambda: dist.barrier(), 1)))
        os._exit(0)  # where that was forbidden, the group cannot be left in peace


def beside_thread(x: torch.Tensor, mode: str) -> None:
    """Capture while another thread launches, and waits for its own stream."""
    stop, failed = threading.Event(), list[str]()

    def busy() -> None:
        try:
            cuda.set_device(DEVICE)
            stream, y = cuda.Stream(), torch.ones(256, 256, device=DEVICE)
            while not stop.is_set():
                with cuda.stream(stream):
                    y = (y @ y).clamp(0, 1)
                stream.synchronize()
        except RuntimeError as error:
            failed.append(f"in the thread: {first_line(error)}")

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        time.sleep(0.05)
        captured(lambda: x.mul_(1.0), 64, mode).replay()
        cuda.synchronize()
    finally:
        stop.set()
        thread.join()
    if failed:
        raise RuntimeError(failed[0])


def records() -> None:
    """Read the flight recorder as the rank monitor does."""
    groups, dumps = recorded_work()
    seen = groups_seen(dumps, groups, 0, time.time_ns())
    told = f"{sum(map(len, dumps))} bytes; {seen}"
    tell("flight recorder", REHEARSE or any(one.enqueued for one in (seen or {}).values()), told)


def pair() -> None:
    """Let two NCCL ranks share the GPU, which NCCL 2.30 allows where it is asked to."""
    if REHEARSE:
        tell("two NCCL ranks on one GPU", None, "a rehearsal has no NCCL")
        return
    version = tuple(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    if version < (2, 30):
        told = f"NCCL {'.'.join(map(str, version))}: sharing a GPU needs 2.30"
        tell("two NCCL ranks on one GPU", None, told)
        return
    variables = {
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "MASTER_ADDR": "127.0.0.1",
    }
    shared = {**os.environ, **variables, "MASTER_PORT": "29555", "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen([sys.executable, __file__, "one_of_pair"], env={**shared, "RANK": rank})
        for rank in "01"
    ]
    codes = [rank.wait() for rank in ranks]
    tell("two NCCL ranks on one GPU", codes == [0, 0], f"NCCL {version}: exit codes {codes}")


def one_of_pair() -> None:
    cuda.set_device(0)
    dist.init_process_group("nccl")
    x = torch.full((1 << 20,), float(dist.get_rank() + 1), device=DEVICE)
    dist.all_reduce(x)
    assert bool((x == 3).all())
    dist.destroy_process_group()


@contextmanager
def one_rank() -> Iterator[dist.ProcessGroup]:
    """Make a group of this process alone: NCCL's, in a rehearsal gloo's."""
    from torch.distributed import HashStore  # type: ignore[attr-defined]  # exported at run time only

    bound = None if REHEARSE else DEVICE
    dist.init_process_group(
        "gloo" if REHEARSE else "nccl", store=HashStore(), rank=0, world_size=1, device_id=bound
    )
    group = dist.group.WORLD
    assert group is not None
    try:
        yield group
    finally:
        dist.destroy_process_group()


def captured(work: Callable[[], object], count: int, mode: str = "thread_local") -> Any:
    """Return a graph of so many calls."""
    side = cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        work()
    cuda.current_stream().wait_stream(side)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph, capture_error_mode=mode):
        for _ in range(count):
            work()
    return graph


def attempt(act: Callable[[], object]) -> str:
    """Return what came of it, in words."""
    try:
        act()
        cuda.synchronize()
    except RuntimeError as error:
        return f"raises: {first_line(error)}"
    return "works"


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


class HostEvent:
    """In a rehearsal an event, a stream and a graph: what is called is done at once."""

    def __init__(self, **_: object) -> None:
        self.seconds = 0.0

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, other: "HostEvent") -> float:
        return max((other.seconds - self.seconds) * 1e3, 1e-6)

    def synchronize(self, *_: object) -> None:
        return

    replay = wait_stream = synchronize


HOST = SimpleNamespace(
    **dict.fromkeys(("Event", "Stream", "CUDAGraph", "current_stream"), HostEvent),
    **dict.fromkeys(("synchronize", "set_device"), lambda *_: None),
    **dict.fromkeys(("stream", "graph"), lambda *_, **__: nullcontext()),
    _sleep=lambda cycles: time.sleep(cycles / 2e9),
)
cuda: Any = HOST if REHEARSE else torch.cuda
PARTS = {part.__name__: part for part in (reference, sleeping, grouped, capture, pair, one_of_pair)}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    PARTS[sys.argv[-1]]()
