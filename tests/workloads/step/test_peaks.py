"""A device's peak is found by its whole name or measured, and a share above one is an error."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from parbench.workloads.step.peaks import PEAKS, Peak, datasheet_peak
from parbench.workloads.step.training_step import TrainingStep

BFLOAT16 = {
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA H200": 989.4,
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA GH200 480GB": 989.4,
    "NVIDIA B200": 2250,
    "NVIDIA GB200": 2500,
    "NVIDIA L40S": 362.05,
    "NVIDIA L40": 181.05,
    "NVIDIA L4": 121,
    "AMD Instinct MI300X": 1307.4,
}
UNKNOWN = [
    "Intel(R) Xeon(R) Platinum 8480C",
    "",
    "NVIDIA A10G",  # no A10
    "NVIDIA H100",  # of which board?
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",  # a seventh of one
    "NVIDIA A1000",
]


def test_the_names_that_torch_gives_have_their_datasheets_peak_and_others_none() -> None:
    for name, tflops in BFLOAT16.items():
        assert datasheet_peak(name, "bfloat16") == pytest.approx(tflops * 1e12), name
    assert {datasheet_peak(name, "bfloat16") for name in UNKNOWN} == {None}
    boards = {"Tesla V100-SXM2-16GB": 125e12, "Tesla V100-PCIE-32GB": 112e12, "Tesla V100S-PCIE-32GB": 130e12}
    assert {name: datasheet_peak(name, "float16") for name in boards} == boards
    assert datasheet_peak("Tesla V100-SXM2-16GB", "bfloat16") is None
    assert datasheet_peak("NVIDIA H200", "float8_e4m3fn") is None
    a100 = [datasheet_peak("NVIDIA A100-SXM4-40GB", dtype) for dtype in ("float32", "tf32")]
    assert a100 == [19.5e12, 156e12], "float32 is not TensorFloat-32"


def test_every_entry_can_be_reached_and_is_ordered_as_hardware_is() -> None:
    for words, peaks in PEAKS:
        assert datasheet_peak(" ".join(words), "float16") == peaks["float16"], f"an earlier entry hides {words}"
        assert peaks["float16"] > max(peaks["float32"], peaks.get("tf32", 0)), words
        assert peaks.get("bfloat16", peaks["float16"]) == peaks["float16"], words
        assert all(1e12 < peak < 1e16 for peak in peaks.values()), words
        assert "tf32" not in peaks or peaks["tf32"] == pytest.approx(peaks["bfloat16"] / 2, rel=0.02), words


def test_a_step_above_a_measured_peak_is_doubted_and_above_a_datasheets_an_error() -> None:
    step: Any = SimpleNamespace(_flops_per_rank=lambda: 4e12, _peak=Peak(flops_per_second=3.2e12, source="X"))
    assert TrainingStep._doubts_of_peak(step, 2.0) == ()
    with pytest.raises(ValueError, match=r"4e\+12 FLOP/s / X\(3\.2e\+12 FLOP/s\) = 1\.2500 > 1"):
        TrainingStep._doubts_of_peak(step, 1.0)
    step._peak = Peak(flops_per_second=3.2e12, source="products", measured=True)
    assert "measured too low" in TrainingStep._doubts_of_peak(step, 1.0)[0]


def test_closed_forms_need_no_torch() -> None:
    modules = "parbench.workloads.costs.communication_pattern, parbench.workloads.step.peaks"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
