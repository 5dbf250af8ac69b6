"""Peak memory and peak FLOP/s of a device."""

import pytest
import torch

from parbench.workloads.step.memory import peak_during
from parbench.workloads.step.peaks import measured_peak

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
NUM_BYTES = 1 << 20


def test_peak_memory_is_the_allocator_peak() -> None:
    def allocate() -> None:
        torch.empty(NUM_BYTES, dtype=torch.uint8, device=GPU)

    assert peak_during(allocate, GPU) == NUM_BYTES


def test_measured_peak_exceeds_ten_teraflops() -> None:
    assert measured_peak(GPU, torch.bfloat16) > 1e13
