"""The driver writes a record for every case, shares the budget and does not repeat failures."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from parbench.bench.launch import driver as module
from parbench.bench.launch import monitor as monitor_module
from parbench.bench.launch.control_channel import (
    ADDRESS_VARIABLE,
    DEVICE_VARIABLE,
    LEFT_OUT,
    Done,
    DriverServer,
    Job,
    Outcome,
)
from parbench.bench.launch.driver import Driver, remaining
from parbench.bench.machine.environment import RankPlace
from parbench.bench.machine.slurm_allocation import NodeLayout
from parbench.bench.plan.cases import Case
from parbench.bench.plan.plan import FaultSpec, Plan
from parbench.bench.results.records import Record, read_records
from parbench.bench.results.runs import create_run, load_run, open_writer
from tests.support.fakes import (
    FakeLauncher,
    FakeRank,
    case_order,
    make_fake_case,
    make_outcome,
    make_plan,
    make_status,
    time_limit,
    wait_until,
)
from tests.support.nvidia import H100, gpus, install

CASES = [make_fake_case(number) for number in range(4)]
Act = Callable[[FakeLauncher, FakeRank], None]
BuildStage = Callable[..., "Stage"]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(monitor_module, "_GRACE_SECONDS", 0.2)
    monkeypatch.setattr(monitor_module, "_SHORT_GRACE", 0.2)
    monkeypatch.setattr(monitor_module, "_TICK_SECONDS", 0.02)
    monkeypatch.setattr(module, "_FAREWELL_SECONDS", 1.0)
    monkeypatch.setattr(module, "_GONE_SECONDS", 1.0)
    monkeypatch.setattr(module, "order_of_visits", case_order)
    with time_limit(60):
        yield


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    wait_until(lambda: set(threading.enumerate()) <= before)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[DriverServer]]:
    """The servers that drivers open, closed at the end like at the end of a process."""
    opened: list[DriverServer] = []

    def open_server(*hosts: str) -> DriverServer:
        opened.append(DriverServer(*hosts))
        return opened[-1]

    monkeypatch.setattr(module, "DriverServer", open_server)
    yield opened
    for server in opened:
        server.close()


class Stage:
    """A run folder, the launcher of its fake ranks, and a progress display that keeps its calls.

    The gangs do ``acts`` in turn, the last act again and again.
    """

    def __init__(self, out: Path, run_plan: Plan, *acts: Act) -> None:
        self.path = create_run(out, run_plan, "0.1.0")[0]
        self.acts = acts or (self.complete,)
        self.gangs: list[FakeLauncher] = []
        self.numbers: list[int] = []
        self.jobs: list[Job] = []
        self.events: list[tuple[object, ...]] = []
        self.messages: list[str] = []
        self.hello: Callable[[int, int], dict[str, Any]] = lambda gang, rank: {}
        self.can_restart = True
        self.host = "127.0.0.1"
        self.facts: dict[str, Any] = {}

    def launch(self, number: int, of: int, cases: int) -> None:
        self.events.append(("launch", number, of, cases))

    def visit(self, make_fake_case: Case, done: float) -> None:
        self.events.append(("case", make_fake_case.params["number"]))

    def tell(self, sentence: str) -> None:
        self.messages.append(sentence)

    def record(self, record: Record) -> None:
        self.events.append(("record", record.case.params["number"], record.status))
        assert self.records()[-1].case == record.case, "each record is on disk at once"

    def start(self, number: int, variables: Mapping[str, str]) -> FakeLauncher:
        gang = FakeLauncher(can_restart=self.can_restart)
        size = load_run(self.path).info.plan.nproc
        count = len(self.gangs)
        ranks = [FakeRank(variables, rank, size, **self.hello(count, rank)) for rank in range(size)]
        self.gangs.append(gang)
        self.numbers.append(number)
        self.addresses, self.device = variables[ADDRESS_VARIABLE], variables[DEVICE_VARIABLE]
        gang.run(ranks, self.acts[min(count, len(self.acts) - 1)])
        return gang

    def drive(
        self, max_cases: int | None = None, *, fills: bool = False
    ) -> list[tuple[int, object, str]]:
        """Drive the pending cases; return launch, number and status of all records by now."""
        run = load_run(self.path)
        pending = remaining(run, fills=fills)[:max_cases]
        with open_writer(self.path) as writer:
            driver = Driver(
                run,
                writer,
                self.start,
                self,
                hosts=(self.host,),
                facts=self.facts,
                began=time.monotonic(),
            )
            driver.drive(pending)
        return [(row.launch, row.case.params["number"], row.status) for row in self.records()]

    def records(self) -> list[Record]:
        return list(read_records(self.path / "records.jsonl"))

    def notes(self) -> list[list[str]]:
        return [record.notes for record in self.records()]

    def environment(self) -> dict[str, Any]:
        environment = load_run(self.path).info.environment
        assert environment is not None
        return environment

    def complete(self, gang: FakeLauncher, rank: FakeRank) -> None:
        """Do the whole job and keep it."""
        rank.hello()
        job = rank.job()
        if rank.rank == 0:
            self.jobs.append(job)
        for index in range(len(job.plan.cases)):
            rank.start(index)
            if rank.rank == 0:
                rank.finish(index)
        rank.say(Done())


def report(*outcomes: Outcome) -> Act:
    """Return an act whose visits end with these outcomes in turn."""

    def act(gang: FakeLauncher, rank: FakeRank) -> None:
        rank.hello()
        rank.work(lambda index, _: outcomes[index])

    return act


def act_at(number: int, act_in_case: Act) -> Act:
    """Return an act that completes all cases until one, where it does ``act_in_case``."""

    def act(gang: FakeLauncher, rank: FakeRank) -> None:
        rank.hello()
        for index, planned in enumerate(rank.job().plan.cases):
            rank.start(index)
            if planned.params["number"] == number:
                act_in_case(gang, rank)
                return
            if rank.rank == 0:
                rank.finish(index)
        rank.say(Done())

    return act


def stay_silent(gang: FakeLauncher, rank: FakeRank) -> None:
    rank.line.hear()  # until the driver hangs up


def kill_rank_1(gang: FakeLauncher, rank: FakeRank) -> None:
    if rank.rank == 1:
        gang.known_exits = {1: -9}
        rank.die()
    stay_silent(gang, rank)


def die_at(number: int) -> Act:
    return act_at(number, kill_rank_1)


def do_not_start(gang: FakeLauncher, rank: FakeRank) -> None:
    """End without a message."""


@pytest.fixture
def stage(tmp_path: Path) -> BuildStage:
    return lambda cases, *acts, **fields: Stage(tmp_path, make_plan(cases, **fields), *acts)


def on_nodes(*hosts: str) -> Callable[[int, int], dict[str, Any]]:
    def hello(gang: int, rank: int) -> dict[str, Any]:
        place = RankPlace(host=hosts[rank], cpus=(0,), numa_nodes=(0,))
        return {"host": hosts[rank], "place": place, "meeting": "" if rank else f"n1:{gang}"}

    return hello


def test_drive_records_each_case_of_each_launch(stage: BuildStage) -> None:
    run = stage(CASES[:2], launches=2)
    assert run.drive() == [(0, 0, "ok"), (0, 1, "ok"), (1, 0, "ok"), (1, 1, "ok")]
    assert run.numbers == [0, 1]
    assert [gang.told_to_end for gang in run.gangs] == [[0, 1], [0, 1]]
    events = [("case", 0), ("record", 0, "ok"), ("case", 1), ("record", 1, "ok")]
    assert run.events == [("launch", 1, 2, 2), *events, ("launch", 2, 2, 2), *events]
    assert len(run.drive()) == 4
    assert len(run.gangs) == 2, "a complete run starts no ranks"


def test_drive_records_seconds_and_load_of_launches(stage: BuildStage) -> None:
    run = stage(CASES[:2], launches=4)
    run.acts = (run.complete, die_at(0), run.complete)
    run.hello = lambda gang, rank: {"host": "n2"} if (gang, rank) == (3, 1) else {}
    began = time.monotonic()
    run.drive(6)
    run.drive()
    launches = load_run(run.path).info.launches
    assert [entry.launch for entry in launches] == [0, 1, 1, 2, 3]
    assert 0 < sum(entry.seconds for entry in launches) <= time.monotonic() - began
    assert [entry.load is None for entry in launches] == [False, False, False, True, False]
    cores_known = [entry.load.other_cores is not None for entry in launches if entry.load]
    assert cores_known == [True, False, True, True], "a dead rank does not report its own use"


def test_record_holds_the_outcome_of_the_ranks(stage: BuildStage) -> None:
    full = make_outcome(
        2e-3,
        details={"bytes": 4},
        notes=["of the case"],
        raw=b"npz",
        timeline=b"spans",
        wall_seconds=0.25,
    )
    not_finite = make_outcome(details={"loss": float("nan"), "limit": float("inf")})
    refused = Outcome(status="skipped", reason="no such dtype")
    run = stage(CASES[:3], report(full, not_finite, refused), notes=("of the plan",))
    run.drive()
    record, unknown, skipped = run.records()
    assert record.case == CASES[0]
    assert record.samples.values == full.seconds
    assert record.metrics["time"].value == 2e-3
    assert record.noise is not None
    assert (record.stop, record.check, record.details) == (full.stop, full.check, full.details)
    assert record.notes == ["of the plan", "of the case"]
    assert record.seconds == 0.25
    assert (record.world.size, record.world.nodes, record.world.backend) == (2, 1, "gloo")
    [samples] = (run.path / "samples").iterdir()
    assert (samples.name, samples.read_bytes()) == (f"{CASES[0].id}-0.npz", b"npz")
    assert b"spans" in [file.read_bytes() for file in run.path.rglob("*") if file.is_file()]
    assert unknown.details == {"loss": None, "limit": None}
    text = (run.path / "records.jsonl").read_text()
    assert "NaN" not in text
    assert "nfinity" not in text
    assert (skipped.status, skipped.reason, skipped.metrics) == ("skipped", "no such dtype", {})


def test_dead_rank_ends_its_case_only(stage: BuildStage) -> None:
    run = stage(CASES, die_at(1))
    assert run.drive() == [(0, 0, "ok"), (0, 1, "failed"), (0, 2, "ok"), (0, 3, "ok")]
    failed = run.records()[1]
    assert failed.reason == "rank 1 died: ended by SIGKILL"
    assert [state.state for state in failed.ranks] == ["alive", "died: ended by SIGKILL"]
    assert failed.metrics == {}
    assert run.numbers == [0, 1]
    assert run.gangs[0].told_to_end == [0, 1]

    last = stage(CASES[:2], die_at(1))
    assert last.drive() == [(0, 0, "ok"), (0, 1, "failed")]
    assert last.numbers == [0], "no case is left for new ranks"


def set_visits(monkeypatch: pytest.MonkeyPatch, *visits: int) -> None:
    def order(cases: list[Case], *_: object) -> tuple[list[int], list[int]]:
        return [place for place in visits if place < len(cases)], []

    monkeypatch.setattr(module, "order_of_visits", order)


def partial(*seconds: float, more: bool = True) -> Outcome:
    visits = [1] * len(seconds)
    return msgspec.structs.replace(make_outcome(), seconds=list(seconds), visits=visits, more=more)


def test_case_is_recorded_with_its_last_visit(
    stage: BuildStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_visits(monkeypatch, 0, 1, 1, 0)
    first, second = partial(1.0, 1.0, more=False), partial(2.0, 2.0, more=False)
    run = stage(CASES[:2], report(partial(1.0), partial(2.0), second, first))
    assert run.drive() == [(0, 1, "ok"), (0, 0, "ok")]
    assert [record.samples.visits for record in run.records()] == [[1, 1], [1, 1]]
    kinds = [event[0] for event in run.events]
    assert kinds == ["launch", "case", "case", "case", "record", "case", "record"]

    wrong = Outcome(status="wrong")
    run = stage(CASES[:2], report(partial(1.0), wrong, wrong, first))
    assert run.drive() == [(0, 1, "wrong"), (0, 0, "ok")], "a wrong case has no second visit"


@pytest.mark.parametrize(
    ("can_restart", "seconds", "stop"),
    [(True, [1e-3] * 20, "precision"), (False, [7.0], "budget")],
)
def test_interrupted_case_is_measured_again_or_kept(
    stage: BuildStage,
    monkeypatch: pytest.MonkeyPatch,
    servers: list[DriverServer],
    can_restart: bool,
    seconds: list[float],
    stop: str,
) -> None:
    def die_in_second_visit(gang: FakeLauncher, rank: FakeRank) -> None:
        rank.hello()
        rank.job()
        rank.start(0)
        if rank.rank == 0:
            rank.finish(0, partial(7.0))
        rank.start(1)
        kill_rank_1(gang, rank)

    set_visits(monkeypatch, 0, 1)
    run = stage(CASES[:2])
    run.acts, run.can_restart = (die_in_second_visit, run.complete), can_restart
    assert run.drive() == [(0, 1, "failed"), (0, 0, "ok")]
    record = run.records()[1]
    assert (record.samples.values, record.stop) == (seconds, stop)


@pytest.mark.parametrize(("interval", "expected"), [(0.0, [[1.0], [1.0], [2.0]]), (60.0, [])])
def test_partial_records_are_written_during_a_launch(
    stage: BuildStage,
    monkeypatch: pytest.MonkeyPatch,
    interval: float,
    expected: list[list[float]],
) -> None:
    set_visits(monkeypatch, 0, 1, 0, 1)
    monkeypatch.setattr(module, "_KEPT_SECONDS", interval)
    first, second = partial(1.0, 1.0, more=False), partial(2.0, 2.0, more=False)
    run = stage(CASES[:2], report(partial(1.0), partial(2.0), first, second))
    on_disk: list[list[list[float]]] = []

    def read_samples(make_fake_case: Case, done: float) -> None:
        on_disk.append([record.samples.values for record in run.records()])

    monkeypatch.setattr(run, "visit", read_samples)
    run.drive()
    assert on_disk[2] == expected
    complete = load_run(run.path)
    assert [record.samples.values for record in complete.records] == [[1.0, 1.0], [2.0, 2.0]]
    assert remaining(complete) == ()


def test_lingering_process_is_waited_for_and_noted(stage: BuildStage) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        run = stage(CASES[:2], launches=2)
        run.acts = (die_at(0), run.complete)
        run.hello = lambda gang, rank: {
            "pid": process.pid if (gang, rank) == (0, 1) else os.getpid()
        }
        began = time.monotonic()
        run.drive()
        assert time.monotonic() - began > 1.0
        process.kill()
    without, [note], *later = run.notes()
    assert [without, *later] == [[], [], []]
    assert f"rank 1 (process {process.pid} is sleeping)" in note


def test_remote_rank_lingers_while_connected(
    stage: BuildStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeRank, "die", lambda rank: None)
    run = stage(CASES[:1], launches=2)
    run.hello = lambda gang, rank: {"host": "far", "pid": 1} if rank else {}
    run.drive()
    assert "rank 1 (far) (process 1 is connected)" in run.notes()[-1][0]


def test_gpu_memory_left_by_ranks_is_noted(
    stage: BuildStage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def set_used_mib(gpu0: int, gpu1: int) -> None:
        used = {"gpu0": {"memory.used": str(gpu0)}, "gpu1": {"memory.used": str(gpu1)}}
        monkeypatch.setenv("PATH", install(tmp_path, gpus(H100, 2, **used))["PATH"])

    def use_memory(gang: FakeLauncher, rank: FakeRank) -> None:
        if rank.rank == 0:  # GPU 1 belongs to another job
            set_used_mib([1124, 3172, 3172][len(run.jobs)], 9000)
        run.complete(gang, rank)

    uuid = gpus(H100, 1)[0]["uuid"]
    set_used_mib(1024, 1024)
    run = stage(CASES[:1], use_memory, launches=3, device="cuda")
    place = RankPlace(host="here", cpus=(), numa_nodes=(), gpu=uuid)
    run.hello = lambda gang, rank: {"place": place}
    run.drive()
    *without, [note] = run.notes()
    assert without == [[], []]
    assert note.endswith(f"2.0 GiB on {uuid}")


def test_failed_case_is_skipped_in_later_launches(stage: BuildStage) -> None:
    run = stage(CASES[:2], die_at(0), launches=2)
    assert run.drive() == [(0, 0, "failed"), (0, 1, "ok"), (1, 0, "skipped"), (1, 1, "ok")]
    assert "failed in launch 1 (rank 1 died: ended by SIGKILL)" in run.records()[2].reason

    run = stage(CASES[:1], die_at(0), launches=3)
    assert run.drive() == [(0, 0, "failed"), (1, 0, "skipped"), (2, 0, "skipped")]
    assert run.numbers == [0], "a launch without a case starts no ranks"

    wrong = stage(CASES[:1], report(Outcome(status="wrong", reason="off by one")), launches=2)
    assert wrong.drive() == [(0, 0, "wrong"), (1, 0, "skipped")]


def test_failed_start_is_retried_once(stage: BuildStage) -> None:
    run = stage(CASES[:2], launches=2)
    run.acts = (do_not_start, run.complete, do_not_start, run.complete)
    assert {status for _, _, status in run.drive()} == {"ok"}
    assert run.numbers == [0, 1, 2, 3]

    run = stage(CASES[:2], do_not_start, launches=2)
    assert [status for _, _, status in run.drive()] == ["failed"] * 2 + ["skipped"] * 2
    assert "ended before every rank had started" in run.records()[0].reason
    assert run.numbers == [0, 1]


def test_external_ranks_are_not_restarted_or_closed(
    stage: BuildStage, servers: list[DriverServer]
) -> None:
    """Their launcher would end the driver with the first rank, before its report is written."""

    def raise_in_rank_1(gang: FakeLauncher, rank: FakeRank) -> None:
        if rank.rank == 1:
            rank.break_(0)
        stay_silent(gang, rank)

    raises = act_at(0, raise_in_rank_1)
    for act, records in (
        (die_at(1), [(0, 0, "ok"), (0, 1, "failed")]),
        (do_not_start, [(0, number, "failed") for number in range(4)]),
        (raises, [(0, 0, "failed")]),
    ):
        run = stage(CASES, act)
        run.can_restart = False
        assert run.drive() == records
        assert run.numbers == [0]
    assert not run.gangs[0].ended()
    servers[-1].close()
    wait_until(run.gangs[0].ended)
    own = stage(CASES[:1], raises)
    assert own.drive() == [(0, 0, "failed")]
    wait_until(own.gangs[0].ended)


def test_job_holds_plan_hosts_and_meeting_point(stage: BuildStage) -> None:
    injection = FaultSpec(kind="late", rank=1, amount=0.1, text="late:1:100ms")
    run = stage(CASES[:2], timeout_seconds=12.0, path="/home/me", injection=injection)
    run.hello, run.host = on_nodes("n1", "n2"), "localhost"
    run.facts = {"slurm": {"job": "17"}}
    run.drive()
    [job] = run.jobs
    run_plan = load_run(run.path).info.plan
    assert job.plan == msgspec.structs.replace(run_plan, cases=tuple(CASES[:2]))
    assert (job.hosts, job.meeting) == (("n1", "n2"), "n1:0")
    assert run.addresses.startswith("127.0.0.1:"), "the server listens on the given host"
    assert run.records()[0].world.nodes == 2
    environment = run.environment()
    assert environment["hosts"] == ["n1", "n2"]
    assert environment["slurm"] == {"job": "17"}
    assert environment["locality"]["0-1"] == "other node"


@pytest.mark.parametrize(("device", "locality"), [("cpu", None), ("cuda", "NVLink")])
def test_gpu_links_are_recorded_on_cuda(
    stage: BuildStage, monkeypatch: pytest.MonkeyPatch, device: str, locality: str | None
) -> None:
    monkeypatch.setattr(module, "gpu_links", lambda environ: {frozenset("ab"): "NVLink"})
    run = stage(CASES[:1], device=device)
    run.hello = lambda gang, rank: {
        "place": RankPlace(host="n1", cpus=(0, 1), numa_nodes=(), gpu="ab"[rank])
    }
    run.drive()
    assert run.environment()["locality"] == {"0-1": locality}
    assert run.device == device


def test_weights_follow_step_cost_then_precision(stage: BuildStage) -> None:
    names = ["collective.all_reduce", "p2p.sendrecv", "workload.ddp", "custom.mystep"]
    cases = [make_fake_case(number, name) for number, name in enumerate(names)]
    run = stage(cases)
    run.drive()
    assert run.jobs[0].weights == [1.0, 1.0, 20.0, 10.0]

    noisy = msgspec.structs.replace(make_outcome(), seconds=[1e-3, 1e-3, 9e-3, 9e-3] * 5)
    run = stage(cases, launches=2)
    run.acts = (
        report(make_outcome(), noisy, make_outcome(), Outcome(status="skipped")),
        run.complete,
    )
    run.drive()
    assert run.jobs[0].weights == [0.2, 5.0, 4.0, 10.0]


def test_budget_is_shared_by_the_remaining_launches(stage: BuildStage) -> None:
    run = stage(CASES[:1], launches=3, budget_seconds=90.0)
    run.drive()
    assert [job.budget_seconds for job in run.jobs] == pytest.approx([30, 45, 90], abs=3)
    assert [job.run_seconds for job in run.jobs] == pytest.approx([95, 95, 95], abs=3)
    assert run.messages == []

    run = stage(CASES[:2], launches=2, budget_seconds=40.0)
    run.acts = (die_at(0), run.complete)
    run.drive()
    restarted = run.jobs[0]
    assert restarted.plan.cases == (CASES[1],)
    assert restarted.budget_seconds == pytest.approx(20, abs=2), "the rest of its launch"
    assert restarted.run_seconds == pytest.approx(44, abs=3)


@pytest.fixture
def cases_of_20_seconds(monkeypatch: pytest.MonkeyPatch) -> Act:
    """An act whose cases take 20 s each by their records and by the driver's clock."""
    offset_seconds, keep_record = [0.0], Stage.record

    def advance(run: Stage, record: Record) -> None:
        keep_record(run, record)
        offset_seconds[0] += record.seconds

    monkeypatch.setattr(Stage, "record", advance)
    clock = SimpleNamespace(
        monotonic=lambda: time.monotonic() + offset_seconds[0], sleep=time.sleep
    )
    monkeypatch.setattr(module, "time", clock)
    return report(*[make_outcome(wall_seconds=20.0)] * len(CASES))


def test_launches_beyond_the_budget_are_left_out(
    stage: BuildStage, cases_of_20_seconds: Act
) -> None:
    run = stage(CASES[:2], cases_of_20_seconds, launches=5, budget_seconds=120.0)
    run.drive()
    assert [record.reason for record in run.records()] == [""] * 6 + [LEFT_OUT] * 4
    launches = [event[1:3] for event in run.events if event[0] == "launch"]
    assert launches == [(1, 5), (2, 5), (3, 5)]
    [message] = run.messages
    assert "3 of 5 launches" in message
    assert "--budget" in message


def test_fill_measures_what_the_budget_left_out(
    stage: BuildStage, cases_of_20_seconds: Act
) -> None:
    run = stage(CASES[:2], cases_of_20_seconds, launches=3, budget_seconds=80.0)
    assert [status for _, _, status in run.drive()] == ["ok"] * 4 + ["skipped"] * 2
    limited = load_run(run.path)
    assert remaining(limited) == ()
    assert remaining(limited, fills=True) == ((2, CASES[0]), (2, CASES[1]))
    run.drive(fills=True)
    filled = load_run(run.path)
    assert {record.status for record in filled.records} == {"ok"}
    assert remaining(filled, fills=True) == ()


def test_spent_budget_leaves_later_launches_out(stage: BuildStage) -> None:
    run = stage(CASES[:2], launches=2, budget_seconds=1e-6)
    assert run.drive() == [(0, 0, "ok"), (0, 1, "ok"), (1, 0, "skipped"), (1, 1, "skipped")]
    assert {record.reason for record in run.records()[2:]} == {LEFT_OUT}
    assert [(job.budget_seconds, job.run_seconds) for job in run.jobs] == [(0.0, 0.0)]

    skipped = Outcome(status="skipped", reason=LEFT_OUT)
    run = stage(CASES[:2], report(skipped, skipped), launches=2, budget_seconds=1e-6)
    run.drive()
    assert run.messages == [], "a launch of unknown cost is not announced"


def test_resumed_run_measures_the_pending_cases(stage: BuildStage) -> None:
    run = stage(CASES[:3], launches=2)
    (run.path / "logs" / "gang-0").mkdir()
    run.drive(2)
    assert run.drive() == [(launch, n, "ok") for launch in range(2) for n in range(3)]
    job_cases = [[entry.params["number"] for entry in job.plan.cases] for job in run.jobs]
    assert job_cases == [[0, 1], [2], [0, 1, 2]]
    assert run.numbers == [1, 1, 2], "the existing log folder is not reused"
    launches = [event for event in run.events if event[0] == "launch"]
    assert launches == [("launch", 1, 2, 2), ("launch", 1, 2, 1), ("launch", 2, 2, 3)]

    run = stage(CASES[:2], die_at(0), launches=2)
    run.drive(1)
    assert run.drive() == [(0, 0, "failed"), (0, 1, "ok"), (1, 0, "skipped"), (1, 1, "ok")]


def test_environment_is_split_by_rank_and_launch(stage: BuildStage) -> None:
    kernels = ["6.1", "6.1", "6.2"]
    run = stage(CASES[:1], launches=3)
    run.hello = lambda gang, rank: {
        "environment": {
            "host": {"name": "node-a", "kernel": kernels[gang]},
            "process": {"cores": 2, "affinity": rank},
        }
    }
    run.drive(2)
    run.drive()
    by_rank = {f"rank {rank}": {"process": {"affinity": rank}} for rank in range(2)}
    changed = {"changed": {"host.kernel": ["6.1", "6.2"]}}
    assert [record.environment for record in run.records()] == [
        by_rank,
        by_rank,
        {**changed, **by_rank},
    ]
    assert run.environment() == {
        "host": {"name": "node-a", "kernel": "6.1"},
        "process": {"cores": 2},
    }


def test_unexpected_rank_layout_is_noted(stage: BuildStage) -> None:
    spread = NodeLayout(nodes=1, ntasks_per_node=2)
    run = stage(CASES[:2], die_at(1), spread=spread, notes=("of the plan",))
    run.hello = on_nodes("n1", "n2")
    assert run.drive() == [(0, 0, "ok"), (0, 1, "failed")]
    for plan_note, note in run.notes():
        assert plan_note == "of the plan"
        assert note.endswith("1 on n1, 1 on n2")


@pytest.mark.full
def test_silent_host_is_named_and_not_retried(
    stage: BuildStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RETRY_SECONDS", 0.5)

    def answer_from_rank_0(gang: FakeLauncher, rank: FakeRank) -> None:
        if rank.rank == 0:
            rank.answer(make_status())
        wait_until(lambda: gang.told_to_end is not None)

    run = stage(CASES[:3], act_at(1, answer_from_rank_0), stay_silent, timeout_seconds=1.0)
    run.hello = on_nodes("n1", "n2")
    assert run.drive() == [(0, 0, "ok"), (0, 1, "hang"), (0, 2, "failed")]
    _, hung, rest = run.records()
    assert hung.reason == "no end within 1 s: rank 1 (n2) did not arrive"
    assert "did not start within" in rest.reason
    assert "n2 did not answer" in rest.reason
    assert len(run.gangs) == 2
