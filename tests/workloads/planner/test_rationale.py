"""The rationale explains each axis of the fastest mesh and names the part that bounds the step."""

from dataclasses import replace
from typing import Any

import pytest

from parbench.workloads.parallel.dims import ParallelDims
from parbench.workloads.planner.dry_run import Axis, DryRun, dry_run
from parbench.workloads.planner.rationale import binding_of, rationale
from parbench.workloads.planner.search import search
from tests.support.planner_asks import H100, make_request, make_spec


def test_rationale_explains_each_axis() -> None:
    request = make_request("llama3-70b", 16, 16, schedule="1f1b", microbatch=1)
    result = search(request, H100)
    best = result.best[0]
    simpler = replace(best, spec=replace(best.spec, dims=ParallelDims(fsdp=16)))
    lines = rationale(
        replace(result, best=(best, simpler), without={"pp": None, "tp": simpler})
    )
    assert best.spec.dims.sizes == {"pp": 2, "tp": 8}
    [fit, tensor, pipeline, *_, shorter, binding] = lines
    assert "1,129 GB of state" in fit
    assert "without it the fastest is fsdp=16" in tensor
    assert "without pp nothing fits" in pipeline
    assert f"its bubble is {best.bubble_seconds / best.seconds:.1%}" in pipeline
    assert shorter.startswith("simpler: fsdp=16 ")
    assert binding_of(best) in binding


def make_run(
    bubble: float = 0.0, checkpointing: str = "none", microbatch: int = 1, **exposed: float
) -> DryRun:
    """Return a step of one second of compute, a bubble, and exposed seconds by axis."""
    spec = make_spec("dp=2", checkpointing=checkpointing, microbatch=microbatch)
    parts: dict[str, Any] = {"sent_bytes": 0, "where": "", "assumption": ""}
    axes = [
        Axis(name=name, seconds=seconds, exposed_seconds=seconds, **parts)
        for name, seconds in exposed.items()
    ]
    return replace(
        dry_run(spec, H100),
        update_seconds=1e-9,
        compute_seconds=1.0,
        bubble_seconds=bubble,
        axes=tuple(axes),
    )


@pytest.mark.parametrize(
    ("run", "binding"),
    [
        (make_run(tp=0.1), "compute (91% of the step)"),
        (make_run(tp=0.4, dp=0.6), "link dp (30% of the step)"),
        (make_run(bubble=1.0), "batch (50% of the step)"),
        (make_run(bubble=1.0, microbatch=2), "bubble (50% of the step)"),
        (make_run(checkpointing="full"), "memory (25% of the step)"),
    ],
)
def test_binding_is_the_largest_part(run: DryRun, binding: str) -> None:
    assert binding_of(run) == binding
