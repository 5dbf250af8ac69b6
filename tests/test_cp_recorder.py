"""The recorder notes what happens while it is asked to, and nothing else."""

import time

import pytest
import torch

from workloads.context.cp_recorder import Recorder, Wait

pytestmark = pytest.mark.measures

MOVED = torch.zeros(3, 5, dtype=torch.bfloat16)


def recorder() -> Recorder:
    return Recorder(torch.device("cpu"))


def test_pairs_add_up_by_direction_and_step() -> None:
    found = recorder()
    with found.recording():
        found.computed("forward", 0, 3)
        found.computed("forward", 0, 4)
        found.computed("forward", 1, 5)
        found.computed("backward", 0, 6)
    assert found.pairs == {("forward", 0): 7, ("forward", 1): 5, ("backward", 0): 6}


def test_a_wait_is_as_long_as_its_body_and_has_the_size_of_what_moved() -> None:
    found = recorder()
    with found.recording(), found.waiting("backward", 2, "gradients", MOVED, [0, 3]):
        time.sleep(0.02)
    [wait] = found.waits()
    assert (wait.direction, wait.step, wait.what, wait.shape, wait.dtype) == (
        "backward",
        2,
        "gradients",
        (3, 5),
        torch.bfloat16,
    )
    assert (wait.num_bytes, wait.peers) == (30, (0, 3))
    assert 0.02 <= wait.seconds < 0.5
    assert wait.issued == wait.began < wait.ended <= time.perf_counter()


def test_waits_come_in_order() -> None:
    found = recorder()
    with found.recording():
        for step in range(3):
            with found.waiting("forward", step, "keys", MOVED, [0]):
                pass
    assert [wait.step for wait in found.waits()] == [0, 1, 2]


def test_nothing_is_noted_outside() -> None:
    found = recorder()
    for _ in range(2):
        found.computed("forward", 0, 3)
        with found.waiting("forward", 0, "keys", MOVED, [0]):
            pass
        with found.recording():
            pass
    assert not found.pairs
    assert found.waits() == []


def test_each_recording_begins_anew() -> None:
    found = recorder()
    for _ in range(2):
        with found.recording():
            found.computed("forward", 0, 3)
            with found.waiting("forward", 0, "keys", MOVED, [0]):
                pass
    assert found.pairs == {("forward", 0): 3}
    assert len(found.waits()) == 1


def test_it_stops_where_a_step_fails() -> None:
    found = recorder()

    def fail() -> None:
        with found.recording():
            raise RuntimeError("a step failed")

    with pytest.raises(RuntimeError, match="a step failed"):
        fail()
    found.computed("forward", 0, 3)
    assert not found.pairs


def test_what_was_issued_before_is_known_to_be() -> None:
    found = recorder()
    assert found.issued() is None
    with found.recording():
        issued = found.issued()
        time.sleep(0.02)
        with found.waiting("forward", 0, "keys", MOVED, [1], issued):
            pass
    [wait] = found.waits()
    assert wait.issued == issued
    assert wait.began - wait.issued >= 0.02
    assert wait.seconds < 0.02


def test_a_wait_by_another_clock_is_as_long() -> None:
    one = Wait(
        direction="forward",
        step=0,
        what="keys",
        shape=(2,),
        dtype=torch.float32,
        peers=(1,),
        issued=5.0,
        began=6.0,
        ended=8.5,
    )
    other = one.earlier(4.0)
    assert (other.issued, other.began, other.ended) == (1.0, 2.0, 4.5)
    assert other.seconds == one.seconds == 2.5
    assert other.num_bytes == 8
