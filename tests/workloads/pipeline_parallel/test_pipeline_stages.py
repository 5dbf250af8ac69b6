"""Stages, one after the other, are the model, and what each does is stamped at both ends and waits for its share."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise, product
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


def test_stages_after_one_another_give_the_models_logits() -> None:
    for name, cuts in product(("tiny", "tiny-llama"), ((0, 4), (0, 1, 4), (0, 2, 3, 4))):
        model = build(SHAPES[name], 0, CPU)
        x = tokens = draw_tokens(SHAPES[name], 2, 0, 0)[:, :-1]
        for first, end in pairwise(cuts):
            x = Chunk(model, first, end - first)(x)
        assert torch.equal(x, model(tokens)), (name, cuts)


def test_every_parameter_is_held_once_under_its_own_name() -> None:
    for name, positions in (("tiny", {"positions"}), ("tiny-llama", set[str]())):
        model = build(SHAPES[name], 0, CPU)
        first, *middle, last = (Chunk(model, first, 1) for first in range(4))
        mine, others = (dict(Held(chunks).named_parameters()) for chunks in ([first, last], middle))
        whole = dict(model.named_parameters())
        assert sorted([*mine, *others]) == sorted(whole)
        assert all(parameter is whole[name] for name, parameter in {**mine, **others}.items())
        assert {name.split(".")[0] for name in mine} == {
            "tokens",
            "layers",
            "norm",
            "head",
        } | positions


def test_a_row_says_that_nccl_sends_one_after_the_other() -> None:
    worlds: list[Any] = [SimpleNamespace(backend=backend) for backend in ("nccl", "gloo")]
    [[note], none] = map(notes_of_links, worlds)
    assert note.endswith("that counts as bubble")
    assert none == ()


def test_an_action_is_stamped_at_both_ends_and_the_loss_belongs_to_the_last_forward() -> None:
    recorder = Recorder(CPU)
    before = time.perf_counter_ns()
    with recorder.running(Action(1, "F", 0)):
        time.sleep(0.01)
    [(_, start, stop)] = recorder.read()
    assert before <= start < start + 10_000_000 <= stop <= time.perf_counter_ns()
    time.sleep(0.02)
    recorder.extend()
    [(action, same_start, later)] = recorder.read()
    assert (str(action), same_start) == ("1F0", start)
    assert later >= stop + 20_000_000
    recorder.forget()  # a step begins with nothing
    assert recorder.read() == []


def asked(world: World, schedule: str) -> dict[str, list[float]]:
    """Return for how long a timed step's actions wait, by what they are, in forward passes of a rank's share."""
    seconds = 0.004
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "calibrate", assert_calibration)
        step = build_small_pipeline(
            world, {"schedule": schedule, "microbatches": 4, "compute": f"timed:{seconds}s"}
        )
    waits, running = record_waits(step._waiter), step._recorder.running
    found: dict[str, list[float]] = {}

    @contextmanager
    def telling(action: Action) -> Iterator[None]:
        before = len(waits)
        with running(action):
            yield
        found.setdefault(f"{action.stage}{action.kind}", []).append(sum(waits[before:]) / seconds)

    step._recorder.running = telling  # type: ignore[method-assign]
    step.step()
    ran = [str(action) for action, _, _ in step._recorder.read()]
    assert ran == [str(action) for action in schedule_of(step.spec).actions_of(world.rank)]
    step.close()
    return found


def test_forward_and_both_gradients_wait_for_one_share_each_on_every_stage(
    two_ranks: Ranks,
) -> None:
    """On the first stage too, whose input are tokens: its layers' input is the embeddings' output."""
    for schedule, chunks, whole in (("zb_h1", 1, ""), ("zb_v", 2, ""), ("1f1b", 1, "B")):
        for found in two_ranks.call(
            "tests.workloads.pipeline_parallel.test_pipeline_stages:asked", schedule=schedule
        ):
            assert len(found) == (2 if whole else 3) * chunks
            for name, shares in found.items():
                assert shares == pytest.approx([(2 if name[-1] in whole else 1) / chunks] * 4), (
                    schedule,
                    name,
                )
