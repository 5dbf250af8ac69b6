"""Real steps, profiled as a user profiles them, with a fault in each: what ``parbench explain`` is to find."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function
from training_steps import small

from parbench.bench.results.traced import STEP, on_host
from parbench.bench.world.torch_compat import profiling, trace_events
from parbench.bench.world.world import World
from parbench.workloads.step.overlap import broken_down, held_against
from parbench.workloads.step.sent_bytes import counted

_STEP = {"layers": 6, "hidden": 256, "kv_heads": 4, "sequence": 32, "vocabulary": 256, "compute": "timed:100ms"}
_PIPELINE = {**_STEP, "schedule": "1f1b", "microbatches": 4, "compute": "timed:20ms"}
_GATHERED_OFTEN = {"prefetch": "default", "hidden": 512, "compute": "timed:50ms", "accumulation": 3, "no_sync": True}
LATE_SECONDS, HOST_SECONDS = 0.02, 0.01
PLANTED: dict[str, tuple[str, dict[str, Any]]] = {
    "clean": ("ddp", {**_STEP, "bucket_mb": 1, "compute": "timed:200ms"}),
    "late rank": ("ddp", {**_STEP, "bucket_mb": 1}),
    "slow rank": ("ddp", {**_STEP, "bucket_mb": 1}),
    "one bucket": ("ddp", {**_STEP, "bucket_mb": 1000}),
    "host-bound": ("ddp", {**_STEP, "bucket_mb": 1}),
    "no prefetch": ("fsdp", {**_STEP, **_GATHERED_OFTEN}),
    "uneven stages": ("pp", {**_PIPELINE, "split": "5+1"}),
    "pipeline bubble": ("pp", {**_PIPELINE, "microbatches": 2}),
    "slow link": ("ddp", {**_STEP, "bucket_mb": 1, "compute": "timed:40ms"}),
}
"""By the kind of finding that each plants; a slow link is the ground's, not the step's."""


def profile_steps(world: World, kind: str, folder: str, steps: int = 5) -> None:
    """Write this rank's trace of some steps with a fault of a kind, as ``rankN.json``."""
    name, params = PLANTED[kind]
    step = small(world, name, params)
    slow = 1 if kind == "slow rank" else None
    if kind == "host-bound":
        for layer in step.layout.model.children():
            for one in list(layer.children()) or [layer]:
                one.register_forward_pre_hook(lambda *_: time.sleep(HOST_SECONDS))
    if world.rank == slow:
        for layer in step.layout.model.children():
            layer.register_forward_pre_hook(_slow_down)
    for _ in range(3):
        _take(step, world, kind)
    # with shapes, or nothing tells how many bytes gloo carries
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for number in range(steps):
            step.reset()
            world.barrier()
            with record_function(f"ProfilerStep#{number}"):
                if kind == "late rank" and world.rank == 1:
                    time.sleep(LATE_SECONDS)
                step.step()
    profiler.export_chrome_trace(str(Path(folder) / f"rank{world.rank}.json"))
    step.close()


def _slow_down(*_: object) -> None:
    with record_function("parbench:compute"):
        time.sleep(LATE_SECONDS / 2)


def _take(step: Any, world: World, kind: str) -> None:
    step.reset()
    world.barrier()
    step.step()


def both_ways(world: World, name: str, params: dict[str, Any], folder: str) -> dict[str, Any]:
    """Trace one step as a probe does, write the same profile as a file, and return the probe's breakdown of it."""
    step = small(world, name, params)
    for _ in range(2):
        _take(step, world, "")
    calls = counted(step.step, step.layout.axes)
    step.reset()
    world.barrier()
    with profiling(world.device) as profiler, record_function(STEP):
        step.step()
    trace = on_host(trace_events(profiler), 0.0)
    profiler.export_chrome_trace(str(Path(folder) / f"rank{world.rank}.json"))
    step.close()
    return asdict(broken_down(trace, held_against(trace, calls)))
