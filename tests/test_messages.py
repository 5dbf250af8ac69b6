"""What is said arrives as it was said; what is not understood is refused."""

import math
from typing import Any

import msgspec
import pytest
from fakes import case, job, outcome, where
from hypothesis import given
from hypothesis import strategies as st

from bench.messages import Ask, Broken, Bye, Finished, FromDriver, FromRank, Hello, Job, Outcome, Started, Work
from bench.plan import Measure
from bench.records import Check

HELLO = Hello(rank=1, size=2, host="node-a", pid=41, environment={"process": {"cores": 2}, "gpu": None})
FROM_RANK = [
    HELLO,
    Started(index=3),
    Finished(index=3, outcome=outcome(notes=["odd"], details={"bytes": 4}, raw=b"\x00\xff")),
    Finished(index=0, outcome=Outcome(status="skipped", reason="no such dtype")),
    Broken(index=None, error="OSError: no", stack="line 1\nline 2"),
    where(),
    Bye(),
]
FROM_DRIVER = [job([case(0), case(1)], measure=Measure(seed=7), path="/home"), Ask()]


def sent(message: Any, kind: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind)


@pytest.mark.parametrize("message", FROM_RANK, ids=lambda message: type(message).__name__)
def test_what_a_rank_says_arrives_as_it_was_said(message: Any) -> None:
    received = sent(message, FromRank)
    assert received == message
    assert type(received) is type(message)


@pytest.mark.parametrize("message", FROM_DRIVER, ids=lambda message: type(message).__name__)
def test_what_the_driver_says_arrives_as_it_was_said(message: Any) -> None:
    received = sent(message, FromDriver)
    assert received == message
    assert type(received) is type(message)


def test_every_message_is_tried_here() -> None:
    assert {type(message) for message in FROM_RANK} == set(FromRank.__args__)
    assert {type(message) for message in FROM_DRIVER} == set(FromDriver.__args__)


def test_the_cases_of_a_job_keep_their_ids_and_the_kinds_of_their_values() -> None:
    asked = msgspec.structs.replace(case(), params={"flag": True, "count": 1, "share": 1.0, "word": "1"})
    [received] = sent(job([asked]), Job).cases
    assert received == asked
    assert [type(value) for value in received.params.values()] == [bool, int, float, str]


@given(st.lists(st.floats(allow_nan=False)))
def test_samples_arrive_to_the_last_bit(seconds: list[float]) -> None:
    received = sent(Finished(index=0, outcome=Outcome(status="ok", seconds=seconds)), FromRank)
    assert received.outcome.seconds == seconds


def test_no_number_at_all_still_arrives_for_the_driver_to_judge() -> None:
    received = sent(Finished(index=0, outcome=outcome(work=[Work(name="w", amount=math.nan, unit="B/s")])), FromRank)
    assert math.isnan(received.outcome.work[0].amount)


def test_an_outcome_with_nothing_claims_nothing() -> None:
    empty = Outcome(status="failed")
    assert (empty.seconds, empty.work, empty.stop, empty.check, empty.raw) == ([], [], None, Check(), b"")
    assert empty.check.passed is None


def test_outcomes_do_not_share_what_can_be_changed() -> None:
    Outcome(status="ok").seconds.append(1.0)
    assert Outcome(status="ok").seconds == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "Hello", "rank": 0},
        {"type": "Started", "index": "one"},
        {"type": "Novelty"},
        {"index": 0},
        {"type": "Finished", "index": 0, "outcome": {"status": "splendid"}},
        {"type": "Ask"},
    ],
)
def test_what_no_rank_would_say_is_not_understood(wrong: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        sent(wrong, FromRank)


def test_what_a_subject_describes_must_be_data() -> None:
    with pytest.raises(TypeError, match="object"):
        msgspec.msgpack.encode(Finished(index=0, outcome=outcome(details={"group": object()})))
