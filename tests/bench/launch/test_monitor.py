"""The monitor: outcomes, deadlines and the rank that is to blame."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from parbench.bench.launch import monitor as module
from parbench.bench.launch.control_channel import (
    Done,
    DriverServer,
    Outcome,
    StatusReply,
    StatusRequest,
)
from parbench.bench.launch.flight_recorder import GroupSeen
from parbench.bench.launch.monitor import RankMonitor
from tests.support.fakes import (
    HOSTNAME,
    FakeLauncher,
    FakeRank,
    make_outcome,
    make_status,
    time_limit,
    wait_until,
)

TIMEOUT = 10.0


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "_GRACE_SECONDS", 0.4)
    monkeypatch.setattr(module, "_SHORT_GRACE", 0.2)
    monkeypatch.setattr(module, "_TICK_SECONDS", 0.02)
    with time_limit(60):
        yield


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Ranks that have said hello, and their monitor."""

    server: DriverServer
    gang: FakeLauncher
    monitor: RankMonitor
    ranks: list[FakeRank]

    def start(self, index: int = 0) -> None:
        for rank in self.ranks:
            rank.start(index)

    def leave(self, rank: FakeRank) -> None:
        rank.say(Done())
        rank.die()

    def wait_for_events(self, count: int) -> None:
        wait_until(lambda: self.server._events.qsize() >= count)

    def trouble(self, index: int = 0, timeout_seconds: float = TIMEOUT) -> Outcome:
        result = self.monitor.outcome(index, timeout_seconds)
        assert result.ranks, result
        return result

    def hang(self, *answers: StatusReply | None) -> Outcome:
        """Return the outcome of a hang in case 0 in which ranks give these answers."""
        self.start()
        for rank, answer in zip(self.ranks, answers, strict=True):
            if answer is not None:
                rank.answer(answer)
        return self.trouble(0, 0.1)


@contextmanager
def assemble(size: int = 2, *, can_restart: bool = True, hosts: str = "") -> Iterator[Scene]:
    """Yield a scene; ``hosts`` has one letter for the host of each rank."""
    with DriverServer() as server:
        gang = FakeLauncher(can_restart=can_restart)
        monitor = RankMonitor(server, gang, size)
        names = list(hosts) or [HOSTNAME] * size
        ranks = [
            FakeRank(server.variables(), rank, size, host=host) for rank, host in enumerate(names)
        ]
        for rank in ranks:
            rank.hello()
        assert monitor.assemble(TIMEOUT) is None
        yield Scene(server=server, gang=gang, monitor=monitor, ranks=ranks)


@pytest.fixture
def scene() -> Iterator[Scene]:
    with assemble() as pair:
        yield pair


def later(act: Callable[[], object], seconds: float = 0.1) -> None:
    threading.Timer(seconds, act).start()


@contextmanager
def lasts(min_seconds: float, max_seconds: float = 5) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert min_seconds <= time.monotonic() - began < max_seconds


def assembly_failure(
    world_sizes: list[int], size: int = 2, timeout_seconds: float = TIMEOUT, **gang_state: Any
) -> str:
    """Return the reason why ranks that report these world sizes do not assemble."""
    with DriverServer() as server:
        gang = FakeLauncher()
        vars(gang).update(gang_state)
        ranks = [FakeRank(server.variables(), *sizes) for sizes in enumerate(world_sizes)]
        for rank in ranks:
            rank.hello()
            if gang.known_exits:
                rank.die()
        wait_until(lambda: server._events.qsize() >= len(world_sizes))
        trouble = RankMonitor(server, gang, size).assemble(timeout_seconds)
    assert trouble is not None
    assert trouble.status == "failed"
    return trouble.reason


def test_assemble_reports_why_ranks_are_missing() -> None:
    with lasts(0.3):
        reason = assembly_failure([3], size=3, timeout_seconds=0.3)
    assert reason == "ranks 1, 2 did not start within 0 s"
    assert "logs" in assembly_failure([], has_ended=True)
    error = "srun: error: n3: no answer"
    assert assembly_failure([], has_ended=True, said=error).endswith(error)
    assert assembly_failure([2], known_exits={0: 3}) == "rank 0 died: exit code 3"
    assert assembly_failure([2, 4]).startswith("rank 1 is in a world of 4 ranks")


def test_outcomes_of_an_ended_gang_are_kept(scene: Scene) -> None:
    for index in range(3):
        scene.start(index)
        scene.ranks[0].finish(index, make_outcome(wall_seconds=float(index)))
    scene.gang.has_ended = True

    def finish_last() -> None:
        scene.ranks[0].finish(3, make_outcome(wall_seconds=3.0))
        for rank in scene.ranks:
            scene.leave(rank)

    later(finish_last)
    outcomes = [scene.monitor.outcome(index, TIMEOUT) for index in range(4)]
    assert [result.wall_seconds for result in outcomes] == [0.0, 1.0, 2.0, 3.0]


def test_death_fails_the_case_that_the_rank_was_in(scene: Scene) -> None:
    scene.ranks[1].start(1)
    scene.ranks[1].die()
    later(lambda: scene.ranks[0].finish(0))
    assert scene.monitor.outcome(0, TIMEOUT) == make_outcome()
    assert scene.trouble(1).reason == "rank 1 died: its connection closed"


def test_late_outcome_counts_and_its_answers_do_not(scene: Scene) -> None:
    def answer_once(rank: FakeRank) -> None:
        assert isinstance(rank.line.hear(), StatusRequest)
        if rank.rank == 0:
            rank.finish(0)
        rank.say(make_status())

    scene.start()
    for rank in scene.ranks:
        threading.Thread(target=answer_once, args=[rank], daemon=True).start()
    assert scene.monitor.outcome(0, 0.2) == make_outcome()
    scene.start(1)
    scene.ranks[0].answer(make_status())
    assert scene.trouble(1, 0.2).reason == "no end within 0.2 s: rank 1 did not arrive"


@pytest.mark.parametrize(
    ("code", "output", "text"),
    [
        (-9, "", "ended by SIGKILL"),
        (-35, "", "ended by signal 35"),
        (-6, "what(): std::bad_alloc", "ended by SIGABRT; what(): std::bad_alloc"),
        (7, "what(): std::bad_alloc", "exit code 7"),
        (None, "", "its connection closed"),
    ],
)
def test_dead_rank_is_named_with_its_exit(
    scene: Scene, code: int | None, output: str, text: str
) -> None:
    scene.gang.known_exits = {} if code is None else {1: code}
    scene.gang.said = output
    scene.ranks[1].die()
    trouble = scene.trouble()
    assert (trouble.status, trouble.reason) == ("failed", f"rank 1 died: {text}")
    assert [state.state.partition(";")[0] for state in trouble.ranks] == [
        "alive",
        f"died: {text}".partition(";")[0],
    ]
    assert [(state.host, state.pid) for state in trouble.ranks] == [(HOSTNAME, os.getpid())] * 2


@pytest.mark.parametrize(
    ("dying", "exits", "reason"),
    [
        ([1, 0], {}, "rank 1 died: its connection closed"),  # the first
        ([0, 1], {0: 1, 1: -9}, "rank 1 died: ended by SIGKILL"),  # signals precede exit codes
        ([0, 3, 1], {1: -15, 3: -15}, "ranks 3, 1 died: ended by SIGTERM"),
        ([0, 1], {0: -15, 1: 7}, "rank 1 died: exit code 7"),  # the launcher ended rank 0
    ],
)
def test_first_cause_of_death_is_named(
    dying: list[int], exits: dict[int, int], reason: str
) -> None:
    with assemble(max(dying) + 1) as scene:
        scene.gang.known_exits = exits
        for count, rank in enumerate(dying, start=1):
            scene.ranks[rank].die()
            scene.wait_for_events(count)
        assert scene.trouble().reason == reason


def test_death_is_named_instead_of_the_error_it_causes(scene: Scene) -> None:
    scene.ranks[0].break_(0, "RuntimeError: connection closed by peer")
    scene.wait_for_events(1)
    scene.ranks[1].die()
    trouble = scene.trouble()
    assert trouble.reason == "rank 1 died: its connection closed"
    assert trouble.ranks[0].state == "raised RuntimeError: connection closed by peer"


def test_end_of_the_gang_needs_no_grace(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GRACE_SECONDS", 60.0)
    scene.gang.has_ended = True
    assert scene.trouble().reason.startswith("the ranks ended while it was measured")
    for rank in scene.ranks:
        rank.die()
    with lasts(0, 10):
        assert scene.trouble().reason.endswith("its connection closed")


def test_rank_that_is_done_is_not_dead(scene: Scene) -> None:
    scene.leave(scene.ranks[1])
    later(lambda: scene.ranks[0].finish(0), 0.8)
    assert scene.monitor.outcome(0, TIMEOUT) == make_outcome()


def test_first_rank_that_raises_is_named(scene: Scene) -> None:
    scene.ranks[1].break_(None, "ValueError: the roof is on fire")
    scene.wait_for_events(1)
    states = [state.state for state in scene.trouble().ranks]
    assert states == ["alive", "raised ValueError: the roof is on fire"]
    scene.ranks[0].break_(0, "RuntimeError: connection closed by peer")
    scene.wait_for_events(1)
    trouble = scene.trouble()
    assert trouble.reason == "rank 1 raised ValueError: the roof is on fire"
    stacks = [state.stack for state in trouble.ranks]
    assert stacks == ["the stack of rank 0", "the stack of rank 1"]


def test_deadline_starts_with_the_case(scene: Scene) -> None:
    time.sleep(0.3)
    scene.start()
    for rank in scene.ranks:
        rank.answer(make_status(phase="check"))
    with lasts(0.5):
        assert scene.trouble(timeout_seconds=0.5).status == "hang"
    scene.ranks[0].finish(0)
    assert scene.monitor.outcome(0, TIMEOUT) == make_outcome()
    with lasts(0.3):
        assert "no rank has begun it" in scene.trouble(1, 0.3).reason


def test_first_case_has_time_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "START_SECONDS", 0.6)
    with assemble() as scene, lasts(0.6):
        assert scene.trouble(timeout_seconds=0.05).status == "hang"


WAITING = make_status(phase="timed", steps=7, communicates=True, stack="in all_reduce")
ELSEWHERE = make_status(communicates=False, stack="in sleep")
BEHIND = make_status(steps=6)


@pytest.mark.parametrize(
    ("indexes", "answers", "reason"),
    [
        ((0, 0, 0), (None, WAITING, None), "ranks 0, 2 did not arrive"),
        ((1, 1, 0), (WAITING, BEHIND, WAITING), "rank 2 did not arrive"),
        ((0, 0, 0), (BEHIND, WAITING, WAITING), "rank 0 did not arrive"),
        ((0, 0, 0), (WAITING, ELSEWHERE, WAITING), "rank 1 did not arrive"),
        ((0, 0, 0), (BEHIND, None, WAITING), "rank 1 did not arrive"),
        ((0, 0, 0), (ELSEWHERE, BEHIND, WAITING), "rank 1 did not arrive"),
        ((0, 0, 0), (WAITING, WAITING, WAITING), "every rank arrived"),
        ((0, 0, 0), (ELSEWHERE, ELSEWHERE, ELSEWHERE), "every rank is in code of its own"),
        ((0, 0, 0), (None, None, None), "no rank answers"),
    ],
)
def test_hang_names_the_rank_that_did_not_arrive(
    indexes: tuple[int, ...], answers: tuple[StatusReply | None, ...], reason: str
) -> None:
    with assemble(3) as scene:
        for rank, index, answer in zip(scene.ranks, indexes, answers, strict=True):
            rank.start(index)
            if answer is not None:
                rank.answer(answer)
        scene.wait_for_events(3)
        trouble = scene.trouble(max(indexes), 0.1)
    assert trouble.status == "hang"
    assert trouble.reason.startswith(f"no end within 0.1 s: {reason}")
    for state, answer in zip(trouble.ranks, answers, strict=True):
        if answer is None:
            assert state.state.startswith("no answer (process is ")
        else:
            assert state.state == f"timed, step {answer.steps}"
            assert state.stack == answer.stack


PENDING = GroupSeen(ranks=(0, 1, 2), enqueued=5, pending=5, name="nccl:all_reduce")
STUCK = make_status(communicates=False, groups={"0": PENDING})
DONE = make_status(groups={"0": GroupSeen(ranks=(0, 1, 2), enqueued=4)})
AWAY = make_status(communicates=False, groups=DONE.groups)
AHEAD = make_status(steps=8, groups=STUCK.groups)


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ((STUCK, DONE, STUCK), "rank 1 did not arrive"),
        ((STUCK, DONE, AWAY), "rank 2 did not arrive"),
        ((STUCK, None, AWAY), "rank 1 did not arrive"),
        ((STUCK, DONE, WAITING), "rank 0 did not arrive"),  # an incomplete record does not count
        ((STUCK, AHEAD, STUCK), "every rank has enqueued nccl:all_reduce"),
    ],
)
def test_flight_record_outweighs_stacks_and_steps(
    answers: tuple[StatusReply | None, ...], reason: str
) -> None:
    with assemble(3) as scene:
        trouble = scene.hang(*answers)
    assert trouble.reason.startswith(f"no end within 0.1 s: {reason}")


def test_flight_record_may_follow_the_first_answer() -> None:
    with assemble(3) as scene:
        scene.start()
        for rank, answer in zip(scene.ranks, (STUCK, DONE, STUCK), strict=True):
            rank.answer(msgspec.structs.replace(answer, groups=None, more=True), answer)
        trouble = scene.trouble(0, 0.1)
    states = [state.state for state in trouble.ranks]
    assert states == ["timed, step 7, waits for rank 1", "timed, step 7", states[0]]


def test_ranks_that_wait_for_each_other_are_named(scene: Scene) -> None:
    idle = GroupSeen(ranks=(0, 1))
    busy = GroupSeen(ranks=(0, 1), enqueued=1, pending=1)
    first, second = (
        make_status(groups={"a": busy, "b": idle}),
        make_status(groups={"a": idle, "b": busy}),
    )
    assert "ranks 0, 1 wait for one another" in scene.hang(first, second).reason


@pytest.mark.parametrize(
    ("answers", "reason", "silent"),
    [
        ((WAITING, WAITING, None), "rank 2 (c) did not arrive", {"c"}),
        ((None, None, None), "no rank answers", set()),
    ],
)
def test_silent_host_is_named(
    answers: tuple[StatusReply | None, ...], reason: str, silent: set[str]
) -> None:
    with assemble(3, hosts="abc") as scene:
        trouble = scene.hang(*answers)
        assert trouble.reason.endswith(reason)
        assert scene.monitor.silent_hosts() == silent
        assert trouble.ranks[2].state == "no answer"


def test_farewell_waits_for_ranks_and_gang(scene: Scene) -> None:
    with lasts(0.2):
        scene.monitor.farewell(0.1)  # once for the ranks and once for the gang

    def end() -> None:
        for rank in scene.ranks:
            rank.say(Done())
        time.sleep(0.3)
        scene.gang.has_ended = True

    threading.Thread(target=end, daemon=True).start()
    with lasts(0.3):
        scene.monitor.farewell(TIMEOUT)


def test_farewell_does_not_wait_for_an_external_launcher() -> None:
    with assemble(can_restart=False) as scene, lasts(0):
        for rank in scene.ranks:
            rank.say(Done())
        scene.monitor.farewell(TIMEOUT)
