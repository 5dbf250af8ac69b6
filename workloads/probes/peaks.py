"""Peak rates of matrix multiplications, from datasheets.

Rates are dense FLOP/s of one device as torch sees it.
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

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
    ("a100", 312, 156, 19.5),
    ("a800", 312, 156, 19.5),
    ("l40s", 362.05, 183, 91.6),
    ("l4", 121, 60, 30.3),
)
"""Dense TFLOP/s of GPUs from datasheets, the more specific name first.

Each entry has the words of the device name in lower case, then the rates of 16-bit types, of
TensorFloat-32, and of float32 without TensorFloat-32.
"""


def find_datasheet_peak(gpu_name: str, dtype: str) -> float | None:
    """Return the dense peak FLOP/s of a GPU in ``dtype`` from its datasheet, None if unknown.

    ``gpu_name`` is the device's name in torch. The GPU is found if this name contains all words of
    an entry of ``PEAKS``. ``dtype`` is ``bfloat16``, ``tf32`` or ``float32``, the last without
    TensorFloat-32. The peak of a MIG slice, which is only a part of its device, is unknown.
    """
    name_parts = set(re.split(r"[^a-z0-9]+", gpu_name.lower()))
    if "mig" in name_parts:
        return None
    for name, bfloat16, tf32, float32 in PEAKS:
        if name_parts.issuperset(name.split()):
            teraflops = {"bfloat16": bfloat16, "tf32": tf32, "float32": float32}
            return teraflops[dtype] * 1e12
    return None


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The peak rate of matrix multiplications on a GPU."""

    flops_per_second: float
    """The FLOP/s of matrix multiplications without sparsity."""
    source: str
    """A phrase that names the datasheet, for reports."""


def find_peak(device: "torch.device", dtype: "torch.dtype") -> Peak | None:
    """Return the datasheet's peak rate of a GPU for matrix multiplications in ``dtype``.

    The result is None on a CPU, or if parbench does not have the datasheet's rate. Float32 means
    TensorFloat-32 if torch allows it.
    """
    import torch

    from parbench.bench.world import accelerator

    if device.type != "cuda":
        return None
    gpu_name = accelerator.get_properties(device).name
    kind = str(dtype).removeprefix("torch.")
    if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        kind = "tf32"
    datasheet = find_datasheet_peak(gpu_name, kind)
    if datasheet is None:
        return None
    return Peak(flops_per_second=datasheet, source=f"datasheet of {gpu_name}, {kind}, dense")
