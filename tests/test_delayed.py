"""Delayed links: a frame finds its port, waits as long as asked for, in order; and real ones carry a stream."""

import re

import pytest
from clusters import in_cluster, tool
from hypothesis import given
from hypothesis import strategies as st

from slurm.delayed import Switch

DELAY_SECONDS = 0.5
A, B, C = (bytes([2, 0, 0, 0, 0, number]) for number in (1, 2, 3))
EVERYONE = b"\xff" * 6


def frame(destination: bytes, source: bytes, text: bytes = b"") -> bytes:
    """Return a frame as the kernel gives it, with an offload header before it."""
    return bytes(10) + destination + source + text


def switch_that_knows(*addresses: bytes) -> Switch:
    """Return a switch that has seen the addresses at its ports, in order, and delivered all it had."""
    switch = Switch(len(addresses), DELAY_SECONDS)
    for number, address in enumerate(addresses):
        switch.receive(number, frame(EVERYONE, address), -10.0)
    for number in range(len(addresses)):
        drain(switch, number, 0.0)
    return switch


def drain(switch: Switch, port: int, now: float) -> list[bytes]:
    found = []
    while (due := switch.due(port, now)) is not None:
        found.append(due)
        switch.sent(port)
    return found


def test_a_frame_waits_for_the_delay_and_no_longer() -> None:
    switch = switch_that_knows(A, B)
    switch.receive(0, frame(B, A), 1.0)
    assert switch.due(1, 1.499) is None
    assert switch.due(1, 1.5) == frame(B, A)
    assert switch.seconds_to_wait(1.2) == pytest.approx(0.3)


def test_a_frame_goes_to_the_port_of_its_address_alone() -> None:
    switch = switch_that_knows(A, B, C)
    switch.receive(0, frame(C, A), 1.0)
    assert [drain(switch, port, 2.0) for port in range(3)] == [[], [], [frame(C, A)]]


@pytest.mark.parametrize("destination", [EVERYONE, bytes([2, 0, 0, 0, 0, 9])])
def test_a_frame_for_all_or_for_one_unknown_goes_everywhere_but_back(destination: bytes) -> None:
    switch = switch_that_knows(A, B, C)
    sent = frame(destination, B)
    switch.receive(1, sent, 1.0)
    assert [drain(switch, port, 2.0) for port in range(3)] == [[sent], [], [sent]]


def test_a_frame_for_its_own_port_goes_nowhere() -> None:
    switch = switch_that_knows(A, B)
    switch.receive(0, frame(A, A), 1.0)
    assert [drain(switch, port, 2.0) for port in range(2)] == [[], []]


@given(st.lists(st.floats(0, 100), max_size=20))
def test_frames_keep_their_order(times: list[float]) -> None:
    switch = switch_that_knows(A, B)
    sent = [frame(B, A, str(number).encode()) for number in range(len(times))]
    for text, now in zip(sent, sorted(times), strict=True):
        switch.receive(0, text, now)
    assert drain(switch, 1, 101.0) == sent


def test_a_blocked_port_holds_up_no_other_and_is_not_waited_for() -> None:
    switch = switch_that_knows(A, B, C)
    switch.receive(0, frame(B, A), 1.0)
    switch.receive(0, frame(C, A), 1.1)
    switch.block(1)
    assert switch.blocked() == [1]
    assert switch.seconds_to_wait(1.0) == pytest.approx(0.6)
    assert drain(switch, 2, 2.0) == [frame(C, A)]
    switch.unblock(1)
    assert drain(switch, 1, 2.0) == [frame(B, A)]


def test_a_port_that_is_blocked_for_long_loses_what_comes_and_keeps_what_it_has() -> None:
    switch = switch_that_knows(A, B)
    switch.receive(0, frame(B, A, b"kept"), 1.0)
    switch.block(1)
    switch.receive(0, frame(B, A, b"just"), 1.54)
    switch.receive(0, frame(B, A, b"lost"), 1.56)
    switch.unblock(1)
    assert drain(switch, 1, 9.0) == [frame(B, A, b"kept"), frame(B, A, b"just")]


def test_nothing_is_lost_at_a_port_that_is_late_but_can_send() -> None:
    switch = switch_that_knows(A, B)
    for number in range(3):
        switch.receive(0, frame(B, A), float(number))
    assert len(drain(switch, 1, 9.0)) == 3


def test_without_frames_there_is_no_hurry() -> None:
    assert switch_that_knows(A, B).seconds_to_wait(5.0) == 1.0


@pytest.mark.slow
@pytest.mark.measures
def test_a_real_delay_is_in_every_round_trip_and_leaves_the_rate_alone() -> None:
    done = in_cluster(tool("between", "n1", "n2"), nodes=2, link="100mbit", delay="5ms")
    assert done.returncode == 0, done.stderr
    found = {name: float(value) for name, value in re.findall(r"^(.+) (\S+)$", done.stdout, re.MULTILINE)}
    assert 0.010 <= found["round trip seconds"] < 0.020
    assert 0.8e8 <= found["bits per second"] <= 1.05e8
