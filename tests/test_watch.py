"""Watching a gang: every outcome is heard, every deadline kept, and the rank that is named is the one to blame."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from fakes import HERE, FakeGang, FakeRank, case, connect, job, outcome, wait_until, where, within

from bench import watch as module
from bench.channel import Hub
from bench.messages import Ask, Bye, Outcome
from bench.watch import Trouble, Watch

TIMEOUT = 10.0


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "_GRACE_SECONDS", 0.4)
    monkeypatch.setattr(module, "_SHORT_GRACE", 0.2)
    with within(30):
        yield


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Ranks that have said hello to a watch."""

    hub: Hub
    gang: FakeGang
    watch: Watch
    ranks: list[FakeRank]

    def heard(self, count: int) -> None:
        """Wait until so many events wait to be taken, so that they are in the order of the test's lines."""
        wait_until(lambda: self.hub._events.qsize() >= count)

    def trouble(self, index: int = 0, timeout_seconds: float = TIMEOUT) -> Trouble:
        found = self.watch.outcome(index, timeout_seconds)
        assert isinstance(found, Trouble), found
        return found


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as opened:
        yield opened


def assembled(hub: Hub, size: int = 2, *, can_restart: bool = True, **hello: Any) -> Scene:
    gang = FakeGang(can_restart=can_restart)
    watch = Watch(hub, gang, size)
    ranks = connect(hub, size, **hello)
    assert watch.assemble(TIMEOUT) is None
    return Scene(hub=hub, gang=gang, watch=watch, ranks=ranks)


@pytest.fixture
def scene(hub: Hub) -> Scene:
    return assembled(hub)


# --- assembling ---


def test_ranks_that_say_hello_are_assembled(scene: Scene) -> None:
    assert sorted(scene.watch.hellos) == [0, 1]
    assert {hello.pid for hello in scene.watch.hellos.values()} == {os.getpid()}


def test_a_rank_that_does_not_come_is_named_in_time(hub: Hub) -> None:
    watch = Watch(hub, FakeGang(), 3)
    ranks = connect(hub, 1)
    began = time.monotonic()
    assert watch.assemble(0.3) == Trouble(status="failed", reason="ranks 1, 2 did not start within 0 s")
    assert 0.3 <= time.monotonic() - began < 2
    assert len(ranks) == 1


def test_a_gang_that_ends_before_a_rank_has_come_is_no_reason_to_wait(hub: Hub) -> None:
    gang = FakeGang()
    gang.has_ended = True
    trouble = Watch(hub, gang, 2).assemble(TIMEOUT)
    assert trouble is not None
    assert trouble.reason == "the ranks ended before every rank had started; their output is in the run's logs"


def test_what_the_launcher_said_is_told_where_ranks_ended_early(hub: Hub) -> None:
    gang = FakeGang()
    gang.has_ended, gang.said = True, "srun: error: n3: no answer"
    trouble = Watch(hub, gang, 2).assemble(TIMEOUT)
    assert trouble is not None
    assert trouble.reason == "the ranks ended before every rank had started; srun: error: n3: no answer"


def test_ranks_of_several_hosts_are_named_with_theirs(hub: Hub) -> None:
    watch = Watch(hub, FakeGang(), 3)
    ranks = [FakeRank(hub.variables(), rank, 3, host=f"n{rank + 1}") for rank in range(3)]
    for rank in ranks:
        rank.hello()
    assert watch.assemble(TIMEOUT) is None
    ranks[0].answer(where())
    ranks[1].answer(where())
    for rank in ranks:
        rank.start(0)
    trouble = watch.outcome(0, 0.3)
    assert isinstance(trouble, Trouble)
    assert trouble.reason == "no end within 0.3 s: rank 2 (n3) did not arrive"
    assert watch.silent_hosts() == {"n3"}


def test_where_nobody_answers_no_host_is_blamed_for_it(hub: Hub) -> None:
    watch = Watch(hub, FakeGang(), 2)
    for rank in (ranks := [FakeRank(hub.variables(), rank, 2, host=f"n{rank}") for rank in range(2)]):
        rank.hello()
    assert watch.assemble(TIMEOUT) is None
    for rank in ranks:
        rank.start(0)
    assert isinstance(watch.outcome(0, 0.2), Trouble)
    assert watch.silent_hosts() == set()


def test_rank_0_tells_where_all_meet(hub: Hub) -> None:
    watch = Watch(hub, FakeGang(), 2)
    for rank in (ranks := [FakeRank(hub.variables(), rank, 2, meeting="h:1" if rank == 0 else "") for rank in (1, 0)]):
        rank.hello()
    assert watch.assemble(TIMEOUT) is None
    assert watch.meeting == "h:1"
    assert len(ranks) == 2


def test_a_rank_that_dies_before_the_others_have_come_is_named(hub: Hub) -> None:
    gang = FakeGang()
    gang.known_exits = {1: 3}
    rank = FakeRank(hub.variables(), 1)
    rank.hello()
    rank.die()
    trouble = Watch(hub, gang, 2).assemble(TIMEOUT)
    assert trouble is not None
    assert trouble.reason == "rank 1 died: exit code 3"


def test_ranks_of_another_world_are_refused(hub: Hub) -> None:
    watch = Watch(hub, FakeGang(), 2)
    for rank in (ranks := [FakeRank(hub.variables(), 0, size=2), FakeRank(hub.variables(), 1, size=4)]):
        rank.hello()
    wait_until(lambda: hub._events.qsize() == len(ranks))
    trouble = watch.assemble(TIMEOUT)
    assert trouble is not None
    assert trouble.reason == "rank 1 is in a world of 4 ranks; 2 were asked for"


# --- outcomes ---


def test_every_rank_gets_the_job_and_its_outcomes_are_told_in_turn(scene: Scene) -> None:
    asked = job([case(0), case(1)])
    scene.watch.send(asked)
    assert [rank.job() for rank in scene.ranks] == [asked, asked]
    first, second = outcome(1e-3), outcome(2e-3)
    for rank in scene.ranks:
        rank.start(0)
    scene.ranks[0].finish(0, first)
    scene.ranks[0].finish(1, second)
    scene.heard(4)
    assert scene.watch.outcome(0, TIMEOUT) == first
    assert scene.watch.outcome(1, TIMEOUT) == second


def test_outcomes_of_a_gang_that_has_ended_are_not_lost(scene: Scene) -> None:
    for index in range(5):
        for rank in scene.ranks:
            rank.start(index)
        scene.ranks[0].finish(index, outcome(wall_seconds=float(index)))
    for rank in scene.ranks:
        rank.say(Bye())
        rank.die()
    scene.gang.has_ended = True
    told = [scene.watch.outcome(index, TIMEOUT) for index in range(5)]
    assert [found.wall_seconds for found in told if isinstance(found, Outcome)] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_an_outcome_that_is_on_its_way_when_the_gang_ends_is_not_lost(scene: Scene) -> None:
    def late() -> None:
        time.sleep(0.1)
        scene.ranks[0].finish(0)
        for rank in scene.ranks:
            rank.say(Bye())
            rank.die()

    scene.gang.has_ended = True
    threading.Thread(target=late, daemon=True).start()
    assert scene.watch.outcome(0, TIMEOUT) == outcome()


def test_a_death_is_the_fault_of_the_case_in_which_it_was_and_not_of_the_one_that_is_done(scene: Scene) -> None:
    def late() -> None:
        time.sleep(0.1)
        scene.ranks[0].finish(0)

    scene.ranks[1].start(1)
    scene.ranks[1].die()
    threading.Thread(target=late, daemon=True).start()
    assert scene.watch.outcome(0, TIMEOUT) == outcome()
    assert scene.trouble(1).reason == "rank 1 died: its connection closed"


def test_an_outcome_a_moment_after_the_deadline_is_still_an_outcome(scene: Scene) -> None:
    def late() -> None:
        assert isinstance(scene.ranks[0].line.hear(), Ask)
        scene.ranks[0].finish(0)

    threading.Thread(target=late, daemon=True).start()
    for rank in scene.ranks:
        rank.start(0)
    assert scene.watch.outcome(0, 0.2) == outcome()


def test_what_a_rank_answered_in_one_case_does_not_count_in_the_next(scene: Scene) -> None:
    def answer_once(rank: FakeRank) -> None:
        assert isinstance(rank.line.hear(), Ask)
        if rank.rank == 0:
            rank.finish(0)
        rank.say(where())

    for rank in scene.ranks:
        rank.start(0)
        threading.Thread(target=answer_once, args=[rank], daemon=True).start()
    assert scene.watch.outcome(0, 0.2) == outcome()
    for rank in scene.ranks:
        rank.start(1)
    scene.ranks[0].answer(where())
    assert scene.trouble(1, 0.2).reason == "no end within 0.2 s: rank 1 did not arrive"


# --- death ---


@pytest.mark.parametrize(
    ("code", "words"),
    [(-9, "ended by SIGKILL"), (-35, "ended by signal 35"), (7, "exit code 7"), (None, "its connection closed")],
)
def test_a_dead_rank_is_named_with_how_it_ended(scene: Scene, code: int | None, words: str) -> None:
    scene.gang.known_exits = {} if code is None else {1: code}
    scene.ranks[1].die()
    trouble = scene.trouble()
    assert (trouble.status, trouble.reason) == ("failed", f"rank 1 died: {words}")
    assert [state.state for state in trouble.ranks] == ["alive", f"died: {words}"]
    assert [(state.host, state.pid) for state in trouble.ranks] == [(HERE, os.getpid())] * 2


def test_the_first_to_die_is_named_and_not_those_who_fall_with_it(scene: Scene) -> None:
    scene.ranks[1].die()
    scene.heard(1)
    scene.ranks[0].die()
    scene.heard(2)
    assert scene.trouble().reason == "rank 1 died: its connection closed"


def test_a_rank_killed_by_a_signal_is_named_though_another_left_first(scene: Scene) -> None:
    scene.gang.known_exits = {0: 1, 1: -9}
    scene.ranks[0].die()
    scene.heard(1)
    scene.ranks[1].die()
    assert scene.trouble().reason == "rank 1 died: ended by SIGKILL"


def test_all_that_were_killed_are_named(hub: Hub) -> None:
    scene = assembled(hub, 4)
    scene.gang.known_exits = {1: -15, 3: -15}
    for count, number in enumerate([0, 3, 1]):
        scene.ranks[number].die()
        scene.heard(count + 1)
    assert scene.trouble().reason == "ranks 3, 1 died: ended by SIGTERM"


def test_a_dead_rank_is_to_blame_and_not_the_one_that_raised_because_of_it(scene: Scene) -> None:
    scene.ranks[0].break_(0, "RuntimeError: connection closed by peer")
    scene.heard(1)
    scene.ranks[1].die()
    trouble = scene.trouble()
    assert trouble.reason == "rank 1 died: its connection closed"
    assert trouble.ranks[0].state == "raised RuntimeError: connection closed by peer"


def test_a_death_is_told_at_once_where_the_gang_ends_with_it(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GRACE_SECONDS", 60.0)
    scene.gang.has_ended = True
    for rank in scene.ranks:
        rank.die()
    began = time.monotonic()
    assert scene.trouble().reason.endswith("its connection closed")
    assert time.monotonic() - began < 2


def test_a_gang_that_ends_in_a_case_without_a_word_is_told(scene: Scene) -> None:
    scene.gang.has_ended = True
    told = scene.trouble().reason
    assert told == "the ranks ended while it was measured; their output is in the run's logs"


def test_a_rank_that_has_said_goodbye_is_not_dead(scene: Scene) -> None:
    def late() -> None:
        time.sleep(0.8)
        scene.ranks[0].finish(0)

    scene.ranks[1].say(Bye())
    scene.ranks[1].die()
    threading.Thread(target=late, daemon=True).start()
    assert scene.watch.outcome(0, TIMEOUT) == outcome()


# --- exceptions ---


def test_the_first_to_raise_is_named_and_every_stack_is_kept(scene: Scene) -> None:
    scene.ranks[1].break_(0, "ValueError: the roof is on fire")
    scene.heard(1)
    scene.ranks[0].break_(0, "RuntimeError: connection closed by peer")
    trouble = scene.trouble()
    assert trouble.reason == "rank 1 raised ValueError: the roof is on fire"
    assert [state.stack for state in trouble.ranks] == ["the stack of rank 0", "the stack of rank 1"]


def test_a_rank_that_raises_alone_is_told_with_the_others_alive(scene: Scene) -> None:
    scene.ranks[0].break_(None, "RuntimeError: no device")
    trouble = scene.trouble()
    assert trouble.reason == "rank 0 raised RuntimeError: no device"
    assert [state.state for state in trouble.ranks] == ["raised RuntimeError: no device", "alive"]


# --- hangs ---


def test_the_deadline_is_counted_from_the_start_of_the_case(scene: Scene) -> None:
    time.sleep(0.3)
    for rank in scene.ranks:
        rank.start(0)
        rank.answer(where())
    began = time.monotonic()
    trouble = scene.trouble(timeout_seconds=0.5)
    assert trouble.status == "hang"
    assert trouble.reason.startswith("no end within 0.5 s: ")
    assert 0.5 <= time.monotonic() - began < 1.5


def test_a_case_that_no_rank_begins_hangs_after_the_one_before(scene: Scene) -> None:
    for rank in scene.ranks:
        rank.start(0)
        rank.answer(where(phase="check"))
    scene.ranks[0].finish(0)
    assert scene.watch.outcome(0, TIMEOUT) == outcome()
    began = time.monotonic()
    assert scene.trouble(1, 0.3).reason == "no end within 0.3 s: no rank has begun it; see their stacks"
    assert 0.3 <= time.monotonic() - began < 1.5


def test_before_the_first_case_ranks_may_take_long_to_find_each_other(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "START_SECONDS", 0.6)
    began = time.monotonic()
    assert scene.trouble(timeout_seconds=0.05).status == "hang"
    assert time.monotonic() - began >= 0.6


WAITS = where(phase="timed", steps=7, communicates=True, stack="in all_reduce")
LATE = {
    "gives no answer": ((0, 0, 0), (WAITS, None, WAITS), "rank 1 did not arrive"),
    "two give no answer": ((0, 0, 0), (None, WAITS, None), "ranks 0, 2 did not arrive"),
    "is in the case before": ((1, 1, 0), (WAITS, WAITS, WAITS), "rank 2 did not arrive"),
    "has begun fewer steps": ((0, 0, 0), (where(steps=6), WAITS, WAITS), "rank 0 did not arrive"),
    "is elsewhere": ((0, 0, 0), (WAITS, where(communicates=False, stack="in sleep"), WAITS), "rank 1 did not arrive"),
    "silence goes before steps": ((0, 0, 0), (where(steps=6), None, WAITS), "rank 1 did not arrive"),
    "all are in step": ((0, 0, 0), (WAITS, WAITS, WAITS), "every rank arrived and waits; see their stacks"),
    "all are elsewhere": (
        (0, 0, 0),
        (where(communicates=False), where(communicates=False), where(communicates=False)),
        "every rank arrived and waits; see their stacks",
    ),
    "all are silent": ((0, 0, 0), (None, None, None), "no rank answers"),
}


@pytest.mark.parametrize("name", LATE)
def test_the_rank_that_did_not_arrive_is_named(hub: Hub, name: str) -> None:
    reached, answers, told = LATE[name]
    scene = assembled(hub, 3)
    index = max(reached)
    for rank, at, answer in zip(scene.ranks, reached, answers, strict=True):
        rank.start(at)
        if answer is not None:
            rank.answer(answer)
    scene.heard(3)
    trouble = scene.trouble(index, 0.1)
    assert (trouble.status, trouble.reason) == ("hang", f"no end within 0.1 s: {told}")
    for state, answer in zip(trouble.ranks, answers, strict=True):
        if answer is not None:
            assert state.state == f"{answer.phase}, step {answer.steps}"
            assert state.stack == answer.stack


def test_a_silent_rank_is_told_with_the_state_of_its_process(hub: Hub) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as sleeper:
        sleeper.send_signal(signal.SIGSTOP)
        scene = assembled(hub, 2, pid=sleeper.pid)
        for rank in scene.ranks:
            rank.start(0)
        scene.ranks[0].answer(WAITS)
        assert scene.trouble(0, 0.1).ranks[1].state == "no answer (process is stopped)"
        sleeper.kill()


def test_a_silent_rank_of_another_host_is_told_without_its_process(hub: Hub) -> None:
    scene = assembled(hub, 2, host="elsewhere")
    for rank in scene.ranks:
        rank.start(0)
    assert [state.state for state in scene.trouble(0, 0.1).ranks] == ["no answer", "no answer"]


# --- farewell ---


def test_a_farewell_waits_until_ranks_and_gang_have_ended(scene: Scene) -> None:
    def leave() -> None:
        for rank in scene.ranks:
            time.sleep(0.1)
            rank.say(Bye())
        time.sleep(0.1)
        scene.gang.has_ended = True

    threading.Thread(target=leave, daemon=True).start()
    began = time.monotonic()
    scene.watch.farewell(TIMEOUT)
    assert 0.3 <= time.monotonic() - began < 2


def test_a_farewell_does_not_wait_for_ever(scene: Scene) -> None:
    began = time.monotonic()
    scene.watch.farewell(0.2)
    assert 0.2 <= time.monotonic() - began < 2


def test_ranks_that_were_there_before_are_not_waited_for_after_their_goodbye(hub: Hub) -> None:
    scene = assembled(hub, can_restart=False)
    for rank in scene.ranks:
        rank.say(Bye())
    began = time.monotonic()
    scene.watch.farewell(TIMEOUT)
    assert time.monotonic() - began < 2
