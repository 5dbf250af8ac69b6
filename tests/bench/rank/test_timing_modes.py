"""Every mode takes its sample as it says; what is disturbed on purpose is slower or wrong, and nothing else."""

import time
from collections.abc import Sequence
from typing import cast

import pytest
import torch
import torch.distributed as dist
from fake_time import HeldTime
from fakes import Noting
from filling import filling
from ranks import Ranks

from bench.operations.operation import Operation
from bench.plan.plan import parse_fault
from bench.rank import runner, timing
from bench.rank.runner import Disturbed, load_target
from bench.rank.timing import sampler
from bench.text import UserError
from bench.world.subject import Description
from bench.world.world import World

NO_WORLD = cast(World, None)


class Takes(Noting):
    """Takes so long to launch a step and so long until its device has done it; two works to wait for, 10 s each."""

    def __init__(self, clock: HeldTime, launch: float = 0.0, device: float = 0.0) -> None:
        super().__init__()
        self.clock, self.launch, self.device = clock, launch, device

    def step(self) -> None:
        super().step()
        self.clock.sleep(self.launch)

    def issue(self) -> Sequence[dist.Work]:
        self.calls.append("issue")
        self.clock.sleep(5.0)
        return [cast(dist.Work, self), cast(dist.Work, self)]

    def wait(self) -> None:
        self.calls.append("wait")
        self.clock.sleep(10.0)

    def sync(self) -> None:
        self.calls.append("sync")
        self.clock.sleep(self.device)

    def check(self) -> int:
        return 3

    def describe(self) -> Description:
        return Description(headline="asleep")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HeldTime:
    fake = HeldTime(100_000_000_000)
    for module in (timing, runner):
        monkeypatch.setattr(module, "time", fake)
    return fake


def sample_of_three(world: World, mode: str) -> tuple[list[float], list[float]]:
    """Reduce three tensors in a sample; return what each was right after its call and what it was at the end."""
    tensors, noted = [torch.ones(4) for _ in range(3)], list[float]()

    class OneAfterAnother(Noting):
        def step(self) -> None:
            tensor = tensors[len(noted)]
            dist.all_reduce(tensor, group=world.group)
            noted.append(float(tensor[0]))

    assert sampler(mode, OneAfterAnother(), world, 3)() is None
    return noted, [float(tensor.sum()) / 4 for tensor in tensors]


def issue_all_reduce(world: World) -> tuple[bool, int]:
    """Return whether the issue time is between arrival and end, and how much is wrong then."""
    prepare = load_target("bench.operations.collectives:all_reduce")
    operation = cast(Operation, prepare(world, size_bytes=1 << 16, dtype="float32"))
    sample = sampler("async", operation, world, 1)
    operation.reset()
    arrived = time.perf_counter_ns()
    issued = sample()
    ended = time.perf_counter_ns()
    return issued is not None and arrived < issued < ended, operation.check()


def test_an_asynchronous_sample_tells_when_it_was_issued_and_waits_for_all(clock: HeldTime, two_ranks: Ranks) -> None:
    subject = Takes(clock)
    assert sampler("async", subject, NO_WORLD, 1)() == 105_000_000_000
    assert subject.calls == ["issue", "wait", "wait"]
    with pytest.raises(UserError, match="mode async"):
        sampler("async", Noting(), NO_WORLD, 1)
    assert two_ranks.call("test_timing_modes:issue_all_reduce") == [(True, 0), (True, 0)]


def test_pipelined_collectives_run_one_by_one_and_coalesced_ones_together_at_the_end(two_ranks: Ranks) -> None:
    for mode, noted in (("pipelined", 2.0), ("coalesced", 1.0)):
        assert two_ranks.call("test_timing_modes:sample_of_three", mode=mode) == [([noted] * 3, [2.0] * 3)] * 2, mode


def test_a_slow_step_takes_longer_by_its_share_of_the_devices_time_not_of_its_launch(clock: HeldTime) -> None:
    subject = Takes(clock, launch=1.0, device=9.0)
    Disturbed(subject, parse_fault("slow:1:300%", 2), subject.sync).step()
    assert subject.calls == ["step", "sync"]
    assert clock.perf_counter() == 140.0
    right = filling()
    Disturbed(right, parse_fault("slow:1:10%", 2), subject.sync).step()
    assert right.check() == 0


def test_a_late_step_takes_no_longer_and_waits_for_no_device_and_all_else_is_the_subjects(clock: HeldTime) -> None:
    subject = Takes(clock, launch=1.0, device=9.0)
    disturbed = Disturbed(subject, parse_fault("late:1:3s", 2), subject.sync)
    disturbed.reset()
    disturbed.step()
    assert clock.perf_counter() == 101.0
    disturbed.close()
    assert subject.calls == ["reset", "step", "close"]
    assert (disturbed.check(), disturbed.describe().headline) == (3, "asleep")


def test_a_corrupt_step_has_exactly_one_wrong_element_and_what_cannot_be_disturbed_is_refused(clock: HeldTime) -> None:
    operation, subject = filling(), Takes(clock)
    disturbed = Disturbed(operation, parse_fault("corrupt:1", 2), subject.sync)
    for _ in range(2):
        disturbed.reset()
        assert disturbed.check() == 4
        disturbed.step()
        assert disturbed.check() == 1
    operation.step()
    assert disturbed.check() == 0
    with pytest.raises(UserError, match=r"corrupt:1: this subject has no corrupt\(\)"):
        Disturbed(subject, parse_fault("corrupt:1", 2), subject.sync).step()
    for text in ("corrupt:1", "slow:1:10%"):
        with pytest.raises(UserError, match="mode async knows only late"):
            Disturbed(subject, parse_fault(text, 2), subject.sync).issue()
