"""Analytical memory is close to the peak that torch's trackers find with fake tensors."""

from dataclasses import replace

import pytest

from parbench.workloads.costs.memory import rank_memory
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.model.shapes import Checkpointing, Shape
from parbench.workloads.parallel.dims import ParallelDims
from tests.studies.memory_oracle import (
    GPT,
    LLAMA,
    compute_gathered_inputs,
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
    spec = StepSpec(
        shape=replace(shape, layers=2),
        dims=ParallelDims.parse(mesh),
        checkpointing=checkpointing,
        microbatches=2,
    )
    view = spec.rank_view(0)
    planned = rank_memory(view).total + compute_gathered_inputs(view)
    assert planned == pytest.approx(measure_peak_bytes(view), rel=0.05)
