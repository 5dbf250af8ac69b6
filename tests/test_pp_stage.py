"""Stamps stand at both ends of an action, and the first stage's input gradient is one."""

import time

import pytest
import torch
from ranks import Ranks
from test_pp import small

from bench.world import World
from workloads.pipeline.actions import Action
from workloads.pipeline.pp_stage import Recorder, timed_loss

CPU = torch.device("cpu")


def test_an_action_is_stamped_at_both_ends() -> None:
    recorder = Recorder(CPU)
    before = time.perf_counter_ns()
    with recorder.running(Action(1, "F", 0)):
        time.sleep(0.01)
    after = time.perf_counter_ns()
    [(action, start, stop)] = recorder.read()
    assert str(action) == "1F0"
    assert before <= start <= stop <= after
    assert stop - start >= 10_000_000


def test_the_loss_belongs_to_the_last_forward() -> None:
    recorder = Recorder(CPU)

    def slow(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return output - target

    with recorder.running(Action(1, "F", 0)):
        pass
    loss = timed_loss(recorder, slow)(torch.tensor(3.0), torch.tensor(1.0))
    assert loss == 2.0
    [(action, start, stop)] = recorder.read()
    assert str(action) == "1F0"
    assert stop - start >= 20_000_000


def test_a_step_begins_with_nothing() -> None:
    recorder = Recorder(CPU)
    with recorder.running(Action(0, "B", 0)):
        pass
    recorder.forget()
    assert recorder.read() == []


def durations(world: World, schedule: str, seconds: float) -> dict[str, list[float]]:
    """Return how long a timed step's actions take, by what they are, in units of ``seconds``."""
    given = {"schedule": schedule, "microbatches": 4, "compute": f"timed:{seconds}s"}
    step = small(world, given)
    step.step()
    step.reset()
    step.step()
    ran = step._recorder.read()
    assert [str(action) for action, _, _ in ran] == [
        str(action) for action in step._pipeline.schedule.actions_of(world.rank)
    ]
    step.close()
    found: dict[str, list[float]] = {}
    for action, start, stop in ran:
        found.setdefault(f"{action.stage}{action.kind}", []).append((stop - start) / 1e9 / seconds)
    return found


@pytest.mark.measures
@pytest.mark.parametrize("schedule", ["zb_h1", "zb_v"])
def test_forward_and_both_gradients_take_one_share_each_on_every_stage(two_ranks: Ranks, schedule: str) -> None:
    """On the first stage too, whose input are tokens: its layers' input is the embeddings' output."""
    chunks = 2 if schedule == "zb_v" else 1
    for found in two_ranks.call("test_pp_stage:durations", schedule=schedule, seconds=0.05):
        assert len(found) == 3 * chunks
        for name, shares in found.items():
            assert min(shares) == pytest.approx(1 / chunks, abs=0.2), name


def test_a_whole_backward_takes_two_shares(two_ranks: Ranks) -> None:
    for found in two_ranks.call("test_pp_stage:durations", schedule="1f1b", seconds=0.05):
        for name, shares in found.items():
            assert min(shares) == pytest.approx(2.0 if name.endswith("B") else 1.0, abs=0.25), name
