"""What a step's probes take from the device: its peak memory, its peak rate."""

import pytest
import torch

from parbench.workloads.step.memory import peak_during
from parbench.workloads.step.peaks import measured_peak

pytestmark = pytest.mark.gpu
MIB = 1 << 20


def test_on_cuda_the_peak_is_the_allocators() -> None:
    def step() -> None:
        torch.empty(MIB, dtype=torch.uint8, device="cuda")

    assert peak_during(step, torch.device("cuda")) == MIB


def test_a_gpu_beats_ten_teraflops_in_bfloat16() -> None:
    assert measured_peak(torch.device("cuda"), torch.bfloat16) > 1e13
