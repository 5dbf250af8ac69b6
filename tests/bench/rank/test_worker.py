"""One rank: its messages to the driver and their order, its time budget, and its end."""

import gc
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace
from torch._C._distributed_c10d import HashStore

from parbench.bench.launch.messages import (
    ADDRESSES,
    JOB,
    HangReport,
    Hello,
    Job,
    JobDone,
    Mailbox,
    Message,
    Outcome,
    RankError,
    StepBegun,
)
from parbench.bench.plan.cases import EXPLAINER, Case, load_target, make_case
from parbench.bench.rank import watchdog as watchdog_module
from parbench.bench.rank import worker
from parbench.bench.rank.progress import Progress as StepCounter
from parbench.bench.results.records import SkipReason
from parbench.bench.world import accelerator
from tests.support.fakes import HOSTNAME, make_job, wait_until
from tests.support.paths import environment

TIMEOUT_SECONDS = 180.0
SINGLE_RANK = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}


def fault_case(name: str, **params: Any) -> Case:
    return make_case(f"custom.{name}", f"tests.support.faults:{name}", params)


@pytest.fixture
def single_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process the only rank of a world in a Slurm step."""
    slurm_step = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "3"}
    for name, value in {**SINGLE_RANK, **slurm_step}.items():
        monkeypatch.setenv(name, value)


def run_here(folder: Path, job: Job, timeout_seconds: float = 600.0) -> list[Message]:
    """Be the only rank of a world and return its messages."""
    mailbox = Mailbox(folder)
    # The watchdog of a rank that hangs would end this process.
    patient_job = replace(job, plan=replace(job.plan, timeout_seconds=timeout_seconds))
    mailbox.put(JOB, msgspec.json.encode(patient_job))
    worker.run_rank(mailbox, HashStore(), folder)
    return receive(folder)


def make_variables(folder: Path) -> dict[str, str]:
    """Return the environment of a process that is the only rank of a world."""
    return {**environment(), **SINGLE_RANK, "PARBENCH_FOLDER": str(folder)}


def receive(folder: Path) -> list[Message]:
    """Return the new messages of the rank."""
    return [message for _, message in Mailbox(folder).receive()]


def test_address_of_every_host_is_not_that_of_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bridge of containers has the same address on all hosts."""
    mailbox = Mailbox(tmp_path)
    mailbox.put(ADDRESSES, msgspec.json.encode([("172.17.0.1", 7), ("10.0.0.5", 7)]))
    tried: list[tuple[str, int]] = []

    def connect(addresses: list[tuple[str, int]]) -> tuple[HashStore, str]:
        tried.extend(addresses)
        return HashStore(), "10.0.0.7"

    monkeypatch.setattr(worker, "_connect", connect)
    monkeypatch.setattr(worker, "list_host_addresses", lambda _: ("10.0.0.7", "172.17.0.1"))
    worker.meet_ranks(mailbox, {"RANK": "1", "WORLD_SIZE": "2"})
    assert tried == [("10.0.0.5", 7)]


def test_silent_address_is_left_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()

    def open_store(host: str, port: int, *, is_server: bool) -> int:
        if port == ports[0]:
            end.wait()  # as torch waits for an answer
        return port

    monkeypatch.setattr(worker, "_CONNECT_SECONDS", 0.3)
    monkeypatch.setattr(worker, "open_store", open_store)
    address = "127.0.0.1", 0
    with socket.create_server(address) as silent, socket.create_server(address) as server:
        ports = [silent.getsockname()[1], server.getsockname()[1]]
        store, _ = worker._connect([("127.0.0.1", port) for port in ports])
    end.set()
    assert store == ports[1]


def list_outcomes(messages: list[Message]) -> list[Outcome]:
    return [message for message in messages if isinstance(message, Outcome)]


def test_rank_reports_hello_cases_and_done(
    single_rank: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Ranks on a CPU never call this.
    monkeypatch.setattr(torch.cuda, "_lazy_init", pytest.fail)
    cases = [fault_case("fine", number=0), fault_case("refusing"), fault_case("fine", number=1)]
    hello, *finished, done = run_here(tmp_path, make_job(cases, budget_seconds=0.1))
    assert isinstance(hello, Hello)
    assert hello.rank == 0
    assert hello.host == HOSTNAME
    assert hello.step == "17.3"
    facts = {"host", "versions", "variables", "process", "torch"}
    assert facts <= hello.environment.keys()
    assert isinstance(done, JobDone)
    outcomes = list_outcomes(finished)
    assert [outcome.status for outcome in outcomes] == ["ok", "skipped", "ok"]
    assert outcomes[0].samples.values
    assert outcomes[0].raw


def test_cases_after_the_run_budget_are_left_out(single_rank: None, tmp_path: Path) -> None:
    cases = [fault_case("fine", number=number) for number in range(2)]
    outcomes = list_outcomes(run_here(tmp_path, make_job(cases, run_seconds=0.0)))
    assert [outcome.status for outcome in outcomes] == ["skipped"] * 2
    assert [outcome.skip_reason for outcome in outcomes] == [SkipReason.OUT_OF_BUDGET] * 2


def test_step_is_freed_before_the_next_one(single_rank: None, tmp_path: Path) -> None:
    """A tangled step holds itself in a cycle, and fails where one before it is still alive."""
    cases = [fault_case("tangled", number=number) for number in range(2)]
    gc.disable()
    try:
        outcomes = list_outcomes(run_here(tmp_path, make_job(cases, budget_seconds=0.2)))
    finally:
        gc.enable()
    assert [outcome.status for outcome in outcomes] == ["ok", "ok"]


def test_slow_steps_are_not_a_hang(single_rank: None, tmp_path: Path) -> None:
    """Together, they take longer than the timeout."""
    load_target(EXPLAINER)  # may take seconds
    job = make_job([fault_case("slow")], budget_seconds=0.1)
    _, *messages, done = run_here(tmp_path, job, timeout_seconds=2.5)
    assert isinstance(done, JobDone)
    assert {type(message) for message in messages} == {StepBegun, Outcome}
    [outcome] = list_outcomes(messages)
    assert outcome.status == "ok"
    assert outcome.wall_seconds > 2.5


def test_targets_in_the_job_folder_shadow_nothing(
    single_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "tabnanny", raising=False)
    (tmp_path / "lonely.py").write_text(
        "import tabnanny\nfrom tests.support.faults import fine\n"
    )
    (tmp_path / "tabnanny.py").write_text("raise RuntimeError('shadowed')\n")
    case = make_case("custom.lonely", "lonely:fine", {})
    job = make_job([case], budget_seconds=0.1, path=str(tmp_path))
    [outcome] = list_outcomes(run_here(tmp_path / "attempt", job))
    assert outcome.status == "ok"


@pytest.mark.parametrize(
    ("message", "end"),
    [
        ("Unable to find address for: x", "(GLOO_SOCKET_IFNAME=x)"),
        ("no memory\nx", "no memory"),
    ],
)
def test_error_names_the_interface_of_gloo(message: str, end: str) -> None:
    error = RuntimeError(message)
    assert worker.summarize_error(error, {"GLOO_SOCKET_IFNAME": "x"}).endswith(end)


@pytest.mark.full
def test_failed_rank_reports_and_waits_for_its_end(tmp_path: Path) -> None:
    cases = [fault_case("fine"), fault_case("raising", rank=0)]
    job = make_job(cases, budget_seconds=0.2)
    Mailbox(tmp_path).put(JOB, msgspec.json.encode(job))
    command = [sys.executable, "-m", "parbench.bench.rank.worker"]
    messages: list[Message] = []

    def has_failed() -> bool:
        messages.extend(receive(tmp_path))
        return bool(messages) and isinstance(messages[-1], RankError)

    with subprocess.Popen(command, env=make_variables(tmp_path)) as process:
        try:
            wait_until(has_failed, TIMEOUT_SECONDS)
            assert process.poll() is None
        finally:
            process.kill()
    [error] = [message for message in messages if isinstance(message, RankError)]
    assert error.error == "RuntimeError: the roof is on fire"
    assert "in mischief" in error.stack


@pytest.mark.full
def test_hung_rank_reports_and_ends_itself(tmp_path: Path) -> None:
    """A driver that has vanished does not end the rank."""
    job = make_job([fault_case("asleep", rank=0, at=1)], timeout_seconds=8.0)
    Mailbox(tmp_path).put(JOB, msgspec.json.encode(job))
    script = (
        "from parbench.bench.rank import watchdog, worker\n"
        "watchdog._END_SECONDS = 0.5\n"
        "worker.main()"
    )
    completed = subprocess.run(
        [sys.executable, "-c", script], env=make_variables(tmp_path), timeout=120, check=False
    )
    assert completed.returncode == watchdog_module.HANG_EXIT_CODE
    *_, first, second = receive(tmp_path)
    assert isinstance(first, HangReport)
    assert isinstance(second, HangReport)
    assert first.groups == {}
    assert second.groups
    assert (second.index, second.phase) == (0, "check")
    assert "self.mischief()" in second.stack


class BusyMailbox(Mailbox):
    """A mailbox in which another rank has raised the alarm."""

    def get(self, name: str) -> bytes | None:
        return b"1 0"


def test_rank_reports_once_another_exceeds_its_deadline(tmp_path: Path) -> None:
    mailbox = BusyMailbox(tmp_path)
    watchdog = watchdog_module.Watchdog(0, mailbox, StepCounter(), tmp_path / "stack")
    watchdog.begin(0, 0.2)
    time.sleep(0.05)
    assert mailbox.receive() == [], "the first half of a block is never disturbed"
    wait_until(lambda: len(list((tmp_path / "mail" / "messages").glob("*.json"))) == 2)
    watchdog.close()
    reports = [message for _, message in mailbox.receive()]
    assert [type(report) for report in reports] == [HangReport] * 2


def test_time_budget_is_shared_by_weight() -> None:
    names = ("collective.barrier", "custom.step", "compute.gemm")
    cases = [make_case(name, "a:b", {}) for name in names]
    job = make_job(cases, blocks=[0, 1, 2, 0], budget_seconds=12.0)
    shares = worker.compute_block_shares(job)
    assert worker.compute_block_seconds(job, shares[0], 0.0) == pytest.approx(0.5)
    # Later cases share the time that the first one left.
    assert worker.compute_block_seconds(job, shares[1], 6.0) == pytest.approx(6.0 * 10 / 11.5)
    assert worker.compute_block_seconds(job, shares[2], 6.0) == pytest.approx(6.0 / 1.5)
    assert worker.compute_block_seconds(job, shares[3], 15.0) == 0.02


def test_many_blocks_are_shared_in_linear_time() -> None:
    case = make_case("collective.barrier", "a:b", {})
    began = time.process_time()
    shares = worker.compute_block_shares(make_job([case], blocks=[0] * 100_000))
    assert time.process_time() - began < 10.0
    assert shares[-2:] == [0.5, 1.0]


LOCAL = {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3"}


@pytest.mark.parametrize(
    ("variables", "is_bound"),
    [
        ({"PARBENCH_BIND": "1", **LOCAL}, True),
        ({"PARBENCH_BIND": "1", "LOCAL_RANK": "2"}, False),  # as under Kubernetes
        (LOCAL, False),
    ],
)
def test_rank_binds_itself_if_its_launcher_does_not(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], is_bound: bool
) -> None:
    """Three ranks of this host use two GPUs."""
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(worker, "bind_to_gpu", lambda *args: calls.append(args))
    monkeypatch.setattr(accelerator, "count_devices", lambda: 2)
    monkeypatch.setattr(
        accelerator, "get_properties", lambda index: SimpleNamespace(pci_address=f"gpu{index}")
    )
    worker.bind_to_near_cpus(variables)
    assert calls == ([(2, ["gpu0", "gpu1", "gpu0"])] if is_bound else [])
