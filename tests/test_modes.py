"""Every mode takes its sample as it says."""

import time
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks

from bench.errors import UserError
from bench.modes import MANY, sampler
from bench.operation import Operation
from bench.runner import load_target
from bench.subject import Description
from bench.world import World

NO_WORLD = cast(World, None)


class Steps:
    """Counts its steps."""

    def __init__(self) -> None:
        self.count = 0

    def step(self) -> None:
        self.count += 1

    def reset(self) -> None:
        self.count = 0

    def check(self) -> int:
        return 0

    def describe(self) -> Description:
        return Description()

    def close(self) -> None:
        pass


class Apart(Steps):
    """Takes 5 ms to issue, and 10 ms to wait for each of two."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[int] = []

    def issue(self) -> Sequence[dist.Work]:
        time.sleep(0.005)
        return [cast(dist.Work, self), cast(dist.Work, self)]

    def wait(self) -> None:
        time.sleep(0.01)
        self.waited.append(time.perf_counter_ns())


class OneAfterAnother(Steps):
    """Reduces another tensor in each step, and notes what it is right after the call."""

    def __init__(self, world: World, steps: int) -> None:
        super().__init__()
        self._world = world
        self.tensors = [torch.ones(4) for _ in range(steps)]
        self.noted: list[float] = []

    def step(self) -> None:
        tensor = self.tensors[self.count]
        dist.all_reduce(tensor, group=self._world.group)
        self.noted.append(float(tensor[0]))
        super().step()


def sample_of_three(world: World, mode: str) -> tuple[list[float], list[float]]:
    """Return what each tensor was right after its call and what it was at the end."""
    subject = OneAfterAnother(world, 3)
    assert sampler(mode, subject, world, 3)() is None
    return subject.noted, [float(tensor.sum()) / 4 for tensor in subject.tensors]


def issue_all_reduce(world: World) -> tuple[bool, int]:
    """Return whether the issue time is between arrival and end, and how much is wrong then."""
    prepare = load_target("bench.collectives:all_reduce")
    operation = cast(Operation, prepare(world, size_bytes=1 << 16, dtype="float32"))
    sample = sampler("async", operation, world, 1)
    operation.reset()
    arrived = time.perf_counter_ns()
    issued = sample()
    ended = time.perf_counter_ns()
    return issued is not None and arrived < issued < ended, operation.check()


def test_a_blocking_sample_is_one_step() -> None:
    subject = Steps()
    assert sampler("blocking", subject, NO_WORLD, 1)() is None
    assert subject.count == 1
    assert "blocking" not in MANY


def test_a_pipelined_sample_is_as_many_steps_as_are_asked_for() -> None:
    subject = Steps()
    sample = sampler("pipelined", subject, NO_WORLD, 7)
    assert subject.count == 0
    sample()
    sample()
    assert subject.count == 14


def test_an_asynchronous_sample_tells_when_it_was_issued_and_waits_for_all() -> None:
    subject = Apart()
    sample = sampler("async", subject, NO_WORLD, 1)
    arrived = time.perf_counter_ns()
    issued = sample()
    assert issued is not None
    assert issued - arrived >= 5_000_000
    assert len(subject.waited) == 2
    assert subject.waited[0] - issued >= 10_000_000
    assert subject.count == 0


def test_what_cannot_be_issued_cannot_be_measured_asynchronously() -> None:
    with pytest.raises(UserError, match="mode async"):
        sampler("async", Steps(), NO_WORLD, 1)


def test_an_all_reduce_issued_and_waited_for_is_right(two_ranks: Ranks) -> None:
    assert two_ranks.call("test_modes:issue_all_reduce") == [(True, 0), (True, 0)]


def test_pipelined_collectives_run_one_by_one(two_ranks: Ranks) -> None:
    answers: list[Any] = two_ranks.call("test_modes:sample_of_three", mode="pipelined")
    assert answers == [([2.0] * 3, [2.0] * 3)] * 2


def test_coalesced_collectives_run_together_at_the_end(two_ranks: Ranks) -> None:
    answers: list[Any] = two_ranks.call("test_modes:sample_of_three", mode="coalesced")
    assert answers == [([1.0] * 3, [2.0] * 3)] * 2


@pytest.mark.gpu
def test_a_graph_replays_as_many_steps_as_were_captured() -> None:
    class Adds(Steps):
        def __init__(self) -> None:
            super().__init__()
            self.total = torch.zeros(1, device="cuda")

        def step(self) -> None:
            super().step()
            self.total.add_(1)

    subject = Adds()
    sample = sampler("graph", subject, NO_WORLD, 5)
    captured = subject.count
    subject.total.zero_()
    sample()
    sample()
    torch.cuda.synchronize()
    assert float(subject.total) == 10
    assert subject.count == captured
