"""What binds a step: each cause in a step where it must be the one."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from planner_asks import H100, PLAIN, ask

from workloads.planner.binding import binding_of
from workloads.planner.dry_run import DryRun, dry_run
from workloads.planner.step_time import Axis, StepTime


def made(
    *,
    compute: float = 1.0,
    bubble: float = 0.0,
    tp: float = 0.0,
    dp: float = 0.0,
    checkpointing: str = "none",
    microbatch: int = 1,
) -> DryRun:
    """Return a small step whose parts are as said."""
    run = dry_run(ask("dp=2", checkpointing=checkpointing, microbatch=microbatch), H100)
    axes = tuple(
        Axis(name=name, seconds=seconds, exposed_seconds=seconds, sent_bytes=0, where="", assumption="")
        for name, seconds in (("tp", tp), ("dp", dp))
    )
    time = StepTime(
        busiest=run.time.busiest,
        compute_seconds=compute,
        update_seconds=1e-9,
        bubble_seconds=bubble,
        bubble_method="",
        axes=axes,
    )
    return replace(run, time=time)


@pytest.mark.parametrize(
    ("run", "binding"),
    [
        (made(), "compute (100% of the step)"),
        (made(tp=0.1), "compute (91% of the step)"),
        (made(tp=1.0), "link tp (50% of the step)"),
        (made(tp=0.5, dp=0.5), "link tp (25% of the step)"),
        (made(tp=0.4, dp=0.6), "link dp (30% of the step)"),
        (made(bubble=1.0), "batch (50% of the step)"),
        (made(bubble=1.0, microbatch=2), "bubble (50% of the step)"),
        (made(bubble=0.6, tp=1.0), "link tp (38% of the step)"),
        (made(checkpointing="full"), "memory (25% of the step)"),
        (made(checkpointing="full", tp=3.0), "link tp (75% of the step)"),
        (made(compute=0.1, tp=0.01, checkpointing="full"), "memory (23% of the step)"),
    ],
)
def test_the_largest_part_that_is_no_arithmetic_binds(run: DryRun, binding: str) -> None:
    assert binding_of(run) == binding


@pytest.mark.parametrize("tp", [0.0, 1.0])
def test_full_memory_is_said_beside_it(tp: float) -> None:
    run = made(tp=tp)
    needed = run.fullest.memory.total
    full = replace(run, hardware=msgspec.structs.replace(PLAIN, memory_bytes=needed / 0.95))
    assert binding_of(full).endswith("of the step, memory 95% full)")


def test_room_is_not_said() -> None:
    assert "memory" not in binding_of(made(tp=1.0))


@pytest.mark.parametrize(
    ("mesh", "model", "more", "cause"),
    [
        ("tp=8", "llama3-8b", {}, "link tp"),
        ("tp=16", "gpt-175b", {}, "link tp"),
        ("pp=8,tp=8", "llama3-70b", {"microbatches": 8}, "batch"),
        ("pp=8,tp=8", "llama3-70b", {"microbatches": 4, "microbatch": 2}, "bubble"),
        ("fsdp=8", "llama3-8b", {"checkpointing": "full"}, "memory"),
        ("fsdp=8", "llama3-8b", {}, "compute"),
    ],
)
def test_real_steps_are_bound_by_what_one_would_say(mesh: str, model: str, more: dict[str, Any], cause: str) -> None:
    assert binding_of(dry_run(ask(mesh, model, **more), H100)).startswith(f"{cause} (")


def test_sharding_over_slow_links_binds() -> None:
    slow = msgspec.structs.replace(H100, across_bytes_per_second=1e9)
    assert binding_of(dry_run(ask("fsdp=64", "llama3-8b"), slow)).startswith("link fsdp (")
