"""Stages in sequence are the model, and each timed action takes its share of time."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch

from parbench.bench.results.details import Action
from parbench.bench.world.world import World
from parbench.workloads.model.shapes import SHAPES
from parbench.workloads.model.transformer import build, draw_tokens
from parbench.workloads.pipeline_parallel import stages
from parbench.workloads.pipeline_parallel.stages import Chunk
from tests.support.mesh_steps import assert_calibration, build_small_pipeline, record_waits
from tests.support.ranks import Ranks


@pytest.mark.parametrize("borders", [(0, 4), (0, 1, 4), (0, 2, 3, 4)])
@pytest.mark.parametrize("name", ["tiny", "tiny-llama"])
def test_stages_give_logits_of_the_model(name: str, borders: tuple[int, ...]) -> None:
    model = build(SHAPES[name], 0, torch.device("cpu"))
    tokens = draw_tokens(SHAPES[name], 2, 0, 0)[:, :-1]
    output = tokens
    for first, end in pairwise(borders):
        stage = Chunk(model, first, end - first)
        output = stage(output)
    assert torch.equal(output, model(tokens))


def measure_waits(world: World, schedule: str) -> dict[str, list[float]]:
    """Return the waits of a timed step by stage and kind, in forward passes of a rank's share."""
    params = {"schedule": schedule, "microbatches": 4, "compute": "simulated:4ms"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "calibrate", assert_calibration)
        step = build_small_pipeline(world, params)
    waits = record_waits(step._waiter)
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
    assert actions == list(step.spec.order.actions_by_rank[world.rank])
    step.close()
    return shares


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("zb_h1", 1), ("zb_v", 2)])
def test_timed_actions_wait_for_their_share(
    two_ranks: Ranks, schedule: str, chunks: int
) -> None:
    num_kinds = 2 if schedule == "1f1b" else 3
    target = "tests.workloads.pipeline_parallel.test_stages:measure_waits"
    for shares in two_ranks.call(target, schedule=schedule):
        assert len(shares) == num_kinds * chunks
        for name, values in shares.items():
            passes = 2 if name.endswith("B") else 1
            assert values == pytest.approx([passes / chunks] * 4), name
