"""The driver: a record for every case, budget shared, what broke not tried again, nothing done twice."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fakes import FakeGang, FakeRank, case, outcome, plan, wait_until, where, within

from bench import driver as module
from bench import watch as watch_module
from bench.cases import Case
from bench.channel import ADDRESS_VARIABLE, Hub
from bench.driver import Driver, remaining
from bench.locality import Place
from bench.messages import LEFT_OUT, Bye, Job, Outcome
from bench.plan import Plan, Skipped, Spread
from bench.records import Record, read_records
from bench.runs import create_run, load_info, load_run, open_writer

CASES = [case(number) for number in range(4)]
Act = Callable[[FakeGang, FakeRank], None]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(watch_module, "_GRACE_SECONDS", 0.2)
    monkeypatch.setattr(watch_module, "_SHORT_GRACE", 0.2)
    monkeypatch.setattr(module, "_FAREWELL_SECONDS", 1.0)
    with within(30):
        yield


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 10
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left == set()


@pytest.fixture
def hubs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Hub]]:
    """The hubs that drivers open, closed at last as a process's end would."""
    opened: list[Hub] = []

    def remember(*hosts: str) -> Hub:
        opened.append(Hub(*hosts))
        return opened[-1]

    monkeypatch.setattr(module, "Hub", remember)
    yield opened
    for hub in opened:
        hub.close()


class Listener:
    """An audience that remembers."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def launch(self, number: int, of: int, cases: int) -> None:
        self.told.append(("launch", number, of, cases))

    def case(self, case: Case) -> None:
        self.told.append(("case", case.id))

    def record(self, record: Record) -> None:
        self.told.append(("record", record.case.id, record.status))


class Stage:
    """A run folder and what starts its gangs of fake ranks; ``acts`` are done by the gangs in turn, the last again."""

    def __init__(self, out: Path, asked: Plan, *acts: Act) -> None:
        self.path = create_run(out, asked, "0.1.0")[0]
        self.acts = acts
        self.gangs: list[FakeGang] = []
        self.numbers: list[int] = []
        self.jobs: list[Job] = []
        self.audience = Listener()
        self.hello: Callable[[int, int], dict[str, Any]] = lambda gang, rank: {}
        self.can_restart = True
        self.host = "127.0.0.1"
        self.facts: dict[str, Any] = {}

    def start(self, number: int, variables: Mapping[str, str]) -> FakeGang:
        gang = FakeGang(can_restart=self.can_restart)
        size = load_info(self.path).plan.nproc
        count = len(self.gangs)
        ranks = [FakeRank(variables, rank, size, **self.hello(count, rank)) for rank in range(size)]
        self.gangs.append(gang)
        self.numbers.append(number)
        self.addresses = variables[ADDRESS_VARIABLE]
        gang.run(ranks, self.acts[min(count, len(self.acts) - 1)])
        return gang

    def drive(self) -> list[Record]:
        """Drive what is pending and return the records written by now."""
        run = load_run(self.path)
        with open_writer(self.path) as writer:
            Driver(run, writer, self.start, self.audience, hosts=(self.host,), facts=self.facts).drive(remaining(run))
        return self.records()

    def records(self) -> list[Record]:
        return list(read_records(self.path / "records.jsonl"))

    def fine(self, gang: FakeGang, rank: FakeRank) -> None:
        """Do the whole job, and remember it."""
        rank.hello()
        heard = rank.job()
        if rank.rank == 0:
            self.jobs.append(heard)
        for index in range(len(heard.cases)):
            rank.start(index)
            if rank.rank == 0:
                rank.finish(index)
        rank.say(Bye())


def waits_where_it_broke(gang: FakeGang, rank: FakeRank) -> None:
    """Raise on rank 1 in the first case, and stand still as long as there is a driver."""
    rank.hello()
    rank.job()
    rank.start(0)
    if rank.rank == 1:
        rank.break_(0)
    rank.line.hear()


def breaks_at(number: int) -> Act:
    """Return an act in which rank 1 dies in the case of a number, if the job has it."""

    def act(gang: FakeGang, rank: FakeRank) -> None:
        rank.hello()
        for index, asked in enumerate(rank.job().cases):
            rank.start(index)
            if asked.params["number"] == number:
                if rank.rank == 1:
                    gang.known_exits = {1: -9}
                    rank.die()
                rank.line.hear()  # until the driver hangs up
                return
            if rank.rank == 0:
                rank.finish(index)
        rank.say(Bye())

    return act


def does_not_start(gang: FakeGang, rank: FakeRank) -> None:
    """End without a word."""


@pytest.fixture
def stage(tmp_path: Path) -> Callable[..., Stage]:
    def build(cases: list[Case], *acts: Act, **more: Any) -> Stage:
        built = Stage(tmp_path, plan(cases, **more))
        built.acts = acts or (built.fine,)
        return built

    return build


def seen(records: list[Record]) -> list[tuple[int, object, str]]:
    return [(record.launch, record.case.params["number"], record.status) for record in records]


# --- records ---


def test_every_case_of_every_launch_has_a_record_and_every_launch_new_ranks(stage: Callable[..., Stage]) -> None:
    built = stage(CASES[:2], launches=2)
    assert seen(built.drive()) == [(0, 0, "ok"), (0, 1, "ok"), (1, 0, "ok"), (1, 1, "ok")]
    assert built.numbers == [0, 1]
    assert [gang.told_to_end for gang in built.gangs] == [[0, 1], [0, 1]]


def test_a_record_holds_what_the_ranks_saw(stage: Callable[..., Stage]) -> None:
    said = outcome(2e-3, details={"bytes": 4}, notes=["of the case"], raw=b"npz", wall_seconds=0.25)

    def act(gang: FakeGang, rank: FakeRank) -> None:
        rank.hello()
        rank.work(lambda index, asked: said)

    built = stage(CASES[:1], act, notes=("of the plan",))
    [record] = built.drive()
    assert record.case == CASES[0]
    assert record.samples.values == said.seconds
    assert record.metrics["time"].value == 2e-3
    assert record.noise is not None
    assert (record.stop, record.check, record.details) == (said.stop, said.check, said.details)
    assert record.notes == ["of the plan", "of the case"]
    assert record.seconds == 0.25
    assert (record.world.size, record.world.nodes, record.world.backend) == (2, 1, "gloo")
    assert (built.path / "samples" / f"{CASES[0].id}-0.npz").read_bytes() == b"npz"


def test_a_case_without_samples_leaves_no_file_of_them(stage: Callable[..., Stage]) -> None:
    def act(gang: FakeGang, rank: FakeRank) -> None:
        rank.hello()
        rank.work(lambda index, asked: Outcome(status="skipped", reason="no such dtype"))

    built = stage(CASES[:1], act)
    [record] = built.drive()
    assert (record.status, record.reason, record.metrics) == ("skipped", "no such dtype", {})
    assert list((built.path / "samples").iterdir()) == []


def test_the_audience_hears_of_launches_cases_and_records_in_turn(stage: Callable[..., Stage]) -> None:
    built = stage(CASES[:2], launches=1)
    built.drive()
    one, two = (asked.id for asked in CASES[:2])
    assert built.audience.told == [
        ("launch", 1, 1, 2),
        ("case", one),
        ("record", one, "ok"),
        ("case", two),
        ("record", two, "ok"),
    ]


def test_each_record_is_on_disk_before_the_next_case_is_begun(stage: Callable[..., Stage]) -> None:
    on_disk: list[int] = []

    def act(gang: FakeGang, rank: FakeRank) -> None:
        rank.hello()
        for index in range(len(rank.job().cases)):
            rank.start(index)
            if rank.rank == 0:
                rank.finish(index)
                while len(built.records()) <= index:
                    time.sleep(0.005)
                on_disk.append(len(built.records()))
        rank.say(Bye())

    built = stage(CASES[:3], act)
    built.drive()
    assert on_disk == [1, 2, 3]


def test_no_number_at_all_is_unknown_in_the_file_and_the_file_is_json(stage: Callable[..., Stage]) -> None:
    def act(gang: FakeGang, rank: FakeRank) -> None:
        rank.hello()
        rank.work(lambda index, asked: outcome(details={"loss": float("nan"), "limit": float("inf")}))

    built = stage(CASES[:1], act)
    assert built.drive()[0].details == {"loss": None, "limit": None}
    text = (built.path / "records.jsonl").read_text()
    assert "NaN" not in text
    assert "nfinity" not in text


def test_what_the_plan_could_not_run_is_written_as_skipped(tmp_path: Path) -> None:
    built = Stage(tmp_path, plan(CASES[:1], skipped=[Skipped(case=CASES[1], reason="gloo carries no float8")]))
    run = load_run(built.path)
    with open_writer(built.path) as writer:
        Driver(run, writer, built.start, built.audience).write_skipped()
    [record] = built.records()
    assert (record.case, record.status, record.reason) == (CASES[1], "skipped", "gloo carries no float8")
    assert built.gangs == []


# --- what breaks ---


def test_a_rank_that_dies_ends_its_case_and_a_new_gang_does_the_rest(stage: Callable[..., Stage]) -> None:
    built = stage(CASES, breaks_at(1))
    records = built.drive()
    assert seen(records) == [(0, 0, "ok"), (0, 1, "failed"), (0, 2, "ok"), (0, 3, "ok")]
    assert records[1].reason == "rank 1 died: ended by SIGKILL"
    assert [state.state for state in records[1].ranks] == ["alive", "died: ended by SIGKILL"]
    assert records[1].metrics == {}
    assert built.numbers == [0, 1]
    assert built.gangs[0].told_to_end == [0, 1]


def test_a_rank_that_dies_in_the_last_case_needs_no_new_gang(stage: Callable[..., Stage]) -> None:
    built = stage(CASES[:2], breaks_at(1))
    assert seen(built.drive()) == [(0, 0, "ok"), (0, 1, "failed")]
    assert built.numbers == [0]


def test_a_case_that_passes_its_deadline_is_a_hang_with_its_time_and_the_rest_goes_on(
    stage: Callable[..., Stage],
) -> None:
    def act(gang: FakeGang, rank: FakeRank) -> None:
        rank.hello()
        asked = rank.job().cases
        rank.start(0)
        if asked[0] == CASES[0]:
            rank.line.hear()
            return
        if rank.rank == 0:
            rank.finish(0)
        rank.say(Bye())

    built = stage(CASES[:2], act, timeout_seconds=0.3)
    hang, fine = built.drive()
    assert (hang.status, fine.status) == ("hang", "ok")
    assert hang.reason == "no end within 0.3 s: no rank answers"
    assert 0.3 <= hang.seconds < 5


def test_what_broke_one_launch_is_not_tried_in_the_next(stage: Callable[..., Stage]) -> None:
    built = stage(CASES[:2], breaks_at(0), launches=2)
    records = built.drive()
    assert seen(records) == [(0, 0, "failed"), (0, 1, "ok"), (1, 0, "skipped"), (1, 1, "ok")]
    assert records[2].reason == "not tried again: failed in launch 1 (rank 1 died: ended by SIGKILL)"


def test_a_launch_of_which_nothing_is_left_starts_no_ranks(stage: Callable[..., Stage]) -> None:
    built = stage(CASES[:1], breaks_at(0), launches=3)
    assert seen(built.drive()) == [(0, 0, "failed"), (1, 0, "skipped"), (2, 0, "skipped")]
    assert built.numbers == [0]


def test_a_gang_that_does_not_start_is_tried_once_more(stage: Callable[..., Stage]) -> None:
    built = stage(CASES[:2])
    built.acts = (does_not_start, built.fine)
    assert seen(built.drive()) == [(0, 0, "ok"), (0, 1, "ok")]
    assert built.numbers == [0, 1]


def test_a_gang_that_does_not_start_twice_is_why_every_case_failed(stage: Callable[..., Stage]) -> None:
    built = stage(CASES[:2], does_not_start, launches=2)
    records = built.drive()
    assert seen(records) == [(0, 0, "failed"), (0, 1, "failed"), (1, 0, "skipped"), (1, 1, "skipped")]
    assert {record.reason for record in records[:2]} == {
        "the ranks ended before every rank had started; their output is in the run's logs"
    }
    assert built.numbers == [0, 1]


def test_one_failed_start_does_not_count_after_a_good_one(stage: Callable[..., Stage]) -> None:
    built = stage(CASES[:2], launches=2)
    built.acts = (does_not_start, built.fine, does_not_start, built.fine)
    assert {record.status for record in built.drive()} == {"ok"}
    assert built.numbers == [0, 1, 2, 3]


def test_ranks_that_cannot_be_started_again_end_the_run_where_they_break(
    stage: Callable[..., Stage], hubs: list[Hub]
) -> None:
    built = stage(CASES, breaks_at(1))
    built.can_restart = False
    assert seen(built.drive()) == [(0, 0, "ok"), (0, 1, "failed")]
    assert built.numbers == [0]


def test_ranks_that_cannot_be_started_again_are_not_hung_up_on_before_the_drivers_process_ends(
    stage: Callable[..., Stage], hubs: list[Hub]
) -> None:
    """The first to end would have their launcher end the driver too, which still has tables and a page to make."""
    built = stage(CASES[:2], waits_where_it_broke)
    built.can_restart = False
    assert seen(built.drive()) == [(0, 0, "failed")]
    assert not built.gangs[0].ended()
    (hub,) = hubs
    hub.close()
    wait_until(built.gangs[0].ended)


def test_ranks_that_can_be_started_again_are_hung_up_on_where_they_break(stage: Callable[..., Stage]) -> None:
    built = stage(CASES[:1], waits_where_it_broke)
    assert seen(built.drive()) == [(0, 0, "failed")]
    wait_until(built.gangs[0].ended)


def test_ranks_that_were_there_and_do_not_come_together_are_told_for_every_case(
    stage: Callable[..., Stage], hubs: list[Hub]
) -> None:
    built = stage(CASES[:2], does_not_start)
    built.can_restart = False
    assert seen(built.drive()) == [(0, 0, "failed"), (0, 1, "failed")]
    assert built.numbers == [0]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_driver_that_is_interrupted_ends_its_ranks_and_keeps_what_is_done(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    built = stage(CASES[:2])

    def interrupt(record: Record) -> None:
        raise error

    monkeypatch.setattr(built.audience, "record", interrupt)
    with pytest.raises(error):
        built.drive()
    assert seen(built.records()) == [(0, 0, "ok")]
    assert built.gangs[0].told_to_end == [0, 1]


# --- jobs and budget ---


def test_a_job_is_what_the_plan_asks(stage: Callable[..., Stage]) -> None:
    built = stage(CASES[:2], timeout_seconds=12.0, path="/home/me")
    built.drive()
    [asked] = built.jobs
    assert asked.cases == CASES[:2]
    assert (asked.backend, asked.device, asked.timeout_seconds, asked.path) == ("gloo", "cpu", 12.0, "/home/me")


def test_steps_weigh_more_than_collectives(stage: Callable[..., Stage]) -> None:
    names = ["collective.all_reduce", "p2p.sendrecv", "workload.ddp", "custom.mystep"]
    built = stage([case(number, name) for number, name in enumerate(names)])
    built.drive()
    assert built.jobs[0].weights == [1.0, 1.0, 20.0, 10.0]


def test_the_budget_is_shared_by_the_launches_that_are_left(stage: Callable[..., Stage]) -> None:
    built = stage(CASES[:1], launches=3, budget_seconds=90.0)
    built.drive()
    shares = [asked.budget_seconds for asked in built.jobs]
    # what a launch does not use is shared by those after it
    assert shares[0] == pytest.approx(30, abs=2)
    assert shares[1] == pytest.approx(45, abs=2)
    assert shares[2] == pytest.approx(90, abs=4)


def test_the_gang_after_a_broken_one_has_what_is_left_of_its_launch(stage: Callable[..., Stage]) -> None:
    built = stage(CASES[:2], launches=2, budget_seconds=80.0)
    built.acts = (breaks_at(0), built.fine)
    built.drive()
    assert built.jobs[0].cases == [CASES[1]]
    assert built.jobs[0].budget_seconds == pytest.approx(40, abs=2)


def test_a_budget_that_is_spent_leaves_later_launches_out_and_says_so(stage: Callable[..., Stage]) -> None:
    built = stage(CASES[:2], launches=2, budget_seconds=1e-6)
    records = built.drive()
    assert [(record.launch, record.status) for record in records] == [
        *((0, "ok"), (0, "ok"), (1, "skipped"), (1, "skipped")),
    ]
    assert {record.reason for record in records[2:]} == {LEFT_OUT}
    assert [(asked.budget_seconds, asked.run_seconds) for asked in built.jobs] == [(0.0, 0.0)]


def test_the_hub_listens_where_it_is_told(stage: Callable[..., Stage]) -> None:
    built = stage(CASES[:1])
    built.host = "localhost"
    built.drive()
    assert built.addresses.startswith("127.0.0.1:")


# --- going on ---


def test_what_remains_is_what_has_no_record(stage: Callable[..., Stage]) -> None:
    built = stage(CASES[:2], launches=2)
    assert remaining(load_run(built.path)) == ((0, CASES[0]), (0, CASES[1]), (1, CASES[0]), (1, CASES[1]))
    built.drive()
    run = load_run(built.path)
    assert remaining(run) == ()
    partial = msgspec.structs.replace(run, records=run.records[1:3])
    assert remaining(partial) == ((0, CASES[0]), (1, CASES[1]))


def test_a_run_that_goes_on_does_nothing_twice_and_keeps_its_logs(tmp_path: Path) -> None:
    built = Stage(tmp_path, plan(CASES[:3], launches=2))
    run = load_run(built.path)
    built.acts = (built.fine,)
    (built.path / "logs" / "gang-0").mkdir()
    with open_writer(built.path) as writer:
        Driver(run, writer, built.start, built.audience).drive(remaining(run)[:2])
    built.drive()
    assert seen(built.records()) == [(launch, number, "ok") for launch in range(2) for number in range(3)]
    assert [[asked.params["number"] for asked in sent.cases] for sent in built.jobs] == [[0, 1], [2], [0, 1, 2]]
    assert built.numbers == [1, 1, 2]  # folder 0 was there, and fake gangs make none
    assert [told for told in built.audience.told if told[0] == "launch"] == [
        ("launch", 1, 2, 2),
        ("launch", 1, 2, 1),
        ("launch", 2, 2, 3),
    ]


def test_a_run_that_goes_on_does_not_try_again_what_broke_before(stage: Callable[..., Stage]) -> None:
    built = stage(CASES[:2], breaks_at(0), launches=2)
    run = load_run(built.path)
    with open_writer(built.path) as writer:
        Driver(run, writer, built.start, built.audience).drive(remaining(run)[:1])
    assert seen(built.drive()) == [(0, 0, "failed"), (0, 1, "ok"), (1, 0, "skipped"), (1, 1, "ok")]


def test_nothing_pending_starts_nothing(stage: Callable[..., Stage]) -> None:
    built = stage(CASES[:1])
    built.drive()
    assert len(built.drive()) == 1
    assert len(built.gangs) == 1


# --- the environment ---


def environment(**more: object) -> dict[str, Any]:
    return {"host": {"name": "node-a", "kernel": "6.1"}, "load": {"one_minute": 0.5}, **more}


def test_what_all_ranks_share_is_in_the_run_and_not_in_its_records(stage: Callable[..., Stage]) -> None:
    built = stage(CASES[:1], launches=2)
    built.hello = lambda gang, rank: {"environment": environment()}
    records = built.drive()
    assert load_info(built.path).environment == environment()
    assert [record.environment for record in records] == [{}, {}]


def test_what_one_rank_has_of_its_own_is_in_the_record(stage: Callable[..., Stage]) -> None:
    built = stage(CASES[:1])
    built.hello = lambda gang, rank: {"environment": environment(process={"cores": 2, "affinity": str(rank)})}
    [record] = built.drive()
    assert record.environment == {
        "rank 0": {"process": {"affinity": "0"}},
        "rank 1": {"process": {"affinity": "1"}},
    }
    assert load_info(built.path).environment == environment(process={"cores": 2})


def test_what_differs_from_the_launch_before_is_in_the_record(stage: Callable[..., Stage]) -> None:
    built = stage(CASES[:1], launches=3)
    kernels = ["6.1", "6.1", "6.2"]
    built.hello = lambda gang, rank: {"environment": environment(host={"name": "node-a", "kernel": kernels[gang]})}
    assert [record.environment for record in built.drive()] == [{}, {}, {"changed": {"host.kernel": ["6.1", "6.2"]}}]
    shared = load_info(built.path).environment
    assert shared is not None
    assert shared["host"]["kernel"] == "6.1"


def test_a_run_that_goes_on_elsewhere_says_so(stage: Callable[..., Stage]) -> None:
    built = stage(CASES[:2])
    built.hello = lambda gang, rank: {"environment": environment(host={"name": f"node-{gang}"})}
    run = load_run(built.path)
    with open_writer(built.path) as writer:
        Driver(run, writer, built.start, built.audience).drive(remaining(run)[:1])
    assert built.drive()[1].environment == {"changed": {"host.name": ["node-0", "node-1"]}}


def test_hosts_are_counted(stage: Callable[..., Stage]) -> None:
    built = stage(CASES[:1], nproc=3)
    built.hello = lambda gang, rank: {"host": f"node-{rank // 2}"}
    assert built.drive()[0].world.nodes == 2


# --- ranks on several nodes ---


def on_nodes(*hosts: str) -> Callable[[int, int], dict[str, Any]]:
    def hello(gang: int, rank: int) -> dict[str, Any]:
        place = Place(host=hosts[rank], cpus=(0,), numa_nodes=(0,))
        return {"host": hosts[rank], "place": place, "meeting": "" if rank else f"n1:{gang}"}

    return hello


def falls_silent(number: int) -> Act:
    """Return an act in which rank 1 says nothing more in the case of a number, and its host starts no rank again."""
    fell: list[bool] = []

    def act(gang: FakeGang, rank: FakeRank) -> None:
        if fell:
            rank.line.hear()  # until the driver hangs up
            return
        rank.hello()
        for index, asked in enumerate(rank.job().cases):
            rank.start(index)
            if asked.params["number"] == number:
                if rank.rank == 0:
                    rank.answer(where())
                fell.append(True)  # before the end: the next gang may start as soon as this one is told to end
                wait_until(lambda: gang.told_to_end is not None)
                return
            if rank.rank == 0:
                rank.finish(index)
        rank.say(Bye())

    return act


def test_a_job_tells_all_ranks_their_hosts_and_where_to_meet(stage: Callable[..., Stage]) -> None:
    built = stage(CASES[:1])
    built.hello = on_nodes("n1", "n2")
    built.drive()
    assert built.jobs[0].hosts == ("n1", "n2")
    assert built.jobs[0].meeting == "n1:0"


def test_hosts_by_rank_and_the_drivers_facts_are_in_the_run(stage: Callable[..., Stage]) -> None:
    built = stage(CASES[:1])
    built.hello, built.facts = on_nodes("n1", "n2"), {"slurm": {"job": "17"}}
    built.drive()
    environment = load_info(built.path).environment
    assert environment is not None
    assert environment["hosts"] == ["n1", "n2"]
    assert environment["slurm"] == {"job": "17"}
    assert environment["locality"] == {"0-1": "other node"}


def test_ranks_that_sit_otherwise_than_asked_are_noted_in_every_record(stage: Callable[..., Stage]) -> None:
    built = stage(CASES[:2], spread=Spread(nodes=1, ntasks_per_node=2), notes=("of the plan",))
    built.hello = on_nodes("n1", "n2")
    told = "1 nodes with 2 ranks each were asked for; there are 1 on n1, 1 on n2"
    assert [record.notes for record in built.drive()] == [["of the plan", told]] * 2


def test_a_host_that_fell_silent_is_not_waited_for_again_as_long_and_is_named(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RETRY_SECONDS", 0.5)
    built = stage(CASES[:3], falls_silent(1), timeout_seconds=1.0)
    built.hello = on_nodes("n1", "n2")
    first, hung, rest = built.drive()
    assert (first.status, hung.status, rest.status) == ("ok", "hang", "failed")
    assert hung.reason == "no end within 1 s: rank 1 (n2) did not arrive"
    assert "did not start within" in rest.reason
    assert rest.reason.endswith("n2 did not answer when the last gang hung")
    assert len(built.gangs) == 2
