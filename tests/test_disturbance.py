"""What is disturbed on purpose is slower or wrong, as the injection says, and nothing else."""

import time
from collections.abc import Sequence
from typing import cast

import pytest
import torch
import torch.distributed as dist

from bench.disturbance import Disturbed
from bench.errors import UserError
from bench.injection import parse_injection
from bench.operation import Operation
from bench.subject import Description

pytestmark = pytest.mark.measures

STEP_SECONDS = 0.02
WORK = cast(dist.Work, object())


class Sleeps:
    """A subject that takes its time and cannot be corrupted."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def step(self) -> None:
        self.calls.append("step")
        time.sleep(STEP_SECONDS)

    def issue(self) -> Sequence[dist.Work]:
        self.calls.append("issue")
        return [WORK]

    def reset(self) -> None:
        self.calls.append("reset")

    def check(self) -> int:
        return 3

    def describe(self) -> Description:
        return Description(headline="asleep")

    def close(self) -> None:
        self.calls.append("close")


def at_once() -> None:
    """Wait for the CPU, which has done a step when the call returns."""


def ones() -> Operation:
    output = torch.empty(8)
    return Operation(
        call=lambda: output.fill_(1),
        restore=lambda: output.fill_(float("nan")),
        output=output,
        expected=lambda: torch.ones(8),
        description=Description(),
    )


def seconds_of_a_step(injection: str) -> float:
    disturbed = Disturbed(Sleeps(), parse_injection(injection, 2), at_once)
    began = time.perf_counter()
    disturbed.step()
    return time.perf_counter() - began


def test_a_slow_step_takes_longer_by_its_share() -> None:
    assert seconds_of_a_step("slow:1:300%") >= 4 * STEP_SECONDS
    assert min(seconds_of_a_step("slow:1:1%") for _ in range(5)) < 2 * STEP_SECONDS


class Launches(Sleeps):
    """A subject whose step is only launched: its device has done it when it is waited for."""

    def step(self) -> None:
        self.calls.append("step")

    def sync(self) -> None:
        self.calls.append("sync")
        time.sleep(STEP_SECONDS)


def test_a_slow_step_takes_longer_by_its_share_of_the_devices_time_not_of_its_launch() -> None:
    subject = Launches()
    began = time.perf_counter()
    Disturbed(subject, parse_injection("slow:1:300%", 2), subject.sync).step()
    assert time.perf_counter() - began >= 4 * STEP_SECONDS
    assert subject.calls == ["step", "sync"]


def test_nothing_but_a_slow_step_waits_for_the_device() -> None:
    subject = Launches()
    Disturbed(subject, parse_injection("late:1:3ms", 2), subject.sync).step()
    assert subject.calls == ["step"]


def test_a_late_step_takes_no_longer() -> None:
    assert min(seconds_of_a_step("late:1:1s") for _ in range(5)) < 2 * STEP_SECONDS


def test_a_corrupt_step_has_exactly_one_wrong_element() -> None:
    operation = ones()
    disturbed = Disturbed(operation, parse_injection("corrupt:1", 2), at_once)
    for _ in range(2):
        disturbed.reset()
        assert disturbed.check() == 8
        disturbed.step()
        assert disturbed.check() == 1
    operation.step()
    assert disturbed.check() == 0


def test_a_slow_step_is_right() -> None:
    disturbed = Disturbed(ones(), parse_injection("slow:1:10%", 2), at_once)
    disturbed.step()
    assert disturbed.check() == 0


def test_what_cannot_be_corrupted_is_refused() -> None:
    with pytest.raises(UserError, match=r"corrupt:1: this subject has no corrupt\(\)"):
        Disturbed(Sleeps(), parse_injection("corrupt:1", 2), at_once).step()


def test_all_else_is_the_subject_s() -> None:
    subject = Sleeps()
    disturbed = Disturbed(subject, parse_injection("late:1:3ms", 2), at_once)
    disturbed.reset()
    assert disturbed.issue() == [WORK]
    disturbed.step()
    disturbed.close()
    assert subject.calls == ["reset", "issue", "step", "close"]
    assert disturbed.check() == 3
    assert disturbed.describe().headline == "asleep"
