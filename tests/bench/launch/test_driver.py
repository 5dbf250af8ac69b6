"""The driver: a record for each case, the budget, failed ranks, and metrics of outcomes."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from parbench.bench.launch import driver as module
from parbench.bench.launch import monitor as monitor_module
from parbench.bench.launch.control_channel import (
    ADDRESS_VARIABLE,
    LEFT_OUT,
    Done,
    Hello,
    Job,
    Outcome,
    Work,
)
from parbench.bench.launch.driver import (
    Driver,
    metrics_of,
    placement_warnings,
    remaining,
)
from parbench.bench.machine.environment import RankPlace
from parbench.bench.machine.slurm_allocation import NodeLayout
from parbench.bench.plan.cases import Case
from parbench.bench.plan.plan import Plan
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import Record, blame, read_records
from parbench.bench.results.runs import create_run, load_run, open_writer
from parbench.bench.results.stats import MIN_FOR_P99, MIN_FOR_Q10
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

CASES = [make_fake_case(number) for number in range(4)]
WRONG = Outcome(status="wrong", reason="off by one")

Act = Callable[[FakeLauncher, FakeRank], None]
MakeRun = Callable[..., "FakeRun"]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(monitor_module, "_GRACE_SECONDS", 0.2)
    monkeypatch.setattr(monitor_module, "_SHORT_GRACE", 0.2)
    monkeypatch.setattr(monitor_module, "_TICK_SECONDS", 0.02)
    monkeypatch.setattr(module, "_FAREWELL_SECONDS", 1.0)
    monkeypatch.setattr(module, "_GONE_SECONDS", 0.6)
    monkeypatch.setattr(module, "order_of_visits", case_order)
    with time_limit(60):
        yield


class FakeRun:
    """A run folder with fake ranks, which also is the audience of its driver.

    The ranks of each start do one of ``acts`` in turn; the last act is repeated.
    """

    def __init__(self, out: Path, plan: Plan, *acts: Act) -> None:
        self.path = create_run(out, plan, "0.1.0")[0]
        self.size = plan.nproc
        self.acts = acts or (self.complete,)
        self.starts: list[int] = []
        self.jobs: list[Job] = []
        self.launches: list[tuple[int, int, int]] = []
        self.messages: list[str] = []
        self.hello: Callable[[int, int], dict[str, Any]] = lambda start, rank: {}
        self.on_visit: Callable[[], None] = lambda: None
        self.can_restart = True
        self.facts: dict[str, Any] = {}

    def launch(self, number: int, of: int, cases: int) -> None:
        self.launches.append((number, of, cases))

    def visit(self, case: Case, done: float) -> None:
        self.on_visit()

    def tell(self, sentence: str) -> None:
        self.messages.append(sentence)

    def record(self, record: Record) -> None:
        assert self.records()[-1].case == record.case, "a record is on disk at once"

    def start(self, number: int, variables: Mapping[str, str]) -> FakeLauncher:
        assert variables[ADDRESS_VARIABLE].startswith("127.0.0.1:")
        launcher = FakeLauncher(can_restart=self.can_restart)
        count = len(self.starts)
        self.starts.append(number)
        ranks = []
        for rank in range(self.size):
            ranks.append(FakeRank(variables, rank, self.size, **self.hello(count, rank)))
        launcher.run(ranks, self.acts[min(count, len(self.acts) - 1)])
        return launcher

    def drive(self, max_cases: int | None = None) -> list[str]:
        """Measure the pending cases, and return a line for each record of the run."""
        run = load_run(self.path)
        pending = remaining(run)[:max_cases]
        with open_writer(self.path) as writer:
            driver = Driver(
                run,
                writer,
                self.start,
                self,
                hosts=("127.0.0.1",),
                facts=self.facts,
                began=time.monotonic(),
            )
            driver.drive(pending)
        lines = []
        for record in self.records():
            number = record.case.params["number"]
            lines.append(f"launch {record.launch} case {number}: {record.status}")
        return lines

    def records(self) -> list[Record]:
        return list(read_records(self.path / "records.jsonl"))

    def reasons(self) -> list[str]:
        return [record.reason for record in self.records()]

    def notes(self) -> list[list[str]]:
        return [record.notes for record in self.records()]

    def environment(self) -> dict[str, Any]:
        environment = load_run(self.path).info.environment
        assert environment is not None
        return environment

    def complete(self, launcher: FakeLauncher, rank: FakeRank) -> None:
        """Measure the whole job, and keep the job."""
        rank.say_hello()
        job = rank.receive_job()
        if rank.rank == 0:
            self.jobs.append(job)
        finish_visits(rank, [make_outcome()] * len(job.visits))


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    return lambda cases, *acts, **fields: FakeRun(tmp_path, make_plan(cases, **fields), *acts)


def finish_visits(rank: FakeRank, outcomes: Sequence[Outcome]) -> None:
    for number, outcome in enumerate(outcomes):
        rank.start(number)
        if rank.rank == 0:
            rank.finish(number, outcome)
    rank.say(Done())


def finish_with(*outcomes: Outcome) -> Act:
    """Return an act whose visits end with these outcomes in turn."""

    def act(launcher: FakeLauncher, rank: FakeRank) -> None:
        rank.say_hello()
        job = rank.receive_job()
        finish_visits(rank, outcomes[: len(job.visits)])

    return act


def fail_at(number: int, fail: Act) -> Act:
    """Return an act that completes the cases before this one, in which it fails."""

    def act(launcher: FakeLauncher, rank: FakeRank) -> None:
        rank.say_hello()
        for index, case in enumerate(rank.receive_job().plan.cases):
            rank.start(index)
            if case.params["number"] == number:
                fail(launcher, rank)
                return
            if rank.rank == 0:
                rank.finish(index)
        rank.say(Done())

    return act


def kill_rank_1(launcher: FakeLauncher, rank: FakeRank) -> None:
    if rank.rank == 1:
        launcher.exit_codes = {1: -9}
        rank.die()
    wait_for_the_driver(launcher, rank)


def die_at(number: int) -> Act:
    return fail_at(number, kill_rank_1)


def wait_for_the_driver(launcher: FakeLauncher, rank: FakeRank) -> None:
    rank.client.hear()


def do_not_start(launcher: FakeLauncher, rank: FakeRank) -> None:
    """End without a message."""


def place_on(*hosts: str) -> Callable[[int, int], dict[str, Any]]:
    def hello(start: int, rank: int) -> dict[str, Any]:
        place = RankPlace(host=hosts[rank], cpus=(0,), numa_nodes=(0,))
        return {"host": hosts[rank], "place": place, "meeting": "" if rank else "n1:77"}

    return hello


# --- records ---


def test_driver_records_each_case_of_each_launch(make_run: MakeRun) -> None:
    run = make_run(CASES[:2], launches=2)
    assert run.drive() == [
        "launch 0 case 0: ok",
        "launch 0 case 1: ok",
        "launch 1 case 0: ok",
        "launch 1 case 1: ok",
    ]
    assert run.launches == [(1, 2, 2), (2, 2, 2)]
    assert run.starts == [0, 1]
    run.drive()
    assert len(run.reasons()) == 4
    assert run.starts == [0, 1], "a complete run starts no ranks"


def test_record_contains_the_outcome(make_run: MakeRun) -> None:
    outcome = make_outcome(
        2e-3,
        details={"loss": float("nan")},
        notes=["of the case"],
        raw=b"npz",
        timeline=b"spans",
        wall_seconds=0.25,
    )
    skipped = Outcome(status="skipped", reason="no such dtype")
    run = make_run(CASES[:2], finish_with(outcome, skipped), notes=("of the plan",))
    run.drive()
    record, skipped_record = run.records()
    assert record.case == CASES[0]
    assert record.samples.values == outcome.seconds
    assert record.metrics["time"].value == 2e-3
    assert record.noise is not None
    assert record.check == outcome.check
    assert record.stop == outcome.stop
    assert record.details == {"loss": None}
    assert record.notes == ["of the plan", "of the case"]
    assert record.seconds == 0.25
    assert (record.world.size, record.world.backend) == (2, "gloo")
    assert (run.path / "samples" / f"{CASES[0].id}-0.npz").read_bytes() == b"npz"
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert b"spans" in [path.read_bytes() for path in files]
    assert (skipped_record.status, skipped_record.reason) == ("skipped", "no such dtype")
    assert skipped_record.metrics == {}


def test_run_records_seconds_and_load_of_launches(make_run: MakeRun) -> None:
    run = make_run(CASES[:1], launches=2)
    run.hello = lambda start, rank: {"host": "n2"} if (start, rank) == (1, 1) else {}
    began = time.monotonic()
    run.drive()
    launches = load_run(run.path).info.launches
    assert [entry.launch for entry in launches] == [0, 1]
    assert 0 < sum(entry.seconds for entry in launches) <= time.monotonic() - began
    assert launches[0].load is not None
    assert launches[1].load is None, "ranks on another host have another load"


def test_environment_is_split_by_rank_and_launch(make_run: MakeRun) -> None:
    kernels = ["6.1", "6.2"]
    run = make_run(CASES[:1], launches=2)
    run.hello = lambda start, rank: {
        "environment": {"host": {"kernel": kernels[start]}, "process": {"affinity": rank}}
    }
    run.drive()
    assert run.environment()["host"] == {"kernel": "6.1"}
    first, second = run.records()
    assert first.environment == {
        "rank 0": {"process": {"affinity": 0}},
        "rank 1": {"process": {"affinity": 1}},
    }
    assert second.environment["changed"] == {"host.kernel": ["6.1", "6.2"]}


def test_hosts_of_ranks_reach_the_job_and_the_run(make_run: MakeRun) -> None:
    run = make_run(CASES[:1])
    run.hello = place_on("n1", "n2")
    run.facts = {"slurm": {"job": "17"}}
    run.drive()
    [job] = run.jobs
    assert job.hosts == ("n1", "n2")
    assert job.meeting == "n1:77"
    assert run.records()[0].world.nodes == 2
    environment = run.environment()
    assert environment["hosts"] == ["n1", "n2"]
    assert environment["slurm"] == {"job": "17"}
    assert environment["locality"]["0-1"] == "other node"


# --- several visits of a case ---


def visit_in_order(monkeypatch: pytest.MonkeyPatch, *visits: int) -> None:
    def order(cases: list[Case], *_: object) -> tuple[list[int], list[int]]:
        return [place for place in visits if place < len(cases)], []

    monkeypatch.setattr(module, "order_of_visits", order)


def visited(*seconds: float, more: bool = False) -> Outcome:
    return replace(make_outcome(), seconds=list(seconds), visits=[1] * len(seconds), more=more)


def test_case_is_recorded_after_its_last_visit(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    visit_in_order(monkeypatch, 0, 1, 1, 0)
    outcomes = [visited(1.0, more=True), visited(2.0, more=True), visited(2, 2), visited(1, 1)]
    run = make_run(CASES[:2], finish_with(*outcomes))
    assert run.drive() == ["launch 0 case 1: ok", "launch 0 case 0: ok"]
    assert [record.samples.values for record in run.records()] == [[2, 2], [1, 1]]


@pytest.mark.parametrize(
    ("can_restart", "values", "stop"),
    [(True, [1e-3] * 20, "precision"), (False, [7.0], "budget")],
)
def test_case_of_a_broken_launch_is_measured_again_or_kept(
    make_run: MakeRun,
    monkeypatch: pytest.MonkeyPatch,
    can_restart: bool,
    values: list[float],
    stop: str,
) -> None:
    def die_in_second_visit(launcher: FakeLauncher, rank: FakeRank) -> None:
        rank.say_hello()
        rank.receive_job()
        rank.start(0)
        if rank.rank == 0:
            rank.finish(0, visited(7.0, more=True))
        rank.start(1)
        kill_rank_1(launcher, rank)

    visit_in_order(monkeypatch, 0, 1)
    run = make_run(CASES[:2])
    run.acts = (die_in_second_visit, run.complete)
    run.can_restart = can_restart
    assert run.drive() == ["launch 0 case 1: failed", "launch 0 case 0: ok"]
    record = run.records()[1]
    assert record.samples.values == values
    assert record.stop == stop


def test_partial_records_are_written_during_a_launch(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    visit_in_order(monkeypatch, 0, 1, 0, 1)
    monkeypatch.setattr(module, "_KEPT_SECONDS", 0.0)
    outcomes = [visited(1.0, more=True), visited(2.0, more=True), visited(1, 1), visited(2, 2)]
    run = make_run(CASES[:2], finish_with(*outcomes))
    on_disk: list[list[list[float]]] = []
    run.on_visit = lambda: on_disk.append([record.samples.values for record in run.records()])
    run.drive()
    assert [1.0] in on_disk[2]
    complete = load_run(run.path)
    assert [record.samples.values for record in complete.records] == [[1, 1], [2, 2]]
    assert remaining(complete) == ()


# --- faults ---


def test_dead_rank_ends_its_case_only(make_run: MakeRun) -> None:
    run = make_run(CASES, die_at(1))
    assert run.drive() == [
        "launch 0 case 0: ok",
        "launch 0 case 1: failed",
        "launch 0 case 2: ok",
        "launch 0 case 3: ok",
    ]
    failed = run.records()[1]
    assert failed.reason == "rank 1 died: ended by SIGKILL"
    assert [state.state for state in failed.ranks] == ["alive", "died: ended by SIGKILL"]
    assert failed.metrics == {}
    assert run.starts == [0, 1]


def test_failed_case_is_skipped_in_later_launches(make_run: MakeRun) -> None:
    run = make_run(CASES[:2], die_at(0), launches=2)
    assert run.drive() == [
        "launch 0 case 0: failed",
        "launch 0 case 1: ok",
        "launch 1 case 0: skipped",
        "launch 1 case 1: ok",
    ]
    assert "rank 1 died: ended by SIGKILL" in run.records()[2].reason

    wrong = make_run(CASES[:1], finish_with(WRONG), launches=3)
    assert wrong.drive() == [
        "launch 0 case 0: wrong",
        "launch 1 case 0: skipped",
        "launch 2 case 0: skipped",
    ]
    assert wrong.starts == [0], "a launch without a case starts no ranks"


def test_failed_start_is_retried_once(make_run: MakeRun) -> None:
    run = make_run(CASES[:1])
    run.acts = (do_not_start, run.complete)
    assert run.drive() == ["launch 0 case 0: ok"]

    run = make_run(CASES[:1], do_not_start, launches=2)
    assert run.drive() == ["launch 0 case 0: failed", "launch 1 case 0: skipped"]
    assert "ended before every rank had started" in run.records()[0].reason
    assert run.starts == [0, 1]


@pytest.mark.parametrize(
    ("act", "lines"),
    [
        (die_at(1), ["launch 0 case 0: ok", "launch 0 case 1: failed"]),
        (do_not_start, [f"launch 0 case {number}: failed" for number in range(4)]),
    ],
)
def test_ranks_of_another_launcher_are_not_restarted(
    make_run: MakeRun, act: Act, lines: list[str]
) -> None:
    run = make_run(CASES, act)
    run.can_restart = False
    assert run.drive() == lines
    assert run.starts == [0]


def test_process_left_by_ranks_is_noted(make_run: MakeRun) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        run = make_run(CASES[:2], launches=2)
        run.acts = (die_at(0), run.complete)
        pids = {(0, 1): process.pid}
        run.hello = lambda start, rank: {"pid": pids.get((start, rank), os.getpid())}
        run.drive()
        process.kill()
    first, second, *others = run.notes()
    assert [first, *others] == [[], [], []]
    assert f"rank 1 (process {process.pid} is sleeping)" in second[0]


@pytest.mark.full
def test_silent_host_is_named_and_not_retried(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RETRY_SECONDS", 0.5)

    def answer_from_rank_0(launcher: FakeLauncher, rank: FakeRank) -> None:
        if rank.rank == 0:
            rank.answer(make_status())
        wait_until(lambda: launcher.ended_ranks is not None)

    acts = (fail_at(1, answer_from_rank_0), wait_for_the_driver)
    run = make_run(CASES[:3], *acts, timeout_seconds=1.0)
    run.hello = place_on("n1", "n2")
    assert run.drive() == [
        "launch 0 case 0: ok",
        "launch 0 case 1: hang",
        "launch 0 case 2: failed",
    ]
    _, hung, failed = run.records()
    assert hung.reason == "no end within 1 s: rank 1 (n2) did not arrive"
    assert "n2 did not answer" in failed.reason
    assert len(run.starts) == 2


# --- the budget ---


def test_budget_is_shared_by_the_remaining_launches(make_run: MakeRun) -> None:
    run = make_run(CASES[:1], launches=3, budget_seconds=90.0)
    run.drive()
    assert [job.budget_seconds for job in run.jobs] == pytest.approx([30, 45, 90], abs=5)
    assert run.messages == []


def test_launches_beyond_the_budget_are_left_out(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = make_outcome(wall_seconds=20.0)
    run = make_run(CASES[:2], finish_with(outcome, outcome), launches=5, budget_seconds=120.0)
    # The driver's clock advances with the records, by 20 s per case.
    clock = SimpleNamespace(
        monotonic=lambda: time.monotonic() + 20.0 * len(run.reasons()), sleep=time.sleep
    )
    monkeypatch.setattr(module, "time", clock)
    run.drive()
    assert run.reasons() == [""] * 6 + [LEFT_OUT] * 4
    [message] = run.messages
    assert "3 of 5 launches" in message
    assert "--budget" in message


def test_resumed_run_measures_the_pending_cases(make_run: MakeRun) -> None:
    run = make_run(CASES[:3], launches=2)
    (run.path / "logs" / "gang-0").mkdir()
    run.drive(2)
    assert run.drive() == [
        "launch 0 case 0: ok",
        "launch 0 case 1: ok",
        "launch 0 case 2: ok",
        "launch 1 case 0: ok",
        "launch 1 case 1: ok",
        "launch 1 case 2: ok",
    ]
    assert [len(job.plan.cases) for job in run.jobs] == [2, 1, 3]
    assert run.starts == [1, 1, 2], "the existing log folder is not reused"


# --- where the ranks are ---


def make_hellos(hosts: str, cpus: list[tuple[int, ...]]) -> list[Hello]:
    """Return the hellos of ranks on hosts with names of one letter, promised two CPUs each."""
    hellos = []
    for rank, (host, own_cpus) in enumerate(zip(hosts, cpus, strict=True)):
        hello = Hello(
            rank=rank,
            size=len(hosts),
            host=host,
            pid=1,
            environment={"variables": {"SLURM_CPUS_PER_TASK": "2"}},
            place=RankPlace(host=host, cpus=own_cpus, numa_nodes=(0,)),
        )
        hellos.append(hello)
    return hellos


@pytest.mark.parametrize(
    ("placement", "hosts", "fact"),
    [
        ("block", "abab", "ranks are on a, b, a, b"),
        ("cyclic", "abba", "ranks are on a, b, b, a"),
        ("block", "aaab", "3 on a, 1 on b"),
    ],
)
def test_unexpected_placement_is_reported(placement: Any, hosts: str, fact: str) -> None:
    layout = NodeLayout(nodes=2, ntasks_per_node=2, placement=placement)
    [warning] = placement_warnings(layout, make_hellos(hosts, [(0, 1)] * 4))
    assert fact in warning


@pytest.mark.parametrize(("placement", "hosts"), [("block", "bbaa"), ("cyclic", "baba")])
def test_expected_placement_is_not_reported(placement: Any, hosts: str) -> None:
    layout = NodeLayout(nodes=2, ntasks_per_node=2, placement=placement)
    assert placement_warnings(layout, make_hellos(hosts, [(0, 1)] * 4)) == ()


def test_missing_and_shared_cpus_are_reported() -> None:
    hellos = make_hellos("aabb", [(3,), (3,), (0, 1), (2, 3)])
    first, second, shared = placement_warnings(NodeLayout(nodes=2, ntasks_per_node=2), hellos)
    assert first == "rank 0 on a may use CPUs 3; SLURM_CPUS_PER_TASK is 2"
    assert second.startswith("rank 1 on a")
    assert shared == "2 ranks share CPU 3 of a"


# --- metrics of an outcome ---


def compute_metrics(seconds: list[float], *work: Work, **fields: Any) -> dict[str, MetricValue]:
    visits = [1] * len(seconds)
    outcome = Outcome(status="ok", seconds=seconds, visits=visits, work=list(work), **fields)
    return metrics_of(outcome)


def test_time_is_the_median_and_rate_is_work_over_time() -> None:
    seconds = [0.001 * number for number in range(1, 22)]
    metrics = compute_metrics(seconds, Work(name="algbw", amount=4e6, unit="B/s"))
    time = metrics["time"]
    rate = metrics["algbw"]
    assert (time.unit, time.better) == ("s", "lower")
    assert (rate.unit, rate.better) == ("B/s", "higher")
    assert time.value == pytest.approx(0.011)
    assert rate.value == pytest.approx(4e6 / 0.011)
    assert time.low is not None
    assert time.high is not None
    assert time.low < 0.011 < time.high
    assert rate.low == pytest.approx(4e6 / time.high)
    assert rate.high == pytest.approx(4e6 / time.low)


def test_percentiles_require_enough_iterations() -> None:
    seconds = np.random.default_rng(0).exponential(1e-3, MIN_FOR_P99).tolist()
    metrics = compute_metrics(seconds, headline="step_time")
    assert metrics["step_time_p99"].value == pytest.approx(np.quantile(seconds, 0.99))
    assert metrics["step_time_q10"].value == pytest.approx(np.quantile(seconds, 0.10))
    assert list(compute_metrics(seconds[1:])) == ["time", "time_q10"]
    assert list(compute_metrics(seconds[: MIN_FOR_Q10 - 1])) == ["time"]


def test_issue_wait_skew_and_transfer_are_medians() -> None:
    metrics = compute_metrics(
        [1e-3] * 3,
        issue_seconds=[3e-4] * 3,
        skew_seconds=[1e-6, 2e-6, 9e-6],
        transfer_seconds=[5e-4, 4e-4, 1e-4],
    )
    values = {name: metric.value for name, metric in metrics.items()}
    expected = {
        "time": 1e-3,
        "issue_time": 3e-4,
        "wait_time": 7e-4,
        "skew": 2e-6,
        "transfer": 4e-4,
    }
    assert values == pytest.approx(expected)


def test_metrics_require_samples() -> None:
    metric = MetricValue(value=4e-4, unit="s", better="lower", method="maximum over ranks")
    work = Work(name="algbw", amount=1.0, unit="B/s")
    assert compute_metrics([], work, explained={"compute": metric}) == {}
    assert compute_metrics([1e-3], explained={"compute": metric})["compute"] == metric


@pytest.mark.parametrize(
    ("seconds", "amount", "rate"),
    [
        ([0.0] * 10, 4e6, (None, None, None)),
        ([1e-3] * 10, 0.0, (None, None, None)),
        # The interval of the time touches zero.
        ([0.0] * 9 + [1.0] * 11, 4e6, (4e6, 4e6, None)),
    ],
)
def test_rate_of_no_time_or_no_work_is_unknown(
    seconds: list[float], amount: float, rate: tuple[float | None, ...]
) -> None:
    metric = compute_metrics(seconds, Work(name="algbw", amount=amount))["algbw"]
    assert (metric.value, metric.low, metric.high) == rate


@pytest.mark.parametrize(
    ("last_in", "skew_seconds", "late_rank", "share"),
    [
        ([1, 1, 0, 1], [1e-3] * 4, 1, 0.75),
        # Skews below the uncertainty of the clock (5 us) do not count.
        ([1, 1], [1e-6, 2e-6], None, None),
        ([1, 1, 1, 0], [5e-6, 5e-6, 5e-6, 6e-6], 0, 0.25),
    ],
)
def test_blame_names_the_rank_most_often_last(
    last_in: list[int], skew_seconds: list[float], late_rank: int | None, share: float | None
) -> None:
    last_out = [0] * len(last_in)
    arrival = blame(last_in, last_out, skew_seconds, "ping-pong", 5e-6)
    assert arrival.late_rank == late_rank
    assert arrival.share == share
    assert (arrival.last_out_rank, arrival.last_out_share) == (0, 1.0)
