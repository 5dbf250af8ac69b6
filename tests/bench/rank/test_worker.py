"""One rank: its messages to the driver and their order, its time budget, and its end."""

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from parbench.bench.launch.control_channel import (
    OUT_OF_BUDGET,
    Done,
    DriverServer,
    Finished,
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
from tests.support.paths import environment

TIMEOUT_SECONDS = 180.0
SINGLE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}


def fault_case(name: str, **params: Any) -> Case:
    return make_case(f"custom.{name}", f"tests.support.faults:{name}", params)


@pytest.fixture
def hub() -> Iterator[DriverServer]:
    with DriverServer() as server:
        yield server


@pytest.fixture
def single_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process the only rank of a world in a Slurm step."""
    slurm_step = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "3"}
    for name, value in {**SINGLE_RANK, **slurm_step}.items():
        monkeypatch.setenv(name, value)


def receive(hub: DriverServer, kind: type[Any]) -> Any:
    """Return the next message of a kind and drop other messages."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        event = hub.next(deadline - time.monotonic())
        assert event is not None
        if isinstance(event[1], kind):
            return event[1]
    raise AssertionError(f"no {kind.__name__}")


def receive_until_done(hub: DriverServer) -> list[Any]:
    messages: list[Any] = []
    while not (messages and isinstance(messages[-1], Done)):
        event = hub.next(TIMEOUT_SECONDS)
        assert event is not None
        messages.append(event[1])
    return messages


def receive_outcomes(hub: DriverServer) -> list[Outcome]:
    messages = receive_until_done(hub)
    return [message.outcome for message in messages if isinstance(message, Finished)]


@contextmanager
def run_in_thread(hub: DriverServer) -> Iterator[Hello]:
    """Run a rank in a thread of the driver's process."""
    args = (hub.variables(), HashStore())
    options = {"with_driver": True}
    thread = threading.Thread(target=worker.work, args=args, kwargs=options, daemon=True)
    thread.start()
    yield receive(hub, Hello)
    hub.close()
    thread.join(TIMEOUT_SECONDS)
    assert not thread.is_alive()


@contextmanager
def run_in_process(hub: DriverServer) -> Iterator["subprocess.Popen[bytes]"]:
    """Run the only rank of a world in its own process."""
    variables = {**environment(), **hub.variables(), **SINGLE_RANK}
    command = [sys.executable, "-m", "parbench.bench.rank.worker"]
    with subprocess.Popen(command, env=variables) as process:
        try:
            receive(hub, Hello)
            yield process
        finally:
            process.kill()


def test_rank_reports_hello_cases_and_done(
    hub: DriverServer, single_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch.cuda, "_lazy_init", pytest.fail
    )  # which ranks on a CPU never call
    cases = [fault_case("fine", number=0), fault_case("refusing"), fault_case("fine", number=1)]
    with run_in_thread(hub) as hello:
        hub.send(0, make_job(cases, budget_seconds=0.1))
        messages = receive_until_done(hub)
    assert hello.rank == 0
    assert hello.host == HOSTNAME
    assert hello.step == "17.3"
    facts = {"host", "versions", "variables", "process", "load", "torch"}
    assert facts <= hello.environment.keys()
    assert hello.environment["variables"]["GLOO_SOCKET_IFNAME"] == "lo"
    assert "gpu" not in hello.environment
    assert [type(message) for message in messages] == [*[Started, Finished] * 3, Done]
    outcomes = [message.outcome for message in messages[1:-1:2]]
    assert [outcome.status for outcome in outcomes] == ["ok", "skipped", "ok"]
    assert outcomes[0].seconds
    assert outcomes[0].raw


def test_cases_after_the_run_budget_are_left_out(hub: DriverServer, single_rank: None) -> None:
    cases = [fault_case("fine", number=number) for number in range(2)]
    with run_in_thread(hub):
        hub.send(0, make_job(cases, run_seconds=0.0))
        outcomes = receive_outcomes(hub)
    assert outcomes == [OUT_OF_BUDGET] * 2


def test_step_is_freed_before_the_next_one(hub: DriverServer, single_rank: None) -> None:
    """A tangled step holds itself in a cycle, and fails where one before it is still alive."""
    cases = [fault_case("tangled", number=number) for number in range(2)]
    gc.disable()
    try:
        with run_in_thread(hub):
            hub.send(0, make_job(cases, budget_seconds=0.2))
            outcomes = receive_outcomes(hub)
    finally:
        gc.enable()
    assert [outcome.status for outcome in outcomes] == ["ok", "ok"]


def test_targets_in_the_job_folder_shadow_nothing(
    hub: DriverServer, single_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "tabnanny", raising=False)
    (tmp_path / "lonely.py").write_text(
        "import tabnanny\nfrom tests.support.faults import fine\n"
    )
    (tmp_path / "tabnanny.py").write_text("raise RuntimeError('shadowed')\n")
    with run_in_thread(hub):
        case = make_case("custom.lonely", "lonely:fine", {})
        hub.send(0, make_job([case], budget_seconds=0.1, path=str(tmp_path)))
        [outcome] = receive_outcomes(hub)
    assert outcome.status == "ok"


@pytest.mark.full
def test_failed_rank_reports_and_ends_with_its_driver(hub: DriverServer) -> None:
    cases = [fault_case("fine"), fault_case("raising", rank=0)]
    with run_in_process(hub) as process:
        hub.send(0, make_job(cases, budget_seconds=0.2, hosts=(HOSTNAME,)))
        assert receive(hub, Finished).index == 0
        error = receive(hub, Raised)
        assert error.index == 1
        assert error.error == "RuntimeError: the roof is on fire"
        assert "in mischief" in error.stack
        hub.send(0, StatusRequest())
        assert "stand_still" in receive(hub, StatusReply).stack
        assert process.poll() is None
        hub.close()
        assert process.wait(TIMEOUT_SECONDS) == 1


@pytest.mark.full
@pytest.mark.parametrize(
    "cases", [[], [fault_case("asleep", rank=0, at=1)]], ids=["job", "case"]
)
def test_rank_without_a_driver_ends_itself(cases: list[Case]) -> None:
    with DriverServer() as hub, run_in_process(hub) as process:
        if cases:
            hub.send(0, make_job(cases, hosts=(HOSTNAME,)))
            receive(hub, Started)
        hub.close()
        assert process.wait(TIMEOUT_SECONDS) == 1


@pytest.mark.full
def test_rank_that_cannot_join_reports_why(hub: DriverServer) -> None:
    with run_in_process(hub):
        hub.send(0, make_job([], backend="carrier-pigeon", hosts=(HOSTNAME,)))
        error = receive(hub, Raised)
    assert error.index is None
    assert "carrier-pigeon" in error.error


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The worker's clock, which only the test moves."""
    fake = SimpleNamespace(now=1000.0, sleep=lambda seconds: None)
    fake.monotonic = lambda: fake.now
    monkeypatch.setattr(worker, "time", fake)
    return fake


def test_time_budget_is_shared_by_weight(clock: SimpleNamespace) -> None:
    cases = [fault_case("fine", number=number) for number in range(3)]
    weights = [2.0, 10.0, 1.0]
    job = make_job(cases, visits=[0, 1, 2, 0], weights=weights, budget_seconds=13.0)
    launch = worker._LaunchClock(job)
    assert launch.share(0) == pytest.approx(1.0)  # half of its weight in each of two visits
    clock.now += 7.0
    # Later cases share the time that the first one left.
    assert launch.share(1) == pytest.approx(6.0 * 10 / 12)
    assert launch.share(2) == pytest.approx(6.0 / 2)
    clock.now += 8.0
    assert launch.share(3) == 0.02
