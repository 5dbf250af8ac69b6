"""Peak rates of matrix multiplications, from datasheets or as measured.

Rates are dense FLOP/s of one device as torch sees it. Torch is imported only to measure.
"""

import re
import time
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# The words of a device name, the more specific name first, and TFLOP/s of 16-bit types, TensorFloat-32
# and float32 without it. Without TensorFloat-32 a GPU has float16 but no bfloat16.
PEAKS: tuple[tuple[str, float, float | None, float], ...] = (
    ("gb200", 2500, 1250, 80),
    ("b200", 2250, 1125, 75),
    ("gh200", 989.4, 494.7, 66.9),
    ("h200 nvl", 835.5, 417.5, 60),
    ("h200", 989.4, 494.7, 66.9),
    ("h100 nvl", 835.5, 417.5, 60),
    ("h100 pcie", 756, 378, 51.2),
    ("h100 hbm3", 989.4, 494.7, 66.9),  # torch names the SXM module "NVIDIA H100 80GB HBM3"
    ("h100 sxm5", 989.4, 494.7, 66.9),
    ("h20", 148, 74, 44),
    ("a100", 312, 156, 19.5),
    ("a800", 312, 156, 19.5),
    ("a40", 149.7, 74.8, 37.4),
    ("a30", 165, 82, 10.3),
    ("a10", 125, 62.5, 31.2),
    ("l40s", 362.05, 183, 91.6),
    ("l40", 181.05, 90.5, 90.5),
    ("l4", 121, 60, 30.3),
    ("v100 sxm2", 125, None, 15.7),
    ("v100 sxm3", 125, None, 15.7),
    ("v100 pcie", 112, None, 14),
    ("v100s", 130, None, 16.4),
    ("t4", 65, None, 8.1),
    ("mi325x", 1307.4, 653.7, 163.4),
    ("mi300x", 1307.4, 653.7, 163.4),
)
_BURSTS = 5


def datasheet_peak(gpu_name: str, dtype: str) -> float | None:
    """Return the dense FLOP/s of ``bfloat16``, ``float16``, ``tf32`` or ``float32``, or None.

    Names match by whole words, so an A10G is not an A10. A MIG slice is only a part of its device.
    """
    words = set(re.split(r"[^a-z0-9]+", gpu_name.lower()))
    if "mig" in words:
        return None
    for name, half, tf32, float32 in PEAKS:
        if words.issuperset(name.split()):
            bfloat16 = half if tf32 is not None else None
            teraflops = {"bfloat16": bfloat16, "float16": half, "tf32": tf32, "float32": float32}
            peak = teraflops.get(dtype)
            return None if peak is None else peak * 1e12
    return None


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The peak rate of one rank's device."""

    flops_per_second: float
    source: str
    measured: bool = False


@cache
def find_peak(device: "torch.device", dtype: "torch.dtype") -> Peak | None:
    """Return the datasheet peak of a GPU, None if it is unknown, or the measured peak of a CPU."""
    import torch

    if device.type != "cuda":
        measured = measure_peak(device, dtype, seconds=0.05)
        return Peak(flops_per_second=measured, source="matrix multiplications", measured=True)
    gpu_name = torch.cuda.get_device_name(device)
    kind = str(dtype).removeprefix("torch.")
    if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        kind = "tf32"
    peak = datasheet_peak(gpu_name, kind)
    if peak is None:
        return None
    return Peak(flops_per_second=peak, source=f"datasheet of {gpu_name}, {kind}, dense")


def measure_peak(device: "torch.device", dtype: "torch.dtype", seconds: float) -> float:
    """Return the best FLOP/s of square matrix multiplications, within ``seconds`` for each size.

    Float32 uses TensorFloat-32 if torch allows it. On a busy host a step can be faster.
    """
    sizes = (2048, 4096, 8192) if device.type == "cuda" else (256, 512, 1024)
    return max(_measure_rate(size, device, dtype, seconds) for size in sizes)


def _measure_rate(size: int, device: "torch.device", dtype: "torch.dtype", seconds: float) -> float:
    """Return the FLOP/s of the fastest burst; in long bursts the device rarely waits."""
    import torch

    matrix = torch.full((size, size), 0.5, device=device, dtype=dtype)
    product = torch.empty_like(matrix)

    def time_burst(calls: int) -> float:
        """Return the seconds of each call."""
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            torch.mm(matrix, matrix, out=product)
        synchronize()
        return (time.perf_counter() - start) / calls

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    time_burst(1)  # the first one loads libraries
    stop = time.perf_counter() + seconds
    best = time_burst(1)
    calls = max(1, min(100, int(seconds / _BURSTS / best)))
    best = min(best, time_burst(calls))
    while time.perf_counter() < stop:
        best = min(best, time_burst(calls))
    return 2 * size**3 / best
