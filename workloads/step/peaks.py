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

# The words of a device name, the more specific name first, and TFLOP/s of 16-bit types,
# TensorFloat-32 and float32 without it.
PEAKS: tuple[tuple[str, float, float, float], ...] = (
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
)
"""Dense TFLOP/s of GPUs from datasheets, the more specific name first.

Each entry has the words of the device name in lower case, then the rates of 16-bit types, of
TensorFloat-32, and of float32 without TensorFloat-32.
"""
_SECONDS_PER_SIZE = 0.05
"""The seconds for which matrix multiplications of each size are repeated on a CPU."""


def datasheet_peak(gpu_name: str, dtype: str) -> float | None:
    """Return the dense peak FLOP/s of a GPU in ``dtype`` from its datasheet, None if unknown.

    ``dtype`` is ``bfloat16``, ``float16``, ``tf32`` or ``float32``. Names match by whole words, so
    an A10G is not an A10. The peak of a MIG slice, which is only a part of its device, is unknown.
    """
    name_parts = set(re.split(r"[^a-z0-9]+", gpu_name.lower()))
    if "mig" in name_parts:
        return None
    for name, sixteen_bit, tf32, float32 in PEAKS:
        if name_parts.issuperset(name.split()):
            teraflops = {
                "bfloat16": sixteen_bit,
                "float16": sixteen_bit,
                "tf32": tf32,
                "float32": float32,
            }
            return teraflops[dtype] * 1e12 if dtype in teraflops else None
    return None


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The peak rate of matrix multiplications on one rank's device."""

    flops_per_second: float
    """The dense FLOP/s."""
    source: str
    """A phrase that names the datasheet or the measurement, for reports."""
    measured: bool = False
    """True if the rate was measured, False if it is from a datasheet."""


@cache
def find_peak(device: "torch.device", dtype: "torch.dtype") -> Peak | None:
    """Return the peak rate of a device for matrix multiplications in ``dtype``.

    On a GPU it is from the datasheet, None if that is unknown. On a CPU it is measured. Float32 on
    a GPU means TensorFloat-32 if torch allows it.
    """
    import torch

    from parbench.bench.world import accelerator

    if device.type != "cuda":
        peak = measure_cpu_peak(dtype)
        return Peak(flops_per_second=peak, source="matrix multiplications", measured=True)
    gpu_name = accelerator.get_properties(device).name
    kind = str(dtype).removeprefix("torch.")
    if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        kind = "tf32"
    datasheet = datasheet_peak(gpu_name, kind)
    if datasheet is None:
        return None
    return Peak(flops_per_second=datasheet, source=f"datasheet of {gpu_name}, {kind}, dense")


def measure_cpu_peak(dtype: "torch.dtype") -> float:
    """Measure and return the FLOP/s of the fastest of many square matrix multiplications.

    On a busy host a step can be faster than this rate.
    """
    import torch

    best = 0.0
    for size in (256, 512, 1024):
        matrix = torch.full((size, size), 0.5, dtype=dtype)
        product = torch.empty_like(matrix)
        torch.mm(matrix, matrix, out=product)  # the first one loads libraries
        stop = time.perf_counter() + _SECONDS_PER_SIZE
        while time.perf_counter() < stop:
            start = time.perf_counter()
            torch.mm(matrix, matrix, out=product)
            best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best
