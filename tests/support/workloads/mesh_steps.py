"""Small pipeline steps, and records of their simulated compute."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from parbench.bench.world.world import World
from parbench.workloads.model.simulated_compute import SimulatedCompute
from parbench.workloads.step.train_step import TrainStep
from tests.support.workloads.training_steps import build_small_step

Params = dict[str, Any]


def build_small_pipeline(world: World, params: Params) -> TrainStep:
    defaults = {"microbatch": 1, "layers": 2 * world.size}
    return build_small_step(world, "pp", {**defaults, **params})


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

    waiter.take_seconds = record(waiter.take_seconds)  # type: ignore[method-assign]
    return waits
