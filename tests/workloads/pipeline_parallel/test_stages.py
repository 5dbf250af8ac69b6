"""Stages in sequence are the model, and each simulated action takes its share of time."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch

from parbench.bench.results.details import Action
from parbench.bench.world.world import World
from parbench.workloads.model.shapes import SHAPES
from parbench.workloads.model.transformer import draw_tokens, initialize, make_meta_model
from parbench.workloads.step import train_step
from tests.support.ranks import Ranks
from tests.support.workloads.mesh_steps import (
    assert_calibration,
    build_small_pipeline,
    record_waits,
)


@pytest.mark.parametrize("borders", [(0, 4), (0, 1, 4), (0, 2, 3, 4)])
@pytest.mark.parametrize("name", ["tiny", "tiny-llama"])
def test_stages_give_logits_of_the_model(name: str, borders: tuple[int, ...]) -> None:
    shape, device = SHAPES[name], torch.device("cpu")
    model = make_meta_model(shape, torch.float32)
    initialize(model, 0, device)
    tokens = draw_tokens(shape, 2, 0, 0)[:, :-1]
    output = tokens
    for first, end in pairwise(borders):
        part = make_meta_model(
            shape,
            torch.float32,
            range(first, end),
            has_embedding=first == 0,
            has_head=end == shape.layers,
        )
        initialize(part, 0, device)
        output = part(output)
    assert torch.equal(output, model(tokens))


def measure_waits(world: World, schedule: str) -> dict[str, list[float]]:
    """Return the waits of a simulated step by stage and kind, relative to a forward pass."""
    params = {"schedule": schedule, "microbatches": 4, "compute": "simulated:4ms"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_step, "calibrate", assert_calibration)
        step = build_small_pipeline(world, params)
    waits = record_waits(step._compute)
    running = step._recorder.running
    shares: dict[str, list[float]] = {}

    @contextmanager
    def record_action(action: Action) -> Iterator[None]:
        num_waits = len(waits)
        with running(action):
            yield
        seconds = sum(waits[num_waits:])
        shares.setdefault(f"{action.stage}{action.kind}", []).append(seconds / 0.004)

    step._recorder.running = record_action  # type: ignore[method-assign]
    step.step()
    actions = [action for action, _, _ in step._recorder.read()]
    assert step.spec.pipeline is not None
    assert actions == list(step.spec.pipeline.order.actions_by_rank[world.rank])
    step.close()
    return shares


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("zb_h1", 1), ("zb_v", 2)])
def test_simulated_actions_wait_for_their_share(
    two_ranks: Ranks, schedule: str, chunks: int
) -> None:
    num_kinds = 2 if schedule == "1f1b" else 3
    target = "tests.workloads.pipeline_parallel.test_stages:measure_waits"
    for shares in two_ranks.call(target, schedule=schedule):
        assert len(shares) == num_kinds * chunks
        for name, values in shares.items():
            # Torch's first stage computes all gradients with those of weights.
            passes = {"0I": 0, "0W": 2}.get(name, 2 if name.endswith("B") else 1)
            assert values == pytest.approx([passes / chunks] * 4), name
