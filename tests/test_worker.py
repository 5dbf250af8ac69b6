"""One rank: what it tells the driver, in which order, and that it never outlives what it was started for."""

import gc
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
import torch
from conftest import environment
from fakes import HERE, job, wait_until
from torch._C._distributed_c10d import HashStore, Store

from bench import worker
from bench.cases import Case, make_case
from bench.channel import ADDRESS_VARIABLE, KEY_VARIABLE, Event, Gone, Hub
from bench.gang import TorchrunGang
from bench.messages import Ask, Broken, Bye, Finished, FromRank, Hello, Started, Where

PATIENCE = 60.0


def fault(name: str, **params: Any) -> Case:
    return make_case(f"custom.{name}", f"faults:{name}", params)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as opened:
        yield opened


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process be the only rank of a world."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)


def heard(hub: Hub, kind: type[Any], rank: int | None = None) -> Any:
    """Return the next message of a kind, passing over others."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        event = hub.next(deadline - time.monotonic())
        assert event is not None
        if isinstance(event.what, kind) and rank in (None, event.rank):
            return event.what
    raise AssertionError(f"no {kind.__name__}")


def everything(hub: Hub) -> list[FromRank]:
    """Return all that one rank says before it goes."""
    said: list[FromRank] = []
    while True:
        event = hub.next(PATIENCE)
        assert event is not None
        if isinstance(event.what, Gone):
            return said
        said.append(event.what)


@contextmanager
def working(hub: Hub, store: Store | None = None, meeting: worker.Meeting | None = None) -> Iterator[threading.Thread]:
    """Work as a rank in a thread, with the driver in this process."""
    variables = hub.variables()
    words = (variables[ADDRESS_VARIABLE], variables[KEY_VARIABLE], store)
    more = {"with_driver": True, "meeting": meeting}
    thread = threading.Thread(target=worker.work, args=words, kwargs=more, daemon=True)
    thread.start()
    yield thread
    hub.close()
    thread.join(PATIENCE)
    assert not thread.is_alive()


@contextmanager
def process(hub: Hub) -> Iterator["subprocess.Popen[bytes]"]:
    """Work as the only rank of a world, in a process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    places = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    variables = {**environment(), **hub.variables(), **places, "GLOO_SOCKET_IFNAME": "lo"}
    with subprocess.Popen([sys.executable, "-m", "bench.worker"], env=variables) as started:
        try:
            yield started
        finally:
            started.kill()


# --- the work ---


def test_a_rank_says_who_it_is_then_each_case_then_goodbye(hub: Hub, alone: None) -> None:
    with working(hub, HashStore()):
        hello = heard(hub, Hello)
        assert (hello.rank, hello.size, hello.host, hello.pid) == (0, 1, HERE, os.getpid())
        assert {"host", "versions", "variables", "process", "load", "torch"} <= hello.environment.keys()
        assert hello.environment["variables"]["GLOO_SOCKET_IFNAME"] == "lo"
        hub.send(0, job([fault("fine", number=0), fault("refusing"), fault("fine", number=1)], budget_seconds=0.3))
        said: list[FromRank] = []
        while not isinstance(said[-1] if said else None, Bye):
            event = hub.next(PATIENCE)
            assert event is not None
            assert not isinstance(event.what, Gone | Broken), event.what
            said.append(event.what)
    kinds = [(type(what).__name__, getattr(what, "index", None)) for what in said]
    each = [(name, index) for index in range(3) for name in ("Started", "Finished")]
    assert kinds == [*each, ("Bye", None)]
    outcomes = [what.outcome for what in said if isinstance(what, Finished)]
    assert [outcome.status for outcome in outcomes] == ["ok", "skipped", "ok"]
    assert outcomes[0].seconds
    assert outcomes[0].raw


def test_nothing_of_a_step_stays_when_the_next_one_begins(hub: Hub, alone: None) -> None:
    gc.disable()  # the collector might come by just then
    try:
        with working(hub, HashStore()):
            heard(hub, Hello)
            hub.send(0, job([fault("tangled", number=number) for number in range(2)], budget_seconds=2.0))
            outcomes = [heard(hub, Finished).outcome for _ in range(2)]
            heard(hub, Bye)
    finally:
        gc.enable()
    assert [(outcome.status, outcome.reason) for outcome in outcomes] == [("ok", ""), ("ok", "")]


def test_a_rank_finds_targets_in_the_folder_of_the_job_after_everything_else(
    hub: Hub, alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "tabnanny", raising=False)
    (tmp_path / "lonely.py").write_text("import tabnanny\nfrom faults import fine\n")
    (tmp_path / "tabnanny.py").write_text("raise RuntimeError('shadowed')\n")
    with working(hub, HashStore()):
        heard(hub, Hello)
        asked = make_case("custom.lonely", "lonely:fine", {})
        hub.send(0, job([asked], budget_seconds=0.1, path=str(tmp_path)))
        assert heard(hub, Finished).outcome.status == "ok"
        heard(hub, Bye)


def test_a_driver_in_the_same_process_is_not_ended_when_it_hangs_up_before_the_job(
    hub: Hub, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with working(hub):
        heard(hub, Hello)
    assert ended == []


def test_the_budget_is_shared_by_weight_and_what_is_not_used_goes_to_those_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Clock:
        now = 1000.0

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(worker, "time", clock)
    cases = [fault("fine", number=number) for number in range(4)]
    asked = job(cases, weights=[1.0, 10.0, 1.0, 1.0], budget_seconds=13.0, run_seconds=50.0)
    shares = worker._shares(asked)
    assert next(shares).seconds == pytest.approx(1.0)
    clock.now += 7.0  # it took longer: half is left
    assert next(shares).seconds == pytest.approx(5.0)
    clock.now += 0.0  # it took nothing
    third = next(shares)
    assert third.in_time
    assert third.seconds == pytest.approx(3.0)
    clock.now += 60.0  # the budget is spent, and the run's time too
    last = next(shares)
    assert (last.seconds, last.in_time) == (worker._MIN_CASE_SECONDS, False)
    assert list(shares) == []


def test_a_rank_tells_its_gpu_by_uuid_however_many_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each rank sees only its own, all are torch's first. No GPU is needed to see it."""
    assert torch.cuda.is_available() or worker._gpu_uuid() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=UUID(int=7 + index)))
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert worker._gpu_uuid() == "00000000-0000-0000-0000-000000000007"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("no such thing"), "ValueError: no such thing"),
        (RuntimeError("first\nsecond"), "RuntimeError: first"),
        (RuntimeError(), "RuntimeError: "),
    ],
)
def test_an_exception_is_told_in_one_line(error: Exception, told: str) -> None:
    assert worker._sentence(error) == told


# --- the end, with real processes ---


@pytest.mark.slow
def test_a_rank_that_raises_tells_it_stands_still_and_ends_with_its_driver(hub: Hub) -> None:
    with process(hub) as rank:
        heard(hub, Hello)
        hub.send(0, job([fault("fine"), fault("raising", rank=0)], budget_seconds=0.2))
        assert heard(hub, Finished).index == 0
        assert heard(hub, Started).index == 1
        broken = heard(hub, Broken)
        assert (broken.index, broken.error) == (1, "RuntimeError: the roof is on fire")
        assert "in mischief" in broken.stack
        hub.send(0, Ask())
        assert "stand_still" in heard(hub, Where).stack
        assert rank.poll() is None
        hub.close()
        assert rank.wait(10) == 1


@pytest.mark.slow
def test_a_rank_that_has_done_its_job_ends_well(hub: Hub) -> None:
    with process(hub) as rank:
        heard(hub, Hello)
        hub.send(0, job([fault("fine")], budget_seconds=0.1))
        assert [type(what) for what in everything(hub)] == [Started, Finished, Bye]
        assert rank.wait(10) == 0


@pytest.mark.slow
@pytest.mark.parametrize("cases", [[], [fault("asleep", rank=0, at=1)]], ids=["before its job", "in a case"])
def test_a_rank_whose_driver_goes_ends_itself(hub: Hub, cases: list[Case]) -> None:
    with process(hub) as rank:
        heard(hub, Hello)
        if cases:
            hub.send(0, job(cases))
            heard(hub, Started)
        hub.close()
        assert rank.wait(10) == 1


@pytest.mark.slow
def test_a_rank_that_cannot_join_its_world_tells_why(hub: Hub) -> None:
    with process(hub):
        heard(hub, Hello)
        hub.send(0, job([fault("fine")], backend="carrier-pigeon"))
        broken = heard(hub, Broken)
        assert broken.index is None
        assert "carrier-pigeon" in broken.error


@pytest.mark.slow
def test_the_rank_that_raises_is_the_first_and_only_one_to_tell(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    gang = TorchrunGang(2, tmp_path, 0, {**hub.variables(), "GLOO_SOCKET_IFNAME": "lo"})
    hellos = [heard(hub, Hello), heard(hub, Hello)]
    try:
        for rank in range(2):
            hub.send(rank, job([fault("raising", rank=1)]))
        assert heard(hub, Broken, rank=1).error == "RuntimeError: the roof is on fire"
        # a world left by one rank would make the other raise too, and maybe be heard first
        deadline = time.monotonic() + 1.0
        events: list[Event] = []
        while (event := hub.next(deadline - time.monotonic())) is not None:
            events.append(event)
        assert not any(isinstance(event.what, Broken | Gone) for event in events)
    finally:
        gang.end(hellos)
    wait_until(gang.ended)


# --- ranks that no launcher has told where to meet ---


class Table:
    """A meeting of one."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.offered: list[str] = []
        self.joined: list[str] = []

    def offer(self, own_address: str) -> str:
        self.offered.append(own_address)
        return f"{own_address}:77"

    def join(self, where: str) -> Store:
        self.joined.append(where)
        return self.store


def test_a_rank_offers_where_to_meet_and_joins_where_the_driver_says(
    hub: Hub, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "9")
    table = Table()
    with working(hub, meeting=table):
        assert heard(hub, Hello).meeting == "127.0.0.1:77"
        hub.send(0, job([fault("fine")], hosts=(HERE,), meeting="elsewhere:5"))
        assert heard(hub, Finished).outcome.status == "ok"
        heard(hub, Bye)
    assert (table.offered, table.joined) == (["127.0.0.1"], ["elsewhere:5"])
    assert (os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]) == ("0", "1")


@pytest.mark.parametrize(("rank", "seat"), [("0", ("0", "2")), ("2", ("1", "2"))])
def test_a_ranks_place_on_its_host_is_counted_from_what_all_told(
    monkeypatch: pytest.MonkeyPatch, rank: str, seat: tuple[str, str]
) -> None:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "9")
    monkeypatch.setenv("RANK", rank)
    worker._sit_down((HERE, "elsewhere", HERE, "elsewhere"))
    assert (os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]) == seat


def test_a_rank_tells_its_job_step_where_it_is_in_one() -> None:
    assert worker._step({"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "3"}) == "17.3"
    assert worker._step({"SLURM_JOB_ID": "17"}) == ""
