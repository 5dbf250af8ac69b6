"""The driver: a record for every case, budget shared, what broke not tried again, nothing done twice."""

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
from fakes import FakeGang, FakeRank, case, in_turn, outcome, plan, wait_until, where, within
from nvidia import H100, gpus, install

from parbench.bench.launch import driver as module
from parbench.bench.launch import monitor as watch_module
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

CASES = [case(number) for number in range(4)]
Act = Callable[[FakeGang, FakeRank], None]
Build = Callable[..., "Stage"]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(watch_module, "_GRACE_SECONDS", 0.2)
    monkeypatch.setattr(watch_module, "_SHORT_GRACE", 0.2)
    monkeypatch.setattr(watch_module, "_TICK_SECONDS", 0.02)
    monkeypatch.setattr(module, "_FAREWELL_SECONDS", 1.0)
    monkeypatch.setattr(module, "order_of_visits", in_turn)
    with within(60):
        yield


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    wait_until(lambda: set(threading.enumerate()) <= before)


@pytest.fixture
def hubs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[DriverServer]]:
    """The hubs that drivers open, closed at last as a process's end would."""
    opened: list[DriverServer] = []

    def remember(*hosts: str) -> DriverServer:
        opened.append(DriverServer(*hosts))
        return opened[-1]

    monkeypatch.setattr(module, "DriverServer", remember)
    yield opened
    for hub in opened:
        hub.close()


class Stage:
    """A run folder, what starts its gangs of fake ranks, and an audience that remembers.

    ``acts`` are done by the gangs in turn, the last one again and again.
    """

    def __init__(self, out: Path, asked: Plan, *acts: Act) -> None:
        self.path = create_run(out, asked, "0.1.0")[0]
        self.acts = acts or (self.fine,)
        self.gangs: list[FakeGang] = []
        self.numbers: list[int] = []
        self.jobs: list[Job] = []
        self.told: list[tuple[object, ...]] = []
        self.sentences: list[str] = []
        self.hello: Callable[[int, int], dict[str, Any]] = lambda gang, rank: {}
        self.can_restart = True
        self.host = "127.0.0.1"
        self.facts: dict[str, Any] = {}

    def launch(self, number: int, of: int, cases: int) -> None:
        self.told.append(("launch", number, of, cases))

    def visit(self, case: Case, done: float) -> None:
        self.told.append(("case", case.params["number"]))

    def tell(self, sentence: str) -> None:
        self.sentences.append(sentence)

    def record(self, record: Record) -> None:
        self.told.append(("record", record.case.params["number"], record.status))
        assert self.records()[-1].case == record.case, "each record is on disk at once"

    def start(self, number: int, variables: Mapping[str, str]) -> FakeGang:
        gang = FakeGang(can_restart=self.can_restart)
        size = load_run(self.path).info.plan.nproc
        count = len(self.gangs)
        ranks = [FakeRank(variables, rank, size, **self.hello(count, rank)) for rank in range(size)]
        self.gangs.append(gang)
        self.numbers.append(number)
        self.addresses, self.device = variables[ADDRESS_VARIABLE], variables[DEVICE_VARIABLE]
        gang.run(ranks, self.acts[min(count, len(self.acts) - 1)])
        return gang

    def drive(self, most: int | None = None, *, fills: bool = False) -> list[tuple[int, object, str]]:
        """Drive what is pending, at most so many; return launch, number and status of the records written by now."""
        run = load_run(self.path)
        with open_writer(self.path) as writer:
            driver = Driver(run, writer, self.start, self, hosts=(self.host,), facts=self.facts, began=time.monotonic())
            driver.drive(remaining(run, fills=fills)[:most])
        return [(record.launch, record.case.params["number"], record.status) for record in self.records()]

    def records(self) -> list[Record]:
        return list(read_records(self.path / "records.jsonl"))

    def environment(self) -> dict[str, Any]:
        found = load_run(self.path).info.environment
        assert found is not None
        return found

    def fine(self, gang: FakeGang, rank: FakeRank) -> None:
        """Do the whole job, and remember it."""
        rank.hello()
        heard = rank.job()
        if rank.rank == 0:
            self.jobs.append(heard)
        for index in range(len(heard.plan.cases)):
            rank.start(index)
            if rank.rank == 0:
                rank.finish(index)
        rank.say(Done())


def tells(*outcomes: Outcome) -> Act:
    """Return an act whose cases have these outcomes in turn."""

    def act(gang: FakeGang, rank: FakeRank) -> None:
        rank.hello()
        rank.work(lambda index, asked: outcomes[index])

    return act


def at_case(number: int, do: Act) -> Act:
    """Return an act that is fine until the case of a number, if the job has it, and then does something else."""

    def act(gang: FakeGang, rank: FakeRank) -> None:
        rank.hello()
        for index, asked in enumerate(rank.job().plan.cases):
            rank.start(index)
            if asked.params["number"] == number:
                do(gang, rank)
                return
            if rank.rank == 0:
                rank.finish(index)
        rank.say(Done())

    return act


def breaks_at(number: int) -> Act:
    """Return an act in which rank 1 dies in the case of a number."""

    def die(gang: FakeGang, rank: FakeRank) -> None:
        if rank.rank == 1:
            gang.known_exits = {1: -9}
            rank.die()
        says_nothing(gang, rank)

    return at_case(number, die)


def says_nothing(gang: FakeGang, rank: FakeRank) -> None:
    rank.line.hear()  # until the driver hangs up


def does_not_start(gang: FakeGang, rank: FakeRank) -> None:
    """End without a word."""


@pytest.fixture
def stage(tmp_path: Path) -> Build:
    return lambda cases, *acts, **more: Stage(tmp_path, plan(cases, **more), *acts)


def test_every_case_of_every_launch_has_a_record_and_every_launch_new_ranks(stage: Build) -> None:
    built = stage(CASES[:2], launches=2)
    assert built.drive() == [(0, 0, "ok"), (0, 1, "ok"), (1, 0, "ok"), (1, 1, "ok")]
    assert built.numbers == [0, 1]
    assert [gang.told_to_end for gang in built.gangs] == [[0, 1], [0, 1]]
    each = [("case", 0), ("record", 0, "ok"), ("case", 1), ("record", 1, "ok")]
    assert built.told == [("launch", 1, 2, 2), *each, ("launch", 2, 2, 2), *each]
    assert len(built.drive()) == 4
    assert len(built.gangs) == 2, "nothing pending starts nothing"


def test_what_each_launch_took_and_what_else_its_host_did_is_kept_also_of_one_gone_on_with(stage: Build) -> None:
    built = stage(CASES[:2], launches=4)
    built.acts = (built.fine, breaks_at(0), built.fine, built.fine, built.fine)
    built.hello = lambda gang, rank: {"host": "elsewhere"} if (gang, rank) == (3, 1) else {}
    began = time.monotonic()
    built.drive(6)
    built.drive()
    found = load_run(built.path).info.launches
    assert [one.launch for one in found] == [0, 1, 1, 2, 3]
    assert 0 < sum(one.seconds for one in found) <= time.monotonic() - began
    assert [one.load is None for one in found] == [False, False, False, True, False], "of one host alone"
    known = [one.load.other_cores is not None for one in found if one.load]
    assert known == [True, False, True, True], "a rank that died does not tell what it took"


def test_a_record_holds_what_the_ranks_saw(stage: Build) -> None:
    said = outcome(2e-3, details={"bytes": 4}, notes=["of the case"], raw=b"npz", timeline=b"seen", wall_seconds=0.25)
    odd = outcome(details={"loss": float("nan"), "limit": float("inf")})
    refused = Outcome(status="skipped", reason="no such dtype")
    built = stage(CASES[:3], tells(said, odd, refused), notes=("of the plan",))
    built.drive()
    record, unknown, skipped = built.records()
    assert record.case == CASES[0]
    assert record.samples.values == said.seconds
    assert record.metrics["time"].value == 2e-3
    assert record.noise is not None
    assert (record.stop, record.check, record.details) == (said.stop, said.check, said.details)
    assert record.notes == ["of the plan", "of the case"]
    assert record.seconds == 0.25
    assert (record.world.size, record.world.nodes, record.world.backend) == (2, 1, "gloo")
    [samples] = (built.path / "samples").iterdir()  # what has none leaves no file of them
    assert (samples.name, samples.read_bytes()) == (f"{CASES[0].id}-0.npz", b"npz")
    assert b"seen" in [file.read_bytes() for file in built.path.rglob("*") if file.is_file()]
    assert unknown.details == {"loss": None, "limit": None}
    text = (built.path / "records.jsonl").read_text()
    assert "NaN" not in text
    assert "nfinity" not in text
    assert (skipped.status, skipped.reason, skipped.metrics) == ("skipped", "no such dtype", {})


def test_a_rank_that_dies_ends_its_case_and_a_new_gang_does_the_rest(stage: Build) -> None:
    built = stage(CASES, breaks_at(1))
    assert built.drive() == [(0, 0, "ok"), (0, 1, "failed"), (0, 2, "ok"), (0, 3, "ok")]
    broken = built.records()[1]
    assert broken.reason == "rank 1 died: ended by SIGKILL"
    assert [state.state for state in broken.ranks] == ["alive", "died: ended by SIGKILL"]
    assert broken.metrics == {}
    assert built.numbers == [0, 1]
    assert built.gangs[0].told_to_end == [0, 1]

    last = stage(CASES[:2], breaks_at(1))
    assert last.drive() == [(0, 0, "ok"), (0, 1, "failed")]
    assert last.numbers == [0], "nothing is left for a new gang"


def visited(*visits: int) -> Callable[..., tuple[list[int], list[int]]]:
    return lambda cases, *asked: ([place for place in visits if place < len(cases)], [])


def so_far(*seconds: float, more: bool = True) -> Outcome:
    return msgspec.structs.replace(outcome(), seconds=list(seconds), visits=[1] * len(seconds), more=more)


def test_a_case_has_its_record_with_its_last_visit_and_what_was_seen_until_a_gang_breaks_is_not_lost(
    stage: Build, monkeypatch: pytest.MonkeyPatch, hubs: list[DriverServer]
) -> None:
    """A new gang measures it again from the start; where none can be started, what was seen counts."""
    monkeypatch.setattr(module, "order_of_visits", visited(0, 1, 1, 0))
    fine = tells(so_far(1.0), so_far(2.0), so_far(2.0, 2.0, more=False), so_far(1.0, 1.0, more=False))
    built = stage(CASES[:2], fine)
    assert built.drive() == [(0, 1, "ok"), (0, 0, "ok")]
    assert [record.samples.visits for record in built.records()] == [[1, 1], [1, 1]]
    assert [told[0] for told in built.told] == ["launch", "case", "case", "case", "record", "case", "record"]

    # the second case ends with its first visit, and is not visited again
    wrong = Outcome(status="wrong")
    built = stage(CASES[:2], tells(so_far(1.0), wrong, wrong, so_far(1.0, 1.0, more=False)))
    assert built.drive() == [(0, 1, "wrong"), (0, 0, "ok")]

    def dies(gang: FakeGang, rank: FakeRank) -> None:
        rank.hello()
        rank.job()
        rank.start(0)
        if rank.rank == 0:
            rank.finish(0, so_far(7.0))
        rank.start(1)
        if rank.rank == 1:
            gang.known_exits = {1: -9}
            rank.die()
        says_nothing(gang, rank)

    monkeypatch.setattr(module, "order_of_visits", visited(0, 1))
    for can_restart, seconds, stop in ((True, [1e-3] * 20, "precision"), (False, [7.0], "budget")):
        built = stage(CASES[:2], dies)
        built.acts, built.can_restart = (dies, built.fine), can_restart
        assert built.drive() == [(0, 1, "failed"), (0, 0, "ok")], can_restart
        assert (built.records()[1].samples.values, built.records()[1].stop) == (seconds, stop)


def test_a_driver_that_is_killed_in_a_long_launch_leaves_what_was_seen_by_then(
    stage: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "order_of_visits", visited(0, 1, 0, 1))
    seen = tells(so_far(1.0), so_far(2.0), so_far(1.0, 1.0, more=False), so_far(2.0, 2.0, more=False))
    for kept_seconds, lines in ((0.0, [[1.0], [1.0], [2.0]]), (60.0, [])):
        monkeypatch.setattr(module, "_KEPT_SECONDS", kept_seconds)
        built, on_disk = stage(CASES[:2], seen), list[list[list[float]]]()

        def look(case: Case, done: float, built: Stage = built, on_disk: list[list[list[float]]] = on_disk) -> None:
            on_disk.append([record.samples.values for record in built.records()])

        monkeypatch.setattr(built, "visit", look)
        built.drive()
        assert on_disk[2] == lines, "two visits were made"
        run = load_run(built.path)
        assert [record.samples.values for record in run.records] == [[1.0, 1.0], [2.0, 2.0]]
        assert remaining(run) == ()


def test_ranks_that_stay_are_waited_for_and_told_with_what_came_after(
    stage: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_GONE_SECONDS", 1.0)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stays:
        built = stage(CASES[:2], breaks_at(0), launches=2)
        built.acts = (breaks_at(0), built.fine)
        built.hello = lambda gang, rank: {"pid": stays.pid if (gang, rank) == (0, 1) else os.getpid()}
        began = time.monotonic()
        built.drive()
        assert time.monotonic() - began > 1.0
        stays.kill()
    told = f"1 s after the ranks before these were ended, there were still rank 1 (process {stays.pid} is sleeping)"
    assert [record.notes for record in built.records()] == [[], [told], [], []]


def test_a_rank_of_another_host_is_there_as_long_as_its_connection_is(
    stage: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_GONE_SECONDS", 1.0)
    monkeypatch.setattr(FakeRank, "die", lambda rank: None)
    built = stage(CASES[:1], launches=2)
    built.hello = lambda gang, rank: {"host": "far", "pid": 1} if rank else {}
    built.drive()
    assert built.records()[-1].notes[0].endswith("still rank 1 (far) (process 1 is connected)")


def test_memory_of_gpus_is_waited_for_too_and_what_stays_is_told(
    stage: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def in_use(mine: int, others: int) -> None:
        known = gpus(H100, 2, gpu0={"memory.used": str(mine)}, gpu1={"memory.used": str(others)})
        monkeypatch.setenv("PATH", install(tmp_path, known)["PATH"])

    monkeypatch.setattr(module, "_GONE_SECONDS", 1.0)
    uuid = gpus(H100, 1)[0]["uuid"]
    place = RankPlace(host="here", cpus=(), numa_nodes=(), gpu=uuid)

    def use(gang: FakeGang, rank: FakeRank) -> None:
        if rank.rank == 0:  # the second keeps too much; another's job has what is on the other GPU
            in_use([1124, 3172, 3172][len(built.jobs)], 9000)
        built.fine(gang, rank)

    in_use(1024, 1024)
    built = stage(CASES[:1], use, launches=3, device="cuda")
    built.hello = lambda gang, rank: {"place": place}
    built.drive()
    told = f"1 s after the ranks before these were ended, there were still 2.0 GiB on {uuid}"
    assert [record.notes for record in built.records()] == [[], [], [told]]


def test_what_broke_one_launch_is_not_tried_in_the_next(stage: Build) -> None:
    built = stage(CASES[:2], breaks_at(0), launches=2)
    assert built.drive() == [(0, 0, "failed"), (0, 1, "ok"), (1, 0, "skipped"), (1, 1, "ok")]
    told = "not tried again: failed in launch 1 (rank 1 died: ended by SIGKILL)"
    assert built.records()[2].reason == told

    all_of_it = stage(CASES[:1], breaks_at(0), launches=3)
    assert all_of_it.drive() == [(0, 0, "failed"), (1, 0, "skipped"), (2, 0, "skipped")]
    assert all_of_it.numbers == [0], "a launch of which nothing is left starts no ranks"

    wrong = stage(CASES[:1], tells(Outcome(status="wrong", reason="off by one")), launches=2)
    assert wrong.drive() == [(0, 0, "wrong"), (1, 0, "skipped")]


def test_a_gang_that_does_not_start_is_tried_once_more(stage: Build) -> None:
    built = stage(CASES[:2], launches=2)
    built.acts = (does_not_start, built.fine, does_not_start, built.fine)  # one does not count after a good start
    assert {status for _, _, status in built.drive()} == {"ok"}
    assert built.numbers == [0, 1, 2, 3]

    never = stage(CASES[:2], does_not_start, launches=2)
    assert never.drive() == [(0, 0, "failed"), (0, 1, "failed"), (1, 0, "skipped"), (1, 1, "skipped")]
    told = "the ranks ended before every rank had started; their output is in the run's logs"
    assert [record.reason for record in never.records()[:2]] == [told] * 2
    assert never.numbers == [0, 1]


def test_ranks_that_cannot_be_started_again_end_the_run_where_they_break_and_are_not_hung_up_on(
    stage: Build, hubs: list[DriverServer]
) -> None:
    """The first to end would have their launcher end the driver too, which still has tables and a page to make."""

    def raise_and_stand_still(gang: FakeGang, rank: FakeRank) -> None:
        if rank.rank == 1:
            rank.break_(0)
        says_nothing(gang, rank)

    for act, seen in (
        (breaks_at(1), [(0, 0, "ok"), (0, 1, "failed")]),
        (does_not_start, [(0, number, "failed") for number in range(4)]),
        (at_case(0, raise_and_stand_still), [(0, 0, "failed")]),
    ):
        built = stage(CASES, act)
        built.can_restart = False
        assert built.drive() == seen
        assert built.numbers == [0]
    assert not built.gangs[0].ended()
    hubs[-1].close()
    wait_until(built.gangs[0].ended)
    again = stage(CASES[:1], at_case(0, raise_and_stand_still))
    assert again.drive() == [(0, 0, "failed")]
    wait_until(again.gangs[0].ended)


def test_a_job_is_what_the_plan_asks_and_tells_all_ranks_their_hosts_and_where_to_meet(stage: Build) -> None:
    injection = FaultSpec(kind="late", rank=1, amount=0.1, text="late:1:100ms")
    built = stage(CASES[:2], timeout_seconds=12.0, path="/home/me", injection=injection)
    built.hello, built.host, built.facts = on_nodes("n1", "n2"), "localhost", {"slurm": {"job": "17"}}
    built.drive()
    [asked] = built.jobs
    assert asked.plan == msgspec.structs.replace(load_run(built.path).info.plan, cases=tuple(CASES[:2]))
    assert (asked.hosts, asked.meeting) == (("n1", "n2"), "n1:0")
    assert built.addresses.startswith("127.0.0.1:"), "the hub listens where it is told"
    assert built.records()[0].world.nodes == 2
    kept = built.environment()
    assert (kept["hosts"], kept["slurm"], kept["locality"]["0-1"]) == (["n1", "n2"], {"job": "17"}, "other node")


def test_how_gpus_are_joined_is_asked_where_they_are_measured_and_ranks_are_told_so(
    stage: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(environ: Mapping[str, str]) -> dict[frozenset[str], str]:
        assert device == "cuda"
        return {frozenset("ab"): "NVLink"}

    monkeypatch.setattr(module, "gpu_links", asked)
    for device, near in (("cpu", None), ("cuda", "NVLink")):
        built = stage(CASES[:1], device=device)
        built.hello = lambda gang, rank: {"place": RankPlace(host="n1", cpus=(0, 1), numa_nodes=(), gpu="ab"[rank])}
        built.drive()
        assert (built.environment()["locality"], built.device) == ({"0-1": near}, device)


def test_steps_weigh_more_than_collectives_and_later_what_is_not_yet_precise(stage: Build) -> None:
    names = ["collective.all_reduce", "p2p.sendrecv", "workload.ddp", "custom.mystep"]
    built = stage([case(number, name) for number, name in enumerate(names)], launches=2)
    noisy = msgspec.structs.replace(outcome(), seconds=[1e-3, 1e-3, 9e-3, 9e-3] * 5)
    built.acts = (tells(outcome(), noisy, outcome(), Outcome(status="skipped")), built.fine)
    built.drive()
    assert built.jobs[0].weights == [0.2, 5.0, 4.0, 10.0]  # precise, wide, precise, and not known

    built = stage([case(number, name) for number, name in enumerate(names)])
    built.drive()
    assert built.jobs[0].weights == [1.0, 1.0, 20.0, 10.0]


def test_the_budget_is_shared_by_the_launches_that_are_left(stage: Build) -> None:
    """What a launch does not use is shared by those after it; the last cases may take a little overtime."""
    built = stage(CASES[:1], launches=3, budget_seconds=90.0)
    built.drive()
    assert [asked.budget_seconds for asked in built.jobs] == pytest.approx([30, 45, 90], abs=3)
    assert [asked.run_seconds for asked in built.jobs] == pytest.approx([95, 95, 95], abs=3)
    assert built.sentences == []

    broken = stage(CASES[:2], launches=2, budget_seconds=40.0)
    broken.acts = (breaks_at(0), broken.fine)
    broken.drive()
    assert broken.jobs[0].plan.cases == (CASES[1],)
    assert broken.jobs[0].budget_seconds == pytest.approx(20, abs=2), "what is left of its launch"
    assert broken.jobs[0].run_seconds == pytest.approx(44, abs=3)


@pytest.fixture
def taking(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Act]:
    """Return what makes an act whose cases each take so many seconds, by their records and by the driver's clock."""
    ahead, remember = [0.0], Stage.record

    def pass_time(built: Stage, record: Record) -> None:
        remember(built, record)
        ahead[0] += record.seconds

    monkeypatch.setattr(Stage, "record", pass_time)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0], sleep=time.sleep)
    monkeypatch.setattr(module, "time", clock)
    return lambda seconds: tells(*[outcome(wall_seconds=seconds)] * len(CASES))


def test_launches_that_do_not_fit_the_budget_are_cut_whole_and_said_so_as_soon_as_it_is_known(
    stage: Build, taking: Callable[[float], Act]
) -> None:
    built = stage(CASES[:2], taking(20.0), launches=5, budget_seconds=120.0)
    built.drive()
    found = [(record.launch, record.reason) for record in built.records()]
    assert found == [(launch, "" if launch < 3 else LEFT_OUT) for launch in range(5) for _ in range(2)]
    assert [told[1:3] for told in built.told if told[0] == "launch"] == [(1, 5), (2, 5), (3, 5)]
    [told] = built.sentences
    assert told.startswith("a launch takes about 40 s: the budget of 2 min 0 s holds 3 of 5 launches; --budget ")


def test_what_a_run_left_out_is_made_when_it_goes_on(stage: Build, taking: Callable[[float], Act]) -> None:
    built = stage(CASES[:2], taking(20.0), launches=3, budget_seconds=80.0)
    assert [status for _, _, status in built.drive()] == ["ok"] * 4 + ["skipped"] * 2
    run = load_run(built.path)
    assert (remaining(run), remaining(run, fills=True)) == ((), ((2, CASES[0]), (2, CASES[1])))
    built.drive(fills=True)
    run = load_run(built.path)
    assert {record.status for record in run.records} == {"ok"}
    assert remaining(run, fills=True) == ()


def test_a_budget_that_is_spent_leaves_later_launches_out_and_says_so(stage: Build) -> None:
    built = stage(CASES[:2], launches=2, budget_seconds=1e-6)
    assert built.drive() == [(0, 0, "ok"), (0, 1, "ok"), (1, 0, "skipped"), (1, 1, "skipped")]
    assert {record.reason for record in built.records()[2:]} == {LEFT_OUT}
    assert [(asked.budget_seconds, asked.run_seconds) for asked in built.jobs] == [(0.0, 0.0)]
    never = stage(CASES[:2], tells(*[Outcome(status="skipped", reason=LEFT_OUT)] * 2), launches=2, budget_seconds=1e-6)
    never.drive()
    assert never.sentences == [], "what nothing is known of has no price"


def test_a_run_that_goes_on_does_nothing_twice_and_keeps_its_logs(stage: Build) -> None:
    built = stage(CASES[:3], launches=2)
    (built.path / "logs" / "gang-0").mkdir()
    built.drive(2)
    assert built.drive() == [(launch, number, "ok") for launch in range(2) for number in range(3)]
    assert [[asked.params["number"] for asked in sent.plan.cases] for sent in built.jobs] == [[0, 1], [2], [0, 1, 2]]
    assert built.numbers == [1, 1, 2]  # folder 0 was there, and fake gangs make none
    launches = [told for told in built.told if told[0] == "launch"]
    assert launches == [("launch", 1, 2, 2), ("launch", 1, 2, 1), ("launch", 2, 2, 3)]

    broken = stage(CASES[:2], breaks_at(0), launches=2)
    broken.drive(1)
    assert broken.drive() == [(0, 0, "failed"), (0, 1, "ok"), (1, 0, "skipped"), (1, 1, "ok")], "not tried again"


def test_what_all_ranks_share_is_in_the_run_and_what_is_odd_in_the_record(stage: Build) -> None:
    """Odd is what one rank has of its own, and what is not as in the launch before, also where a run goes on."""
    kernels = ["6.1", "6.1", "6.2"]
    built = stage(CASES[:1], launches=3)
    built.hello = lambda gang, rank: {
        "environment": {"host": {"name": "node-a", "kernel": kernels[gang]}, "process": {"cores": 2, "affinity": rank}}
    }
    built.drive(2)
    built.drive()
    own = {f"rank {rank}": {"process": {"affinity": rank}} for rank in range(2)}
    changed = {"changed": {"host.kernel": ["6.1", "6.2"]}}
    assert [record.environment for record in built.records()] == [own, own, {**changed, **own}]
    assert built.environment() == {"host": {"name": "node-a", "kernel": "6.1"}, "process": {"cores": 2}}


def on_nodes(*hosts: str) -> Callable[[int, int], dict[str, Any]]:
    def hello(gang: int, rank: int) -> dict[str, Any]:
        place = RankPlace(host=hosts[rank], cpus=(0,), numa_nodes=(0,))
        return {"host": hosts[rank], "place": place, "meeting": "" if rank else f"n1:{gang}"}

    return hello


def test_ranks_that_sit_otherwise_than_asked_are_noted_in_every_record(stage: Build) -> None:
    built = stage(CASES[:2], breaks_at(1), spread=NodeLayout(nodes=1, ntasks_per_node=2), notes=("of the plan",))
    built.hello = on_nodes("n1", "n2")
    told = "1 nodes with 2 ranks each were asked for; there are 1 on n1, 1 on n2"
    assert built.drive() == [(0, 0, "ok"), (0, 1, "failed")]
    assert [record.notes for record in built.records()] == [["of the plan", told]] * 2


@pytest.mark.full
def test_a_host_that_fell_silent_is_not_waited_for_again_as_long_and_is_named(
    stage: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RETRY_SECONDS", 0.5)

    def fall_silent(gang: FakeGang, rank: FakeRank) -> None:
        if rank.rank == 0:
            rank.answer(where())
        wait_until(lambda: gang.told_to_end is not None)

    built = stage(CASES[:3], at_case(1, fall_silent), says_nothing, timeout_seconds=1.0)
    built.hello = on_nodes("n1", "n2")
    assert built.drive() == [(0, 0, "ok"), (0, 1, "hang"), (0, 2, "failed")]
    _, hung, rest = built.records()
    assert hung.reason == "no end within 1 s: rank 1 (n2) did not arrive"
    assert "did not start within" in rest.reason
    assert rest.reason.endswith("n2 did not answer when the last gang hung")
    assert len(built.gangs) == 2
