"""One rank under srun: where ranks meet is bound by rank 0 and never computed."""

import os
from datetime import timedelta

import pytest

from bench import srun_rank as module
from bench.srun_rank import Meeting


@pytest.fixture(autouse=True)
def no_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that what a test leaves is undone
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")


def test_rank_0_binds_a_free_port_and_the_others_find_what_it_set() -> None:
    first, second = Meeting(0), Meeting(1)
    where = first.offer("127.0.0.1")
    assert second.offer("127.0.0.1") == ""
    store = first.join(where)
    store.set("here", "yes")
    other = second.join(where)
    other.set_timeout(timedelta(seconds=10))
    assert other.get("here") == b"yes"
    assert other is not store


def test_two_gangs_on_a_host_meet_apart() -> None:
    meetings = [Meeting(0), Meeting(0)]
    wheres = [meeting.offer("127.0.0.1") for meeting in meetings]
    assert len(set(wheres)) == 2
    for meeting, where in zip(meetings, wheres, strict=True):
        meeting.join(where).set("where", where)
    assert [
        meeting.join(where).get("where").decode() for meeting, where in zip(meetings, wheres, strict=True)
    ] == wheres


def test_gloo_takes_the_interface_that_reaches_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "interface_of", {"127.0.0.1": "eth7"}.get)
    Meeting(1).offer("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_the_users_interface_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    Meeting(1).offer("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"


def test_an_address_of_no_interface_leaves_gloo_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "interface_of", lambda address: None)
    Meeting(1).offer("10.0.0.1")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
