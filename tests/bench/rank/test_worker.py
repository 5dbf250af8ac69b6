"""One rank: what it tells the driver, in which order, and that it never outlives what it was started for."""

import gc
import os
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

import msgspec
import pytest
import torch
from torch._C._distributed_c10d import HashStore, Store

from parbench.bench.launch.control_channel import (
    LEFT_OUT,
    Done,
    DriverServer,
    Finished,
    FromRank,
    Hello,
    Outcome,
    Raised,
    Started,
    StatusReply,
    StatusRequest,
)
from parbench.bench.plan.cases import Case, make_case
from parbench.bench.rank import worker
from tests.support.fakes import HOSTNAME, make_job
from tests.support.nvidia import H100, gpus, install
from tests.support.paths import environment

PATIENCE = 180.0


def fault(name: str, **params: Any) -> Case:
    return make_case(f"custom.{name}", f"tests.support.faults:{name}", params)


@pytest.fixture
def hub() -> Iterator[DriverServer]:
    with DriverServer() as opened:
        yield opened


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process be the only rank of a world."""
    step = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "3"}
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo", **step}.items():
        monkeypatch.setenv(name, value)


def heard(hub: DriverServer, kind: type[Any]) -> Any:
    """Return the next message of a kind, passing over others."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        event = hub.next(deadline - time.monotonic())
        assert event is not None
        if isinstance(event[1], kind):
            return event[1]
    raise AssertionError(f"no {kind.__name__}")


def everything(hub: DriverServer, last: type[Any]) -> list[FromRank | None]:
    """Return all that one rank says up to its last word."""
    said: list[FromRank | None] = []
    while not (said and isinstance(said[-1], last)):
        event = hub.next(PATIENCE)
        assert event is not None
        said.append(event[1])
    return said


def outcomes(said: list[FromRank | None]) -> list[Outcome]:
    return [what.outcome for what in said if isinstance(what, Finished)]


@contextmanager
def working(
    hub: DriverServer, store: Store | None = None, meeting: worker.Meeting | None = None
) -> Iterator[Hello]:
    """Work as a rank in a thread, with the driver in this process; yields its hello."""
    words = (hub.variables(), store)
    more = {"with_driver": True, "meeting": meeting}
    thread = threading.Thread(target=worker.work, args=words, kwargs=more, daemon=True)
    thread.start()
    yield heard(hub, Hello)
    hub.close()
    thread.join(PATIENCE)
    assert not thread.is_alive()


@contextmanager
def process(hub: DriverServer) -> Iterator["subprocess.Popen[bytes]"]:
    """Work as the only rank of a world, in a process of its own that has said hello."""
    variables = {
        **environment(),
        **hub.variables(),
        "RANK": "0",
        "WORLD_SIZE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with subprocess.Popen(
        [sys.executable, "-m", "parbench.bench.rank.worker"], env=variables
    ) as started:
        try:
            heard(hub, Hello)
            yield started
        finally:
            started.kill()


def test_a_rank_says_who_it_is_then_each_case_then_goodbye(hub: DriverServer, alone: None) -> None:
    with working(hub, HashStore()) as hello:
        assert (hello.rank, hello.size, hello.host, hello.pid) == (0, 1, HOSTNAME, os.getpid())
        assert hello.step == "17.3"
        assert {
            "host",
            "versions",
            "variables",
            "process",
            "load",
            "torch",
        } <= hello.environment.keys()
        assert hello.environment["variables"]["GLOO_SOCKET_IFNAME"] == "lo"
        hub.send(
            0,
            make_job(
                [fault("fine", number=0), fault("refusing"), fault("fine", number=1)],
                budget_seconds=0.3,
            ),
        )
        said = everything(hub, Done)
    each = [(kind, index) for index in range(3) for kind in (Started, Finished)]
    assert [(type(what), getattr(what, "index", None)) for what in said] == [*each, (Done, None)]
    fine, refused, other = outcomes(said)
    assert [fine.status, refused.status, other.status] == ["ok", "skipped", "ok"]
    assert fine.seconds
    assert fine.raw


def test_cases_that_the_runs_time_is_spent_for_are_left_out(hub: DriverServer, alone: None) -> None:
    with working(hub, HashStore()):
        hub.send(0, make_job([fault("fine"), fault("fine", number=1)], run_seconds=0.0))
        left = outcomes(everything(hub, Done))
    assert [(outcome.status, outcome.reason) for outcome in left] == [("skipped", LEFT_OUT)] * 2


def test_nothing_of_a_step_stays_when_the_next_one_begins(hub: DriverServer, alone: None) -> None:
    gc.disable()  # the collector might come by just then
    try:
        with working(hub, HashStore()):
            hub.send(
                0,
                make_job(
                    [fault("tangled", number=number) for number in range(2)], budget_seconds=2.0
                ),
            )
            both = outcomes(everything(hub, Done))
    finally:
        gc.enable()
    assert [(outcome.status, outcome.reason) for outcome in both] == [("ok", ""), ("ok", "")]


def test_a_rank_finds_targets_in_the_folder_of_the_job_after_everything_else(
    hub: DriverServer, alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "tabnanny", raising=False)
    (tmp_path / "lonely.py").write_text("import tabnanny\nfrom tests.support.faults import fine\n")
    (tmp_path / "tabnanny.py").write_text("raise RuntimeError('shadowed')\n")
    with working(hub, HashStore()):
        asked = make_case("custom.lonely", "lonely:fine", {})
        hub.send(0, make_job([asked], budget_seconds=0.1, path=str(tmp_path)))
        assert [outcome.status for outcome in outcomes(everything(hub, Done))] == ["ok"]


def test_a_driver_in_the_same_process_is_not_ended_when_it_hangs_up_before_the_job(
    hub: DriverServer, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with working(hub):
        pass
    assert ended == []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The worker's clock, which only the test moves."""
    fake = SimpleNamespace(now=1000.0, sleep=lambda seconds: None)
    fake.monotonic = lambda: fake.now
    monkeypatch.setattr(worker, "time", fake)
    return fake


FINE = [fault("fine", number=number) for number in range(4)]


def test_budget_is_shared_by_weight(clock: SimpleNamespace) -> None:
    visits = {"visits": [0, 1, 2, 0, 3], "weights": [2.0, 10.0, 1.0, 1.0]}
    launch = worker._LaunchClock(make_job(FINE, **visits, budget_seconds=14.0, run_seconds=50.0))
    assert launch.share(0) == pytest.approx(1.0), "half of its weight per visit"
    assert launch.allows(0) == [1.0, 0.0]
    launch.left(0)
    clock.now += 7.0
    assert launch.share(1) == pytest.approx(7.0 * 10 / 13)
    assert launch.share(2) == pytest.approx(7.0 / 3), "an unused share is left to later cases"
    clock.now += 8.0  # the budget is spent
    assert launch.share(3) == worker._MIN_CASE_SECONDS
    assert (launch.allows(0), launch.allows(3)) == ([1.0, 0.0], [1.0, 0.0])
    clock.now += 60.0
    assert launch.allows(3) == [0.0, 0.0]


def test_known_prices_precede_the_shares(clock: SimpleNamespace) -> None:
    visits = {"visits": [0, 1, 2, 0, 1], "more": 2, "weights": [1.0, 1.0, 2.0]}
    request = make_job(FINE[:3], **visits, prices=[2.0, 3.0, 1.0], budget_seconds=10.0)
    launch = worker._LaunchClock(request)
    assert [launch.share(number) for number in range(3)] == [2 + 4 / 4, 3 + 6 / 3, 1 + 9]
    clock.now += 7.0
    assert [launch.share(number) for number in range(3)] == [1.0, 3 * 3 / 4, 1 + 2]
    assert [launch.share(3, 1), launch.share(4)] == [1.5, 3.0]


def test_share_is_at_most_half_of_the_timeout(clock: SimpleNamespace) -> None:
    launch = worker._LaunchClock(make_job(FINE[:1], budget_seconds=100.0, timeout_seconds=30.0))
    assert launch.share(0) == 15.0


@pytest.mark.parametrize(("num_visible", "index", "watts"), [(1, 0, 700.0), (2, 1, 500.0)])
def test_rank_reports_its_gpu_by_uuid(
    alone: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    num_visible: int,
    index: int,
    watts: float,
) -> None:
    gpu1 = {"temperature.gpu": "77", "enforced.power.limit": "500.00"}
    listed = gpus(H100, 2, gpu1=gpu1)
    uuids = [UUID(gpu["uuid"].removeprefix("GPU-")) for gpu in listed]
    devices = [SimpleNamespace(name="H100", uuid=uuid, L2_cache_size=50 << 20) for uuid in uuids]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_visible)
    monkeypatch.setattr(torch.cuda, "get_device_properties", devices.__getitem__)
    monkeypatch.setattr(worker, "nccl_version", lambda: "2.28.9")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("PATH", install(tmp_path, listed)["PATH"])
    hello = worker._hello("", on_cuda=True)
    uuid = listed[index]["uuid"]
    assert hello.place is not None
    assert hello.place.gpu == uuid
    versions, gpu = hello.environment["torch"], hello.environment["gpu"]
    assert (versions["gpu"], versions["nccl"]) == ("H100", "2.28.9")
    assert versions["float32_matmul"] == "highest"
    assert (gpu["uuid"], gpu["power_limit_watts"], gpu["l2_cache_bytes"]) == (uuid, watts, 50 << 20)
    assert hello.environment["load"]["gpu"]["temperature_celsius"] == (28, 77)[index]
    monkeypatch.setenv("PATH", "")
    assert worker._hello("", on_cuda=True).environment["gpu"] == {"l2_cache_bytes": 50 << 20}


def test_a_rank_on_the_cpu_leaves_cuda_alone_and_is_placed_by_its_cores(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("is_available", "device_count", "get_device_properties", "init", "_lazy_init"):
        monkeypatch.setattr(
            torch.cuda, name, lambda *words, name=name: pytest.fail(f"torch.cuda.{name} was called")
        )
    hello = worker._hello("", on_cuda=False)
    assert hello.place
    assert hello.place.gpu is None
    assert "gpu" not in {
        **hello.environment,
        **hello.environment["torch"],
        **hello.environment["load"],
    }


def test_a_rank_that_raises_tells_it_stands_still_and_ends_with_its_driver(
    hub: DriverServer,
) -> None:
    with process(hub) as rank:
        hub.send(
            0,
            make_job(
                [fault("fine"), fault("raising", rank=0)], budget_seconds=0.2, hosts=(HOSTNAME,)
            ),
        )
        assert heard(hub, Finished).index == 0
        assert heard(hub, Started).index == 1
        broken = heard(hub, Raised)
        assert (broken.index, broken.error) == (1, "RuntimeError: the roof is on fire")
        assert "in mischief" in broken.stack
        hub.send(0, StatusRequest())
        first, second = heard(hub, StatusReply), heard(hub, StatusReply)
        assert "stand_still" in first.stack
        assert (first.groups, first.more) == (None, True), "what is known at once is told at once"
        assert second == msgspec.structs.replace(first, groups=second.groups, more=False)
        assert {group.ranks for group in second.groups.values()} == {(0,)}
        assert max(group.enqueued for group in second.groups.values()) > 0
        assert rank.poll() is None
        hub.close()
        assert rank.wait(PATIENCE) == 1


@pytest.mark.full
def test_a_rank_whose_driver_goes_before_its_job_or_in_a_case_ends_itself() -> None:
    for cases in ([], [fault("asleep", rank=0, at=1)]):
        with DriverServer() as hub, process(hub) as rank:
            if cases:
                hub.send(0, make_job(cases, hosts=(HOSTNAME,)))
                heard(hub, Started)
            hub.close()
            assert rank.wait(PATIENCE) == 1, cases


@pytest.mark.full
def test_a_rank_that_cannot_join_its_world_tells_why(hub: DriverServer) -> None:
    with process(hub):
        hub.send(0, make_job([fault("fine")], backend="carrier-pigeon", hosts=(HOSTNAME,)))
        broken = heard(hub, Raised)
        assert broken.index is None
        assert "carrier-pigeon" in broken.error


class Table(worker.Meeting):
    """A meeting of one."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def offer(self, own_address: str) -> str:
        self.asked.append(own_address)
        return f"{own_address}:77"

    def join(self, where: str) -> Store:
        self.asked.append(where)
        return HashStore()


def test_a_rank_offers_where_to_meet_joins_where_the_driver_says_and_counts_its_place_on_its_host(
    hub: DriverServer, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seat() -> tuple[str, str]:
        return os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]

    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "9")
    table = Table()
    with working(hub, meeting=table) as hello:
        assert hello.meeting == "127.0.0.1:77"
        hub.send(0, make_job([fault("fine")], hosts=(HOSTNAME,), meeting="elsewhere:5"))
        assert [outcome.status for outcome in outcomes(everything(hub, Done))] == ["ok"]
    assert table.asked == ["127.0.0.1", "elsewhere:5"]
    assert seat() == ("0", "1")
    for rank, place in (("0", ("0", "2")), ("2", ("1", "2"))):
        monkeypatch.setenv("RANK", rank)
        worker._sit_down((HOSTNAME, "elsewhere", HOSTNAME, "elsewhere"))
        assert seat() == place
