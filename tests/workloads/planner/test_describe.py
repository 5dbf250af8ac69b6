"""Texts about a step name its settings and its bottleneck."""

from dataclasses import replace
from typing import Any

import pytest

from parbench.workloads.planner.describe import (
    describe_bottleneck,
    describe_settings,
)
from parbench.workloads.planner.dry_run import Axis, DryRun, dry_run
from tests.support.workloads.planner_asks import H100, make_spec


def make_run(bubble: float = 0.0, **exposed: float) -> DryRun:
    """Return a step of one second of compute, a bubble, and exposed seconds by axis."""
    spec = make_spec("dp=2")
    parts: dict[str, Any] = {"sent_bytes": 0, "links": ""}
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
    ("run", "bottleneck"),
    [
        (make_run(tp=0.1), "compute (91% of the step)"),
        (make_run(tp=0.4, dp=0.6), "exposed dp (30% of the step)"),
        (make_run(bubble=1.0), "bubble (50% of the step)"),
    ],
)
def test_bottleneck_is_the_largest_part(run: DryRun, bottleneck: str) -> None:
    assert describe_bottleneck(run) == bottleneck


def test_settings_name_zero_with_cp() -> None:
    assert ", ZeRO 0, cp zigzag" in describe_settings(make_spec("cp=2"))


def test_settings_count_equal_stages() -> None:
    spec = make_spec("pp=4,dp=2", "llama3-8b", layers_per_stage="7+9+9+7", microbatches=8)
    text = "microbatch 1, checkpointing none, ZeRO 0, 1f1b, layers 7+2x9+7"
    assert describe_settings(spec) == text
