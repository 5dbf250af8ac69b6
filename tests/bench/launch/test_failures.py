"""Why ranks failed: who died, who raised, and who did not arrive."""

from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_struct

from parbench.bench.launch.failures import Evidence, explain_end, explain_hang
from parbench.bench.launch.flight_recorder import GroupState
from parbench.bench.launch.messages import HangReport, Outcome, RankError
from parbench.bench.launch.processes import get_process_space
from parbench.bench.results.records import CulpritCause
from tests.support.fakes import make_hello, make_status

Answers = tuple[HangReport | None, ...]


def make_evidence(size: int = 2) -> Evidence:
    """Return evidence about running ranks."""
    space = get_process_space()
    return Evidence(
        hellos={rank: make_hello(rank, process_space=space) for rank in range(size)}
    )


def make_error(error: str, seconds: float = 0.0) -> RankError:
    return RankError(error=error, stack=f"the stack of {error}", seconds=seconds)


def hang(*answers: HangReport | None, hosts: str = "") -> Outcome:
    """Return the outcome of a hang that ranks report so, None if they do not.

    ``hosts`` has a letter for each rank on a host of its own, empty for one host. Letters that
    differ in case are hosts with equal names.
    """
    reports = {rank: answer for rank, answer in enumerate(answers) if answer is not None}
    evidence = replace(make_evidence(len(answers)), reports=reports)
    for rank, host in enumerate(hosts):
        hello = evidence.hellos[rank]
        place = replace_struct(hello.place, host=host.lower(), boot_id=host)
        evidence.hellos[rank] = replace_struct(hello, host=place.host, place=place)
    return explain_hang(evidence, 0.1, {})


def list_culprits(failure: Outcome) -> list[tuple[int, CulpritCause]]:
    return [(culprit.rank, culprit.cause) for culprit in failure.culprits]


# --- deaths and exceptions ---


def test_end_is_reported_with_the_last_message() -> None:
    message = "what(): std::bad_alloc"
    reason = explain_end(make_evidence(), {1: -6}, message).reason
    assert reason == "rank 1 died: ended by SIGABRT; what(): std::bad_alloc"
    reason = explain_end(make_evidence(), {}, message).reason
    assert reason == "the ranks ended; what(): std::bad_alloc"


@pytest.mark.parametrize(
    ("codes", "reason", "cause"),
    [
        ({0: 1, 1: -9}, "rank 1 died: ended by SIGKILL", "died"),
        # The launcher ended rank 0 because rank 1 had failed.
        ({0: -15, 1: 7}, "rank 1 died: exit code 7", "died"),
        ({1: -15}, "rank 1 died: ended by SIGTERM", "terminated"),
        ({1: 0}, "rank 1 died: exit code 0", "died"),
    ],
)
def test_first_cause_of_death_is_named(
    codes: dict[int, int], reason: str, cause: CulpritCause
) -> None:
    failure = explain_end(make_evidence(), codes, "")
    assert failure.reason == reason
    assert list_culprits(failure) == [(1, cause)]


def test_rank_that_completed_its_job_is_not_blamed() -> None:
    evidence = replace(make_evidence(), cpu_seconds={0: 1.0})
    failure = explain_end(evidence, {0: 0, 1: -9}, "")
    assert failure.reason == "rank 1 died: ended by SIGKILL"


def test_death_is_named_before_the_error_it_causes() -> None:
    errors = {0: make_error("RuntimeError: connection closed by peer")}
    failure = explain_end(replace(make_evidence(), errors=errors), {1: -9}, "")
    assert failure.reason == "rank 1 died: ended by SIGKILL"
    states = ["raised RuntimeError: connection closed by peer", "died: ended by SIGKILL"]
    assert [state.state for state in failure.ranks] == states


def test_first_rank_that_raises_is_named() -> None:
    first = make_error("ValueError: the roof is on fire")
    second = make_error("RuntimeError: connection closed by peer", seconds=1.0)
    evidence = replace(make_evidence(), errors={0: second, 1: first})
    failure = explain_end(evidence, {}, "")
    assert failure.reason == "rank 1 raised ValueError: the roof is on fire"
    assert [state.stack for state in failure.ranks] == [second.stack, first.stack]
    assert list_culprits(failure) == [(1, "raised")]


# --- hangs ---


WAITING = make_status()
ELSEWHERE = make_status(communicates=False, stack="in sleep")
BEHIND = make_status(steps=6)
EARLIER = make_status(index=-1)
PENDING = GroupState(ranks=(0, 1, 2), enqueued=5, pending=5)
STUCK = make_status(communicates=False, groups={"0": PENDING})
DONE = make_status(groups={"0": GroupState(ranks=(0, 1, 2), enqueued=4)})
IN_SLEEP = replace_struct(DONE, communicates=False)
IDLE = GroupState(ranks=(0, 1))
BUSY = GroupState(ranks=(0, 1), enqueued=1, pending=1)
IN_GROUP_A = make_status(groups={"a": BUSY, "b": IDLE})
IN_GROUP_B = make_status(groups={"a": IDLE, "b": BUSY})


@pytest.mark.parametrize(
    ("answers", "reason", "cause", "culprits"),
    [
        ((None, WAITING, None), "ranks 0, 2 did not arrive", "absent", [0, 2]),
        ((ELSEWHERE, BEHIND, WAITING), "rank 1 did not arrive", "absent", [1]),
        ((WAITING, ELSEWHERE, WAITING), "rank 1 did not arrive", "absent", [1]),
        ((WAITING, WAITING, EARLIER), "rank 2 did not arrive", "absent", [2]),
        ((WAITING, WAITING, WAITING), "no rank is known to be missing", "", []),
        ((ELSEWHERE, ELSEWHERE, ELSEWHERE), "no rank is known to be missing", "", []),
        ((None, None, None), "no rank answers", "", []),
        # The flight record outweighs stacks and steps.
        ((STUCK, DONE, STUCK), "rank 1 did not arrive", "absent", [1]),
        ((STUCK, DONE, WAITING), "rank 1 did not arrive", "absent", [1]),
        ((STUCK, DONE, IN_SLEEP), "rank 2 did not arrive", "absent", [2]),
        ((IN_GROUP_A, IN_GROUP_B), "ranks 0, 1 wait for one another", "waiting", [0, 1]),
    ],
)
def test_hang_names_its_cause(
    answers: Answers, reason: str, cause: CulpritCause, culprits: list[int]
) -> None:
    failure = hang(*answers)
    assert failure.status == "hang"
    assert failure.reason.startswith(f"timed out after 0.1 s: {reason}")
    assert list_culprits(failure) == [(rank, cause) for rank in culprits]


def test_hang_keeps_the_state_of_each_rank() -> None:
    answering, silent = hang(WAITING, None).ranks
    assert answering.state == "timed, step 7"
    assert answering.stack == WAITING.stack
    assert silent.state.startswith("no answer (process is ")
    assert (answering.is_silent, silent.is_silent) == (False, True)


def test_host_without_connection_is_named() -> None:
    """A shared file system carries the report of a rank whose other network is down."""
    cut = make_status(is_connected=False)
    failure = hang(WAITING, WAITING, cut, hosts="abc")
    assert failure.reason.endswith("rank 2 (c) did not arrive")
    assert list_culprits(failure) == [(2, "absent")]
    assert failure.ranks[2].is_silent
    assert failure.ranks[2].state.endswith("no connection to the other hosts")
    assert hang(WAITING, WAITING, cut, hosts="abA").reason.endswith("rank 2 (a) did not arrive")
    # No other host can connect to that of rank 0.
    failure = hang(WAITING, cut, cut, hosts="abc")
    assert failure.reason.endswith("rank 0 (a) did not arrive")
