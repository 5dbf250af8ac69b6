"""Small pipeline and hybrid steps, as the ranks of tests make them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from parbench.bench.world.world import World
from parbench.workloads.catalogue import DEFINITIONS
from parbench.workloads.mesh.mesh_step import HybridStep
from parbench.workloads.model.timed_compute import TimedCompute
from parbench.workloads.pipeline_parallel.pipeline_step import PipelineStep
from tests.support.training_steps import SMALL_PARAMS

Params = dict[str, Any]

EXPERT_PARAMS: Params = {"experts": 4, "ffn": 64}
[PIPELINE] = [one for one in DEFINITIONS if one.name == "workload.pp"]
[HYBRID] = [one for one in DEFINITIONS if one.name == "workload.hybrid"]


def build_small_pipeline(world: World, params: Params) -> PipelineStep:
    given = {**SMALL_PARAMS, "microbatch": 1, "layers": 2 * world.size, **params}
    return PipelineStep(world, PIPELINE.whole(given))


def build_small_hybrid(world: World, params: Params) -> HybridStep:
    given = {**SMALL_PARAMS, "kv_heads": 4, "microbatch": 1, "microbatches": 2, **params}
    return HybridStep(world, HYBRID.whole(given))


def assert_calibration(seconds: float, waiter: TimedCompute, forward: Callable[[], object]) -> None:
    """Stand in for ``calibrate``: the forward pass by which waits are shortened asks for as long as it is said to."""
    waits = record_waits(waiter)
    forward()
    assert abs(sum(waits) - seconds) < 1e-9 * seconds, (sum(waits), seconds)


def record_waits(waiter: TimedCompute) -> list[float]:
    """Return a list to which a waiter, from now on exact by its own clock, adds the seconds of every wait asked for."""
    waiter.forward_scale = waiter.backward_scale = 1.0
    asked: list[float] = []

    def telling(waiting: Callable[[float], AbstractContextManager[None]]) -> Any:
        @contextmanager
        def tell(seconds: float) -> Iterator[None]:
            asked.append(seconds)
            with waiting(seconds):
                yield

        return tell

    waiter.waiting = telling(waiter.waiting)  # type: ignore[method-assign]
    return asked
