"""Stages in sequence are the model, and each action is stamped and takes its share of time."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parbench.bench.results.details import Action
from parbench.bench.world.world import World
from parbench.workloads.costs.memory import schedule_of
from parbench.workloads.model.shapes import SHAPES
from parbench.workloads.model.transformer import build, draw_tokens
from parbench.workloads.pipeline_parallel import stages
from parbench.workloads.pipeline_parallel.stages import Chunk, Held, Recorder, notes_of_links
from tests.support.mesh_steps import assert_calibration, build_small_pipeline, record_waits
from tests.support.ranks import Ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize("layers", [(0, 4), (0, 1, 4), (0, 2, 3, 4)])
@pytest.mark.parametrize("name", ["tiny", "tiny-llama"])
def test_stages_give_logits_of_the_model(name: str, layers: tuple[int, ...]) -> None:
    model = build(SHAPES[name], 0, CPU)
    tokens = draw_tokens(SHAPES[name], 2, 0, 0)[:, :-1]
    output = tokens
    for first, end in pairwise(layers):
        output = Chunk(model, first, end - first)(output)
    assert torch.equal(output, model(tokens))


@pytest.mark.parametrize("name", ["tiny", "tiny-llama"])
def test_stages_hold_each_parameter_once(name: str) -> None:
    model = build(SHAPES[name], 0, CPU)
    chunks = [Chunk(model, layer, 1) for layer in range(4)]
    outer = dict(Held([chunks[0], chunks[3]]).named_parameters())
    inner = dict(Held(chunks[1:3]).named_parameters())
    assert not outer.keys() & inner.keys()
    assert {**outer, **inner} == dict(model.named_parameters())


@pytest.mark.parametrize(("backend", "notes"), [("nccl", 1), ("gloo", 0)])
def test_serialized_nccl_messages_are_noted(backend: str, notes: int) -> None:
    world: Any = SimpleNamespace(backend=backend)
    assert len(notes_of_links(world)) == notes


def test_recorder_stamps_actions() -> None:
    recorder = Recorder(CPU)
    before = time.perf_counter_ns()
    with recorder.running(Action(1, "F", 0)):
        during = time.perf_counter_ns()
    [(action, start, stop)] = recorder.read()
    assert str(action) == "1F0"
    assert before <= start <= during <= stop
    recorder.extend()  # The loss belongs to the last forward pass.
    [(_, same_start, later_stop)] = recorder.read()
    assert same_start == start
    assert later_stop > stop
    recorder.forget()
    assert recorder.read() == []


def measure_waits(world: World, schedule: str) -> dict[str, list[float]]:
    """Return the waits of a timed step by stage and kind, in forward passes of a rank's share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "calibrate", assert_calibration)
        params = {"schedule": schedule, "microbatches": 4, "compute": "timed:4ms"}
        step = build_small_pipeline(world, params)
    waits = record_waits(step._waiter)
    running = step._recorder.running
    shares: dict[str, list[float]] = {}

    @contextmanager
    def record_action(action: Action) -> Iterator[None]:
        num_waits = len(waits)
        with running(action):
            yield
        name = f"{action.stage}{action.kind}"
        shares.setdefault(name, []).append(sum(waits[num_waits:]) / 0.004)

    step._recorder.running = record_action  # type: ignore[method-assign]
    step.step()
    actions = [action for action, _, _ in step._recorder.read()]
    assert actions == list(schedule_of(step.spec).actions_of(world.rank))
    step.close()
    return shares


@pytest.mark.parametrize(("schedule", "chunks"), [("zb_h1", 1), ("zb_v", 2), ("1f1b", 1)])
def test_timed_actions_wait_for_their_share(two_ranks: Ranks, schedule: str, chunks: int) -> None:
    for shares in two_ranks.call(
        "tests.workloads.pipeline_parallel.test_stages:measure_waits", schedule=schedule
    ):
        assert len(shares) == (2 if schedule == "1f1b" else 3) * chunks
        for name, values in shares.items():
            passes = 2 if name.endswith("B") else 1
            assert values == pytest.approx([passes / chunks] * 4), name
