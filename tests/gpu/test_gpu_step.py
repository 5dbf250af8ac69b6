"""Peak memory of a device."""

import pytest
import torch

from parbench.workloads.probes.memory_probe import peak_during

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
NUM_BYTES = 1 << 20


def test_peak_memory_is_the_allocator_peak() -> None:
    def allocate() -> None:
        torch.empty(NUM_BYTES, dtype=torch.uint8, device=GPU)

    assert peak_during(allocate, GPU) == NUM_BYTES
