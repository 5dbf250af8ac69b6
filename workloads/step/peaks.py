"""Peak rates of arithmetic from datasheets or as measured, and how much of a peak a step reaches.

Datasheets' are dense, without sparsity, in FLOP/s, one device as torch sees it. A name that is not here has no known
peak. What is measured is the best of several square matrix products; torch is imported for that alone.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_H100_SXM = {"bfloat16": 989.4e12, "float16": 989.4e12, "tf32": 494.7e12, "float32": 66.9e12}
_HOPPER_NVL = {"bfloat16": 835.5e12, "float16": 835.5e12, "tf32": 417.5e12, "float32": 60e12}
_A100 = {"bfloat16": 312e12, "float16": 312e12, "tf32": 156e12, "float32": 19.5e12}
_MI300X = {"bfloat16": 1307.4e12, "float16": 1307.4e12, "tf32": 653.7e12, "float32": 163.4e12}

# words of a device's name, all of which must be in it, the more particular first; "float32" is without TensorFloat-32
PEAKS: tuple[tuple[tuple[str, ...], dict[str, float]], ...] = (
    (("gb200",), {"bfloat16": 2500e12, "float16": 2500e12, "tf32": 1250e12, "float32": 80e12}),
    (("b200",), {"bfloat16": 2250e12, "float16": 2250e12, "tf32": 1125e12, "float32": 75e12}),
    (("gh200",), _H100_SXM),
    (("h200", "nvl"), _HOPPER_NVL),
    (("h200",), _H100_SXM),
    (("h100", "nvl"), _HOPPER_NVL),
    (("h100", "pcie"), {"bfloat16": 756e12, "float16": 756e12, "tf32": 378e12, "float32": 51.2e12}),
    (("h100", "hbm3"), _H100_SXM),  # torch names the SXM board "NVIDIA H100 80GB HBM3"
    (("h100", "sxm5"), _H100_SXM),
    (("h20",), {"bfloat16": 148e12, "float16": 148e12, "tf32": 74e12, "float32": 44e12}),
    (("a100",), _A100),
    (("a800",), _A100),
    (("a40",), {"bfloat16": 149.7e12, "float16": 149.7e12, "tf32": 74.8e12, "float32": 37.4e12}),
    (("a30",), {"bfloat16": 165e12, "float16": 165e12, "tf32": 82e12, "float32": 10.3e12}),
    (("a10",), {"bfloat16": 125e12, "float16": 125e12, "tf32": 62.5e12, "float32": 31.2e12}),
    (("l40s",), {"bfloat16": 362.05e12, "float16": 362.05e12, "tf32": 183e12, "float32": 91.6e12}),
    (("l40",), {"bfloat16": 181.05e12, "float16": 181.05e12, "tf32": 90.5e12, "float32": 90.5e12}),
    (("l4",), {"bfloat16": 121e12, "float16": 121e12, "tf32": 60e12, "float32": 30.3e12}),
    (("v100", "sxm2"), {"float16": 125e12, "float32": 15.7e12}),
    (("v100", "sxm3"), {"float16": 125e12, "float32": 15.7e12}),
    (("v100", "pcie"), {"float16": 112e12, "float32": 14e12}),
    (("v100s",), {"float16": 130e12, "float32": 16.4e12}),
    (("t4",), {"float16": 65e12, "float32": 8.1e12}),
    (("mi325x",), _MI300X),
    (("mi300x",), _MI300X),
)


def datasheet_peak(gpu_name: str, dtype: str) -> float | None:
    """Return the dense FLOP/s of ``bfloat16``, ``float16``, ``tf32`` or ``float32`` on a device; None if unknown.

    Names are matched by whole words, so that an A10G is no A10; a MIG slice is only a part of what its name says.
    """
    words = set(re.split(r"[^a-z0-9]+", gpu_name.lower()))
    if "mig" in words:
        return None
    for needed, peaks in PEAKS:
        if words.issuperset(needed):
            return peaks.get(dtype)
    return None


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The most FLOP/s of one rank's device, and where the number is from: a datasheet, or ``measured``."""

    flops_per_second: float
    source: str
    measured: bool = False


@cache
def peak_of(device: "torch.device", dtype: "torch.dtype") -> Peak | None:
    """Return the datasheet's peak of a known GPU, None of an unknown one, and what a CPU rank shows, once a process."""
    import torch

    if device.type != "cuda":
        measured = measured_peak(device, dtype, seconds=0.05)
        return Peak(flops_per_second=measured, source="matrix products", measured=True)
    name, kind = torch.cuda.get_device_name(device), str(dtype).removeprefix("torch.")
    if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        kind = "tf32"
    peak = datasheet_peak(name, kind)
    return (
        None
        if peak is None
        else Peak(flops_per_second=peak, source=f"datasheet of {name}, {kind}, dense")
    )


def measured_peak(
    device: "torch.device", dtype: "torch.dtype", *, seconds: float = 0.1, sizes: Sequence[int] = ()
) -> float:
    """Return the best FLOP/s of m x m products, 2 m^3 operations each, spending about ``seconds`` on each m.

    Float32 runs as torch is set: with TensorFloat-32 where that is allowed. A training step can beat it on a busy host.
    """
    if seconds <= 0:
        raise ValueError(f"seconds({seconds:g}) <= 0")
    chosen = sizes or ((2048, 4096, 8192) if device.type == "cuda" else (256, 512, 1024))
    return max(_rate(m, device, dtype, seconds) for m in chosen)


def _rate(m: int, device: "torch.device", dtype: "torch.dtype", seconds: float) -> float:
    """Return the FLOP/s of the fastest burst; bursts are long enough that waiting for the device is little of them."""
    import torch

    a = torch.full((m, m), 0.5, device=device, dtype=dtype)
    out = torch.empty_like(a)

    def burst_seconds(calls: int) -> float:
        finish()
        start = time.perf_counter()
        for _ in range(calls):
            torch.mm(a, a, out=out)
        finish()
        return time.perf_counter() - start

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    burst_seconds(1)  # the first product also loads libraries and plans
    best, stop = burst_seconds(1), time.perf_counter() + seconds
    calls = max(1, min(100, int(seconds / 5 / best)))
    best = min(best, burst_seconds(calls) / calls)
    while time.perf_counter() < stop:
        best = min(best, burst_seconds(calls) / calls)
    return 2 * m**3 / best
