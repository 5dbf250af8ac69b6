"""Analytical memory is close to the peak that torch's trackers find with fake tensors."""

from dataclasses import replace

import pytest

from parbench.workloads.costs.memory import compute_rank_memory
from parbench.workloads.model.shapes import Checkpointing, Shape
from tests.studies.memory_oracle import (
    GPT,
    LLAMA,
    compute_gathered_inputs,
    make_spec,
    measure_peak_bytes,
)


@pytest.mark.parametrize(
    ("shape", "mesh", "checkpointing"),
    [
        (LLAMA, "dp=1", "selective"),
        pytest.param(GPT, "tp=8", "none", marks=pytest.mark.full),
        pytest.param(LLAMA, "fsdp=512", "full", marks=pytest.mark.full),
    ],
)
def test_memory_is_near_tracked_peak(
    shape: Shape, mesh: str, checkpointing: Checkpointing
) -> None:
    view = make_spec(replace(shape, layers=2), mesh, checkpointing).make_rank_view(0)
    planned = compute_rank_memory(view).total + compute_gathered_inputs(view)
    assert planned == pytest.approx(measure_peak_bytes(view), rel=0.05)
