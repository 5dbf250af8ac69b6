"""The peak of a device is found by its full name."""

import pytest

from parbench.workloads.probes.peaks import find_datasheet_peak


@pytest.mark.parametrize(
    ("device", "dtype", "tflops"),
    [
        ("NVIDIA A100-SXM4-40GB", "float32", 19.5),
        ("NVIDIA A100-SXM4-40GB", "tf32", 156),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA H200 NVL", "bfloat16", 835.5),
        ("NVIDIA L40S", "bfloat16", 362.05),
    ],
)
def test_datasheet_peak(device: str, dtype: str, tflops: float) -> None:
    assert find_datasheet_peak(device, dtype) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("NVIDIA H100", "bfloat16"),  # SXM or PCIe
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16"),  # a seventh of the device
        ("AMD Instinct MI300X", "bfloat16"),
    ],
)
def test_datasheet_peak_of_unknown_device(device: str, dtype: str) -> None:
    assert find_datasheet_peak(device, dtype) is None
