"""Watching a gang: every outcome is heard, every deadline kept, and the rank that is named is the one to blame."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from fakes import HERE, FakeGang, FakeRank, connect, outcome, wait_until, where, within

from parbench.bench.launch import monitor as module
from parbench.bench.launch.control_channel import Done, DriverServer, Outcome, StatusRequest
from parbench.bench.launch.flight_recorder import GroupSeen
from parbench.bench.launch.monitor import RankMonitor

TIMEOUT = 10.0


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "_GRACE_SECONDS", 0.4)
    monkeypatch.setattr(module, "_SHORT_GRACE", 0.2)
    monkeypatch.setattr(module, "_TICK_SECONDS", 0.02)
    with within(60):
        yield


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Ranks that have said hello to a watch."""

    hub: DriverServer
    gang: FakeGang
    watch: RankMonitor
    ranks: list[FakeRank]

    def start(self, index: int) -> None:
        for rank in self.ranks:
            rank.start(index)

    def leave(self, *ranks: int) -> None:
        for rank in ranks:
            self.ranks[rank].say(Done())
            self.ranks[rank].die()

    def heard(self, count: int) -> None:
        """Wait until so many events wait to be taken, so that they are in the order of the test's lines."""
        wait_until(lambda: self.hub._events.qsize() >= count)

    def trouble(self, index: int = 0, timeout_seconds: float = TIMEOUT) -> Outcome:
        found = self.watch.outcome(index, timeout_seconds)
        assert found.ranks, found
        return found


@contextmanager
def assembled(size: int = 2, *, can_restart: bool = True, hosts: str = "", **hello: Any) -> Iterator[Scene]:
    """Yield a scene; ``hosts`` names each rank's by a letter."""
    with DriverServer() as hub:
        gang = FakeGang(can_restart=can_restart)
        watch = RankMonitor(hub, gang, size)
        if hosts:
            ranks = [FakeRank(hub.variables(), rank, size, host=host) for rank, host in enumerate(hosts)]
            for rank in ranks:
                rank.hello()
        else:
            ranks = connect(hub, size, **hello)
        assert watch.assemble(TIMEOUT) is None
        yield Scene(hub=hub, gang=gang, watch=watch, ranks=ranks)


@pytest.fixture
def scene() -> Iterator[Scene]:
    with assembled() as made:
        yield made


def soon(do: Callable[[], object], seconds: float = 0.1) -> None:
    """Do it in a thread, a moment later."""
    threading.Timer(seconds, do).start()


@contextmanager
def lasts(least: float, most: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert least <= time.monotonic() - began < most


def test_a_gang_that_does_not_come_together_is_told_with_the_reason() -> None:
    def not_assembled(sizes: list[int], of: int = 2, timeout_seconds: float = TIMEOUT, **gang: Any) -> str:
        """Have as many ranks as there are sizes say hello, each of a world of its size."""
        with DriverServer() as hub:
            fake = FakeGang()
            vars(fake).update(gang)
            ranks = [FakeRank(hub.variables(), rank, size) for rank, size in enumerate(sizes)]
            for rank in ranks:
                rank.hello()
                if fake.known_exits:
                    rank.die()
            wait_until(lambda: hub._events.qsize() >= len(ranks))
            trouble = RankMonitor(hub, fake, of).assemble(timeout_seconds)
        assert trouble is not None
        assert trouble.status == "failed"
        return trouble.reason

    with lasts(0.3, 5):
        assert not_assembled([3], of=3, timeout_seconds=0.3) == "ranks 1, 2 did not start within 0 s"
    early = "the ranks ended before every rank had started"
    assert not_assembled([], has_ended=True) == f"{early}; their output is in the run's logs"
    assert (
        not_assembled([], has_ended=True, said="srun: error: n3: no answer") == f"{early}; srun: error: n3: no answer"
    )
    assert not_assembled([2], known_exits={0: 3}) == "rank 0 died: exit code 3"
    assert not_assembled([2, 4]) == "rank 1 is in a world of 4 ranks; 2 were asked for"


def test_outcomes_of_a_gang_that_has_ended_are_not_lost(scene: Scene) -> None:
    for index in range(3):
        scene.start(index)
        scene.ranks[0].finish(index, outcome(wall_seconds=float(index)))
    scene.gang.has_ended = True

    def last() -> None:
        scene.ranks[0].finish(3, outcome(wall_seconds=3.0))
        scene.leave(0, 1)

    soon(last)  # it is still on its way when the gang ends
    told = [scene.watch.outcome(index, TIMEOUT) for index in range(4)]
    assert [found.wall_seconds for found in told] == [0.0, 1.0, 2.0, 3.0]


def test_a_death_is_the_fault_of_the_case_in_which_it_was_and_not_of_the_one_that_is_done(scene: Scene) -> None:
    scene.ranks[1].start(1)
    scene.ranks[1].die()
    soon(lambda: scene.ranks[0].finish(0))
    assert scene.watch.outcome(0, TIMEOUT) == outcome()
    assert scene.trouble(1).reason == "rank 1 died: its connection closed"


def test_an_outcome_a_moment_after_the_deadline_counts_and_what_was_answered_then_does_not_later(scene: Scene) -> None:
    def answer_once(rank: FakeRank) -> None:
        assert isinstance(rank.line.hear(), StatusRequest)
        if rank.rank == 0:
            rank.finish(0)
        rank.say(where())

    for rank in scene.ranks:
        rank.start(0)
        threading.Thread(target=answer_once, args=[rank], daemon=True).start()
    assert scene.watch.outcome(0, 0.2) == outcome()
    scene.start(1)
    scene.ranks[0].answer(where())
    assert scene.trouble(1, 0.2).reason == "no end within 0.2 s: rank 1 did not arrive"


def test_a_dead_rank_is_named_with_how_it_ended() -> None:
    codes = {-9: "ended by SIGKILL", -35: "ended by signal 35", 7: "exit code 7", None: "its connection closed"}
    for code, words in codes.items():
        with assembled() as scene:
            scene.gang.known_exits = {} if code is None else {1: code}
            scene.ranks[1].die()
            trouble = scene.trouble()
        assert (trouble.status, trouble.reason) == ("failed", f"rank 1 died: {words}")
        assert [state.state for state in trouble.ranks] == ["alive", f"died: {words}"]
        assert [(state.host, state.pid) for state in trouble.ranks] == [(HERE, os.getpid())] * 2


def test_the_culprit_is_named_and_not_those_who_fall_with_it() -> None:
    for dying, exits, told in (
        ([1, 0], {}, "rank 1 died: its connection closed"),  # the first
        ([0, 1], {0: 1, 1: -9}, "rank 1 died: ended by SIGKILL"),  # killed by a signal, though another left first
        ([0, 3, 1], {1: -15, 3: -15}, "ranks 3, 1 died: ended by SIGTERM"),  # all that were
        ([0, 1], {0: -15, 1: 7}, "rank 1 died: exit code 7"),  # whose launcher then ends the others, who leave first
    ):
        with assembled(max(dying) + 1) as scene:
            scene.gang.known_exits = exits
            for count, rank in enumerate(dying):
                scene.ranks[rank].die()
                scene.heard(count + 1)
            assert scene.trouble().reason == told, dying
    with assembled() as scene:
        scene.ranks[0].break_(0, "RuntimeError: connection closed by peer")
        scene.heard(1)
        scene.ranks[1].die()
        trouble = scene.trouble()
        assert trouble.reason == "rank 1 died: its connection closed", "and not who raised because of it"
        assert trouble.ranks[0].state == "raised RuntimeError: connection closed by peer"


def test_a_death_is_told_at_once_where_the_gang_ends_with_it_and_an_end_without_a_word_too(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_GRACE_SECONDS", 60.0)
    scene.gang.has_ended = True
    told = scene.trouble().reason
    assert told == "the ranks ended while it was measured; their output is in the run's logs"
    for rank in scene.ranks:
        rank.die()
    with lasts(0, 10):
        assert scene.trouble().reason.endswith("its connection closed")


def test_a_rank_that_has_said_goodbye_is_not_dead(scene: Scene) -> None:
    scene.leave(1)
    soon(lambda: scene.ranks[0].finish(0), 0.8)
    assert scene.watch.outcome(0, TIMEOUT) == outcome()


def test_the_first_to_raise_is_named_and_every_stack_is_kept(scene: Scene) -> None:
    scene.ranks[1].break_(None, "ValueError: the roof is on fire")
    scene.heard(1)
    assert [state.state for state in scene.trouble().ranks] == ["alive", "raised ValueError: the roof is on fire"]
    scene.ranks[0].break_(0, "RuntimeError: connection closed by peer")
    scene.heard(1)
    trouble = scene.trouble()
    assert trouble.reason == "rank 1 raised ValueError: the roof is on fire"
    assert [state.stack for state in trouble.ranks] == ["the stack of rank 0", "the stack of rank 1"]


def test_the_deadline_is_counted_from_the_start_of_the_case_or_the_end_of_the_one_before(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    time.sleep(0.3)
    scene.start(0)
    for rank in scene.ranks:
        rank.answer(where(phase="check"))
    with lasts(0.5, 5):
        trouble = scene.trouble(timeout_seconds=0.5)
    assert trouble.status == "hang"
    assert trouble.reason.startswith("no end within 0.5 s: ")
    scene.ranks[0].finish(0)
    assert scene.watch.outcome(0, TIMEOUT) == outcome()
    with lasts(0.3, 5):
        assert scene.trouble(1, 0.3).reason == "no end within 0.3 s: no rank has begun it; see their stacks"

    monkeypatch.setattr(module, "START_SECONDS", 0.6)
    with assembled() as first, lasts(0.6, 5):  # before the first case ranks may take long to find each other
        assert first.trouble(timeout_seconds=0.05).status == "hang"


WAITS = where(phase="timed", steps=7, communicates=True, stack="in all_reduce")
ELSEWHERE = where(communicates=False, stack="in sleep")
BEHIND = where(steps=6)
LATE = {
    "two give no answer": ((0, 0, 0), (None, WAITS, None), "ranks 0, 2 did not arrive"),
    "is in the case before": ((1, 1, 0), (WAITS, WAITS, WAITS), "rank 2 did not arrive"),
    "has begun fewer steps": ((0, 0, 0), (BEHIND, WAITS, WAITS), "rank 0 did not arrive"),
    "is elsewhere": ((0, 0, 0), (WAITS, ELSEWHERE, WAITS), "rank 1 did not arrive"),
    "silence goes before steps": ((0, 0, 0), (BEHIND, None, WAITS), "rank 1 did not arrive"),
    "the case goes before steps": ((1, 1, 0), (WAITS, BEHIND, WAITS), "rank 2 did not arrive"),
    "steps go before place": ((0, 0, 0), (ELSEWHERE, BEHIND, WAITS), "rank 1 did not arrive"),
    "all are in step": ((0, 0, 0), (WAITS, WAITS, WAITS), "every rank arrived and waits; see their stacks"),
    "all are elsewhere": ((0, 0, 0), (ELSEWHERE,) * 3, "every rank is in code of its own; see their stacks"),
    "all are silent": ((0, 0, 0), (None, None, None), "no rank answers"),
}


def test_the_rank_that_did_not_arrive_is_named() -> None:
    for name, (reached, answers, told) in LATE.items():
        with assembled(3) as scene:
            for rank, at, answer in zip(scene.ranks, reached, answers, strict=True):
                rank.start(at)
                if answer is not None:
                    rank.answer(answer)
            scene.heard(3)
            trouble = scene.trouble(max(reached), 0.1)
        assert (trouble.status, trouble.reason) == ("hang", f"no end within 0.1 s: {told}"), name
        for state, answer in zip(trouble.ranks, answers, strict=True):
            seen = ("no answer (process is ", "") if answer is None else (f"timed, step {answer.steps}", answer.stack)
            assert (state.state[: len(seen[0])], state.stack) == seen, name


IN_FIVE = GroupSeen(ranks=(0, 1, 2), enqueued=5, pending=5, name="nccl:all_reduce")
STUCK = where(communicates=False, groups={"0": IN_FIVE})
DONE = where(groups={"0": GroupSeen(ranks=(0, 1, 2), enqueued=4)})
AWAY = where(communicates=False, groups=DONE.groups)
RECORDED = {
    "a wait without a frame of torch": ((STUCK, DONE, STUCK), "rank 1 did not arrive"),
    "of several awaited the one in its own code": ((STUCK, DONE, AWAY), "rank 2 did not arrive"),
    "silence goes before the record": ((STUCK, None, AWAY), "rank 1 did not arrive"),
    "a record that is not whole does not count": ((STUCK, DONE, WAITS), "rank 0 did not arrive"),
    "all have enqueued": (
        (STUCK, msgspec.structs.replace(STUCK, communicates=True, steps=8), STUCK),
        "every rank has enqueued nccl:all_reduce, which is not done; see their stacks",
    ),
}


def test_what_torch_recorded_outweighs_stacks_and_steps() -> None:
    for name, (answers, told) in RECORDED.items():
        with assembled(3) as scene:
            scene.start(0)
            for rank, answer in zip(scene.ranks, answers, strict=True):
                if answer is not None:
                    rank.answer(answer)
            trouble = scene.trouble(0, 0.1)
        assert trouble.reason == f"no end within 0.1 s: {told}", name
    with assembled(3) as scene:
        scene.start(0)
        for rank, answer in zip(scene.ranks, (STUCK, DONE, STUCK), strict=True):
            rank.answer(msgspec.structs.replace(answer, groups=None, more=True), answer)
        trouble = scene.trouble(0, 0.1)
    states = ["timed, step 7, waits for rank 1", "timed, step 7", "timed, step 7, waits for rank 1"]
    assert [state.state for state in trouble.ranks] == states


def test_ranks_that_wait_for_one_another_are_all_told() -> None:
    idle, busy = GroupSeen(ranks=(0, 1)), GroupSeen(ranks=(0, 1), enqueued=1, pending=1)
    first, second = where(groups={"a": busy, "b": idle}), where(groups={"a": idle, "b": busy})
    with assembled(2) as scene:
        scene.start(0)
        for rank, answer in zip(scene.ranks, (first, second), strict=True):
            rank.answer(answer)
        trouble = scene.trouble(0, 0.1)
    assert trouble.reason == "no end within 0.1 s: ranks 0, 1 wait for one another; see their stacks"


def test_ranks_of_several_hosts_are_named_with_theirs_and_a_host_that_is_silent_is_known() -> None:
    for answering, told, silent in (
        ([0, 1], "rank 2 (c) did not arrive", {"c"}),
        ([], "no rank answers", set()),  # no host is blamed for it
    ):
        with assembled(3, hosts="abc") as scene:
            for rank in answering:
                scene.ranks[rank].answer(where())
            scene.start(0)
            trouble = scene.trouble(0, 0.3)
            assert trouble.reason == f"no end within 0.3 s: {told}"
            assert scene.watch.silent_hosts() == silent
            assert trouble.ranks[2].state == "no answer", "processes of other hosts cannot be seen"


def test_a_farewell_waits_until_ranks_and_gang_have_ended_but_not_for_ever(scene: Scene) -> None:
    with lasts(0.2, 5):
        scene.watch.farewell(0.1)  # for the ranks and then for their gang

    def leave() -> None:
        for rank in scene.ranks:
            time.sleep(0.1)
            rank.say(Done())
        time.sleep(0.1)
        scene.gang.has_ended = True

    threading.Thread(target=leave, daemon=True).start()
    with lasts(0.3, 5):
        scene.watch.farewell(TIMEOUT)
    with assembled(can_restart=False) as there_before, lasts(0, 5):
        for rank in there_before.ranks:
            rank.say(Done())
        there_before.watch.farewell(TIMEOUT)  # not for the end of a gang that was there before
