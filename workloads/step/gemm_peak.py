"""The peak rate of arithmetic as measured: the best of several square matrix products."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from workloads.step.peaks import datasheet_peak

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_CPU_SIZES = (256, 512, 1024)
_CUDA_SIZES = (2048, 4096, 8192)


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The most FLOP/s of one rank's device, and where the number is from: a datasheet, or ``measured``."""

    flops_per_second: float
    source: str
    measured: bool = False


@cache
def peak_of(device: torch.device, dtype: torch.dtype) -> Peak | None:
    """Return the datasheet's peak of a known GPU, None of an unknown one, and what a CPU rank shows, once a process."""
    if device.type != "cuda":
        return Peak(
            flops_per_second=measured_peak(device, dtype, seconds=0.05), source="matrix products", measured=True
        )
    name = torch.cuda.get_device_name(device)
    kind = "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else DTYPE_NAMES[dtype]
    peak = datasheet_peak(name, kind)
    return None if peak is None else Peak(flops_per_second=peak, source=f"datasheet of {name}, {kind}, dense")


def measured_peak(
    device: torch.device, dtype: torch.dtype, *, seconds: float = 0.1, sizes: Sequence[int] = ()
) -> float:
    """Return the best FLOP/s of m x m products, 2 m^3 operations each, spending about ``seconds`` on each m.

    Float32 runs as torch is set: with TensorFloat-32 where that is allowed. A training step can beat it on a busy host.
    """
    if seconds <= 0:
        raise ValueError(f"seconds({seconds:g}) <= 0")
    chosen = sizes or (_CUDA_SIZES if device.type == "cuda" else _CPU_SIZES)
    return max(_rate(m, device, dtype, seconds) for m in chosen)


def _rate(m: int, device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """Return the FLOP/s of the fastest burst; bursts are long enough that waiting for the device is little of them."""
    a = torch.full((m, m), 0.5, device=device, dtype=dtype)
    out = torch.empty_like(a)
    _burst_seconds(a, out, 1, device)  # the first product also loads libraries and plans
    calls = 1
    best = _burst_seconds(a, out, calls, device)
    stop = time.perf_counter() + seconds
    calls = max(1, min(100, int(seconds / 5 / best)))
    best = min(best, _burst_seconds(a, out, calls, device) / calls)
    while time.perf_counter() < stop:
        best = min(best, _burst_seconds(a, out, calls, device) / calls)
    return 2 * m**3 / best


def _burst_seconds(a: torch.Tensor, out: torch.Tensor, calls: int, device: torch.device) -> float:
    _finish(device)
    start = time.perf_counter()
    for _ in range(calls):
        torch.mm(a, a, out=out)
    _finish(device)
    return time.perf_counter() - start


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
