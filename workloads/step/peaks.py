"""Peak rates of arithmetic from datasheets, and how much of a peak a step reaches.

Dense, without sparsity, in FLOP/s, one device as torch sees it. A name that is not here has no known peak.
"""

import re

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


def mfu_of(flops_per_second: float, peak: float | None, *, peak_name: str = "datasheet peak") -> float | None:
    """Return the share of ``peak`` (FLOP/s) that was reached; None if there is no known peak.

    Above 1 is a ``ValueError`` that names the peak: either it is another device's or the operations are counted wrong.
    """
    if peak is None:
        return None
    if peak <= 0:
        raise ValueError(f"{peak_name}({peak:.4g} FLOP/s) <= 0")
    share = flops_per_second / peak
    if share > 1:
        raise ValueError(f"{flops_per_second:.4g} FLOP/s / {peak_name}({peak:.4g} FLOP/s) = {share:.4f} > 1")
    return share
