"""Steps for the tests of the planner: small ones by default, large ones by name."""

from dataclasses import replace
from typing import Any

from parbench.bench.plan.groups import parse_mesh
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.planner.hardware import PRESETS, Efficiency, Hardware
from parbench.workloads.planner.models import model_of

SIMPLE_HARDWARE = Hardware(
    name="plain",
    source="a test",
    flops_per_second=100e12,
    memory_bytes=80e9,
    memory_bytes_per_second=1e12,
    gpus_per_node=8,
    inside_bytes_per_second=100e9,
    across_bytes_per_second=10e9,
    launch_seconds=0.0,
    inside_hop_seconds=0.0,
    across_hop_seconds=0.0,
    efficiency=Efficiency(
        gemm=1.0, links_inside=1.0, links_across=1.0, memory_rate=1.0, memory=1.0, overlap={}
    ),
)
H100 = PRESETS["h100"]


def make_spec(mesh: str = "dp=2", model: str | StepSpec = "small-llama", **more: Any) -> StepSpec:
    known = model_of(model) if isinstance(model, str) else model
    return known.on(parse_mesh(mesh), **more)


def as_measured(step: StepSpec, device: str = "cpu") -> StepSpec:
    """Return a step as workload.hybrid takes it on a kind of device."""
    return replace(step, device=device, ends="tokens")
