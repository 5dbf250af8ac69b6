"""Real steps, traced as a probe traces them and profiled as a user profiles them."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.profiler import record_function

from parbench.bench.results.traced import STEP, on_host
from parbench.bench.world.torch_compat import profiling, trace_events
from parbench.bench.world.world import World
from parbench.workloads.step.overlap import broken_down, held_against
from parbench.workloads.step.sent_bytes import counted
from tests.support.training_steps import build_small_step


def both_ways(world: World, name: str, params: dict[str, Any], folder: str) -> dict[str, Any]:
    """Trace one step as a probe does, write the same profile as a file, and return the probe's breakdown of it."""
    step = build_small_step(world, name, params)
    for _ in range(2):
        step.reset()
        world.barrier()
        step.step()
    calls = counted(step.step, step.layout.axes)
    step.reset()
    world.barrier()
    with profiling(world.device) as profiler, record_function(STEP):
        step.step()
    trace = on_host(trace_events(profiler), 0.0)
    profiler.export_chrome_trace(str(Path(folder) / f"rank{world.rank}.json"))
    step.close()
    return asdict(broken_down(trace, held_against(trace, calls)))
