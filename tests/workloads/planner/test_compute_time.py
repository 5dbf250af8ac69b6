"""GEMMs get slower than their FLOPs as they get small, and kernels cost a launch."""

import pytest

from parbench.workloads.costs.flops import count_rank_flops
from parbench.workloads.planner.compute_time import (
    GemmShape,
    compute_gemm_seconds,
    compute_microbatch,
)
from parbench.workloads.planner.hardware import PRESETS
from tests.support.workloads.planner_asks import SIMPLE_HARDWARE, make_spec


@pytest.mark.parametrize(
    ("name", "size", "efficiency"),
    [("a100", 8192, 0.72), ("a100", 2048, 0.59), ("h100", 8192, 0.64), ("h100", 1024, 0.24)],
)
def test_gemm_efficiency_falls_with_size(name: str, size: int, efficiency: float) -> None:
    gemm = GemmShape(m=size, n=size, k=size)
    seconds = compute_gemm_seconds(gemm, PRESETS[name], 2)
    share = gemm.flops / seconds / PRESETS[name].flops_per_second
    assert share == pytest.approx(efficiency, abs=0.02)


@pytest.mark.parametrize("mesh", ["tp=8", "pp=4", "fsdp=8", "cp=4"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_ideal_hardware_takes_the_flops_of_the_stage(mesh: str, checkpointing: str) -> None:
    spec = make_spec(mesh, "llama3-8b", microbatches=8, checkpointing=checkpointing)
    for view in spec.distinct_views:
        compute = compute_microbatch(view, SIMPLE_HARDWARE)
        seconds = compute.forward + compute.backward
        assert seconds == pytest.approx(count_rank_flops(view) / 100e12)
