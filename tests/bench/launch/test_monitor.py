"""The monitor: outcomes, deadlines, and the rank that is to blame."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from parbench.bench.launch import monitor as module
from parbench.bench.launch.control_channel import (
    DriverServer,
    Outcome,
    StatusReply,
)
from parbench.bench.launch.flight_recorder import GroupSeen
from parbench.bench.launch.monitor import RankMonitor
from parbench.bench.results.records import Culprit, CulpritCause
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

Answers = tuple[StatusReply | None, ...]


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
    launcher: FakeLauncher
    monitor: RankMonitor
    ranks: list[FakeRank]

    def start(self, index: int = 0) -> None:
        for rank in self.ranks:
            rank.start(index)

    def wait_for_events(self, count: int) -> None:
        wait_until(lambda: self.server._events.qsize() >= count)

    def failure(self, index: int = 0, timeout_seconds: float = TIMEOUT) -> Outcome:
        outcome = self.monitor.outcome(index, timeout_seconds)
        assert outcome.ranks, outcome
        return outcome

    def hang(self, *answers: StatusReply | None) -> Outcome:
        """Return the outcome of a hang in case 0 in which ranks give these answers."""
        self.start()
        for rank, answer in zip(self.ranks, answers, strict=True):
            if answer is not None:
                rank.answer(answer)
        return self.failure(0, 0.1)


@contextmanager
def assemble(size: int = 2, *, hosts: str = "") -> Iterator[Scene]:
    """Yield a scene; ``hosts`` has one letter for the host of each rank."""
    with DriverServer() as server:
        launcher = FakeLauncher()
        monitor = RankMonitor(server, launcher, size)
        ranks = []
        for rank in range(size):
            host = hosts[rank] if hosts else HOSTNAME
            ranks.append(FakeRank(server.variables(), rank, size, host=host))
        for fake_rank in ranks:
            fake_rank.say_hello()
        assert monitor.assemble(TIMEOUT) is None
        yield Scene(server=server, launcher=launcher, monitor=monitor, ranks=ranks)


@pytest.fixture
def scene() -> Iterator[Scene]:
    with assemble() as pair:
        yield pair


# --- assembly ---


def fail_to_assemble(launcher: FakeLauncher, *world_sizes: int) -> str:
    """Return the reason why two ranks, of which these say hello, do not begin."""
    with DriverServer() as server:
        ranks = []
        for rank, size in enumerate(world_sizes):
            ranks.append(FakeRank(server.variables(), rank, size))
            ranks[-1].say_hello()
        wait_until(lambda: server._events.qsize() >= len(ranks))
        failure = RankMonitor(server, launcher, 2).assemble(0.3)
    assert failure is not None
    assert failure.status == "failed"
    return failure.reason


def test_missing_rank_is_named() -> None:
    assert "rank 1 did not start" in fail_to_assemble(FakeLauncher(), 2)


def test_rank_of_another_world_is_named() -> None:
    assert "rank 1 is in a world of 4 ranks" in fail_to_assemble(FakeLauncher(), 2, 4)


def test_error_of_the_launcher_is_reported() -> None:
    launcher = FakeLauncher()
    launcher.has_ended = True
    launcher.error = "srun: error: n3: no answer"
    assert launcher.error in fail_to_assemble(launcher)


def list_culprits(failure: Outcome) -> list[tuple[int, CulpritCause]]:
    return [(culprit.rank, culprit.cause) for culprit in failure.culprits]


# --- deaths and exceptions ---


def test_death_fails_the_case_that_the_rank_was_in(scene: Scene) -> None:
    scene.ranks[1].start(1)
    scene.ranks[0].finish(0)
    scene.wait_for_events(2)
    scene.ranks[1].die()
    assert scene.monitor.outcome(0, TIMEOUT) == make_outcome()
    failure = scene.failure(1)
    assert failure.status == "failed"
    assert failure.reason == "rank 1 died: its connection closed"
    assert [state.state for state in failure.ranks] == ["alive", "died: its connection closed"]


def test_abort_is_reported_with_its_message(scene: Scene) -> None:
    scene.launcher.exit_codes = {1: -6}
    scene.launcher.error = "what(): std::bad_alloc"
    scene.ranks[1].die()
    reason = "rank 1 died: ended by SIGABRT; what(): std::bad_alloc"
    assert scene.failure().reason == reason


@pytest.mark.parametrize(
    ("deaths", "exits", "reason", "cause"),
    [
        ([1, 0], {}, "rank 1 died: its connection closed", "died"),
        ([0, 1], {0: 1, 1: -9}, "rank 1 died: ended by SIGKILL", "died"),
        # The launcher ended rank 0 because rank 1 had failed.
        ([0, 1], {0: -15, 1: 7}, "rank 1 died: exit code 7", "died"),
        ([1], {1: -15}, "rank 1 died: ended by SIGTERM", "terminated"),
    ],
)
def test_first_cause_of_death_is_named(
    scene: Scene, deaths: list[int], exits: dict[int, int], reason: str, cause: CulpritCause
) -> None:
    scene.launcher.exit_codes = exits
    for count, rank in enumerate(deaths, start=1):
        scene.ranks[rank].die()
        scene.wait_for_events(count)
    failure = scene.failure()
    assert failure.reason == reason
    assert list_culprits(failure) == [(1, cause)]


def test_death_is_named_before_the_error_it_causes(scene: Scene) -> None:
    scene.ranks[0].fail(0, "RuntimeError: connection closed by peer")
    scene.wait_for_events(1)
    scene.ranks[1].die()
    failure = scene.failure()
    assert failure.reason == "rank 1 died: its connection closed"
    assert failure.ranks[0].state == "raised RuntimeError: connection closed by peer"


def test_first_rank_that_raises_is_named(scene: Scene) -> None:
    scene.ranks[1].fail(0, "ValueError: the roof is on fire")
    scene.wait_for_events(1)
    scene.ranks[0].fail(0, "RuntimeError: connection closed by peer")
    scene.wait_for_events(2)
    failure = scene.failure()
    assert failure.reason == "rank 1 raised ValueError: the roof is on fire"
    assert list_culprits(failure) == [(1, "raised")]
    stacks = [state.stack for state in failure.ranks]
    assert stacks == ["the stack of rank 0", "the stack of rank 1"]


# --- hangs ---


WAITING = make_status()
ELSEWHERE = make_status(communicates=False, stack="in sleep")
BEHIND = make_status(steps=6)


@pytest.mark.parametrize(
    ("answers", "reason", "absent_ranks"),
    [
        ((None, WAITING, None), "ranks 0, 2 did not arrive", [0, 2]),
        ((ELSEWHERE, BEHIND, WAITING), "rank 1 did not arrive", [1]),
        ((WAITING, ELSEWHERE, WAITING), "rank 1 did not arrive", [1]),
        ((WAITING, WAITING, WAITING), "every rank arrived", []),
        ((ELSEWHERE, ELSEWHERE, ELSEWHERE), "every rank is in code of its own", []),
        ((None, None, None), "no rank answers", []),
    ],
)
def test_hang_names_the_rank_that_did_not_arrive(
    answers: Answers, reason: str, absent_ranks: list[int]
) -> None:
    with assemble(3) as scene:
        failure = scene.hang(*answers)
    assert failure.status == "hang"
    assert list_culprits(failure) == [(rank, "absent") for rank in absent_ranks]
    assert failure.reason.startswith(f"no end within 0.1 s: {reason}")


def test_hang_names_the_rank_in_an_earlier_case() -> None:
    with assemble(3) as scene:
        for rank, index in zip(scene.ranks, (1, 1, 0), strict=True):
            rank.start(index)
            rank.answer(WAITING)
        failure = scene.failure(1, 0.1)
    assert "rank 2 did not arrive" in failure.reason


def test_hang_keeps_the_state_of_each_rank(scene: Scene) -> None:
    answering, silent = scene.hang(WAITING, None).ranks
    assert answering.state == "timed, step 7"
    assert answering.stack == WAITING.stack
    assert silent.state.startswith("no answer (process is ")
    assert (answering.is_silent, silent.is_silent) == (False, True)


PENDING = GroupSeen(ranks=(0, 1, 2), enqueued=5, pending=5, name="nccl:all_reduce")
STUCK = make_status(communicates=False, groups={"0": PENDING})
DONE = make_status(groups={"0": GroupSeen(ranks=(0, 1, 2), enqueued=4)})


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ((STUCK, DONE, STUCK), "rank 1 did not arrive"),
        # The record of one rank is missing, so that the records do not count.
        ((STUCK, DONE, WAITING), "rank 0 did not arrive"),
        ((STUCK, STUCK, STUCK), "every rank has enqueued nccl:all_reduce"),
    ],
)
def test_flight_record_outweighs_stacks_and_steps(answers: Answers, reason: str) -> None:
    with assemble(3) as scene:
        failure = scene.hang(*answers)
    assert failure.reason.startswith(f"no end within 0.1 s: {reason}")


def test_ranks_that_wait_for_each_other_are_named(scene: Scene) -> None:
    idle = GroupSeen(ranks=(0, 1))
    busy = GroupSeen(ranks=(0, 1), enqueued=1, pending=1)
    first = make_status(groups={"a": busy, "b": idle})
    second = make_status(groups={"a": idle, "b": busy})
    failure = scene.hang(first, second)
    assert "ranks 0, 1 wait for one another" in failure.reason
    assert list_culprits(failure) == [(0, "waiting"), (1, "waiting")]


IN_BARRIER = GroupSeen(ranks=(0, 1), enqueued=3, pending=3, name="gloo:barrier")
BEFORE_BARRIER = GroupSeen(ranks=(0, 1), enqueued=2)
LAUNCHED = GroupSeen(ranks=(0, 1), enqueued=8, is_last_coalesced=True)


@pytest.mark.parametrize(
    ("communicates", "reason"),
    [(True, "it is unknown which rank did not arrive"), (False, "rank 0 did not arrive")],
)
def test_rank_that_may_wait_in_a_coalesced_launch_is_not_blamed(
    scene: Scene, communicates: bool, reason: str
) -> None:
    """Rank 0 may wait for rank 1 in its launch, unless its stack shows code of its own."""
    groups = {"control": BEFORE_BARRIER, "0": LAUNCHED}
    first = make_status(groups=groups, communicates=communicates)
    second = make_status(groups={"control": IN_BARRIER, "0": LAUNCHED})
    assert reason in scene.hang(first, second).reason


def test_silent_host_is_named() -> None:
    with assemble(3, hosts="abc") as scene:
        failure = scene.hang(WAITING, WAITING, None)
        assert failure.reason.endswith("rank 2 (c) did not arrive")
        assert failure.ranks[2].state == "no answer"
        assert failure.culprits == (Culprit(rank=2, host="c", cause="absent"),)
        assert scene.monitor.silent_hosts() == {"c"}
