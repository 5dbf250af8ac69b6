"""Small pipeline and mesh steps, and records of their simulated compute."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from parbench.bench.world.world import World
from parbench.workloads.mesh.mesh_step import HybridStep
from parbench.workloads.model.simulated_compute import SimulatedCompute
from parbench.workloads.pipeline_parallel.pipeline_step import PipelineStep
from tests.support.training_steps import DEFINITION_BY_NAME, SMALL_PARAMS

Params = dict[str, Any]

EXPERT_PARAMS: Params = {"experts": 4, "ffn": 64}
PIPELINE = DEFINITION_BY_NAME["pp"]
HYBRID = DEFINITION_BY_NAME["hybrid"]


def build_small_pipeline(world: World, params: Params) -> PipelineStep:
    defaults = {**SMALL_PARAMS, "microbatch": 1, "layers": 2 * world.size}
    return PipelineStep(world, PIPELINE.complete({**defaults, **params}))


def build_small_hybrid(world: World, params: Params) -> HybridStep:
    defaults = {**SMALL_PARAMS, "kv_heads": 4, "microbatch": 1, "microbatches": 2}
    return HybridStep(world, HYBRID.complete({**defaults, **params}))


def assert_calibration(
    waiter: SimulatedCompute, seconds: float, forward: Callable[[], object]
) -> None:
    """Replace ``calibrate``: the forward pass waits for the given seconds in total."""
    waits = record_waits(waiter)
    forward()
    assert abs(sum(waits) - seconds) < 1e-9 * seconds, (sum(waits), seconds)


def record_waits(waiter: SimulatedCompute) -> list[float]:
    """Return a list to which the waiter, now without calibration, adds the seconds of each wait."""
    waiter.forward_scale = waiter.backward_scale = 1.0
    waits: list[float] = []

    def record(waiting: Callable[[float], AbstractContextManager[None]]) -> Any:
        @contextmanager
        def wait(seconds: float) -> Iterator[None]:
            waits.append(seconds)
            with waiting(seconds):
                yield

        return wait

    waiter.taking = record(waiter.taking)  # type: ignore[method-assign]
    return waits
