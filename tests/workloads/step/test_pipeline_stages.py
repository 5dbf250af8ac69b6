"""Each simulated action of a stage takes its share of time."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from parbench.bench.results.details import Action
from parbench.bench.world.world import World
from parbench.workloads.step import train_step
from tests.support.ranks import Ranks
from tests.support.workloads.mesh_steps import (
    assert_calibration,
    build_small_pipeline,
    record_waits,
)


def measure_waits(world: World, schedule: str) -> dict[str, list[float]]:
    """Return the waits of a simulated step by stage and kind, relative to a forward pass."""
    params = {"schedule": schedule, "microbatches": 4, "compute": "simulated:4ms"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_step, "calibrate", assert_calibration)
        step = build_small_pipeline(world, params)
    waits = record_waits(step._compute)
    record_original = step._recorder.record_action
    shares: dict[str, list[float]] = {}

    @contextmanager
    def record_action(action: Action) -> Iterator[None]:
        num_waits = len(waits)
        with record_original(action):
            yield
        seconds = sum(waits[num_waits:])
        shares.setdefault(f"{action.stage}{action.kind}", []).append(seconds / 0.004)

    step._recorder.record_action = record_action  # type: ignore[method-assign]
    step.step()
    actions = [action for action, _, _ in step._recorder.read()]
    assert step.spec.pipeline is not None
    assert actions == list(step.spec.pipeline.order.actions_by_rank[world.rank])
    step.close()
    return shares


@pytest.mark.parametrize(
    ("schedule", "virtual_stages"), [("1f1b", 1), ("zb_h1", 1), ("zb_v", 2)]
)
def test_simulated_actions_wait_for_their_share(
    two_ranks: Ranks, schedule: str, virtual_stages: int
) -> None:
    num_kinds = 2 if schedule == "1f1b" else 3
    target = "tests.workloads.step.test_pipeline_stages:measure_waits"
    for shares in two_ranks.call(target, schedule=schedule):
        assert len(shares) == num_kinds * virtual_stages
        for name, values in shares.items():
            # Torch's first stage computes all gradients with those of weights.
            passes = {"0I": 0, "0W": 2}.get(name, 2 if name.endswith("B") else 1)
            assert values == pytest.approx([passes / virtual_stages] * 4), name
