"""Steps, searches and hardware for the tests of the planner and of its cost formulas."""

from dataclasses import replace
from typing import Any

from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.mesh.dims import ParallelDims
from parbench.workloads.planner.candidates import SearchRequest, place_step
from parbench.workloads.planner.hardware import PRESETS, Efficiency, Hardware
from parbench.workloads.planner.models import load_model

SIMPLE_HARDWARE = Hardware(
    name="plain",
    source="a test",
    flops_per_second=100e12,
    memory_bytes=80e9,
    memory_bytes_per_second=1e12,
    gpus_per_node=8,
    inside_bytes_per_second=100e9,
    across_bytes_per_second=10e9,
    kernel_seconds=0.0,
    launch_seconds=0.0,
    inside_hop_seconds=0.0,
    across_hop_seconds=0.0,
    efficiency=Efficiency(
        gemm=1.0,
        attention=1.0,
        gemm_traffic=0.0,
        elementwise_traffic=0.0,
        links_inside=1.0,
        links_across=1.0,
        memory_rate=1.0,
        memory=1.0,
        overlap={},
    ),
)
"""Hardware of round numbers, without latency or overlap. GEMMs and attention reach its peak,
and other kernels take no time."""
H100 = PRESETS["h100"]


def make_spec(
    mesh: str = "dp=2", model: str | StepSpec = "small-llama", **params: Any
) -> StepSpec:
    """Return a step of a named model, or of another step's model, on a mesh."""
    step = load_model(model) if isinstance(model, str) else model
    names = {
        "schedule": "schedule",
        "virtual_stages": "stages_per_rank",
        "layers_per_stage": "layers_per_stage",
    }
    options = {field: params.pop(name) for name, field in names.items() if name in params}
    spec = place_step(step.with_pipeline(**options), ParallelDims.parse(mesh))
    return replace(spec, **params)


def make_request(
    model: str | StepSpec, gpus: int, global_batch: int = 16, **choices: Any
) -> SearchRequest:
    """Return the request of a search; choices are, for example, ``schedule`` and ``microbatch``."""
    return SearchRequest(
        step=make_spec(model=model), gpus=gpus, global_batch=global_batch, **choices
    )
