"""The driver: a record for each case, the budget, failed ranks, and metrics of outcomes."""

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
from parbench.bench.launch.control_channel import Done, Hello, Job, Outcome, Work
from parbench.bench.launch.driver import Driver, metrics_of, placement_warnings, remaining
from parbench.bench.machine.environment import RankPlace
from parbench.bench.machine.slurm_allocation import NodeLayout
from parbench.bench.plan.cases import Case
from parbench.bench.plan.plan import Measure, Plan, sampling_seconds
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import Record, SkipReason, make_arrival, read_records
from parbench.bench.results.runs import create_run, load_run, open_writer
from parbench.bench.results.stats import MIN_ITERATIONS_FOR_P99, MIN_ITERATIONS_FOR_Q10
from tests.support.fakes import (
    FakeLauncher,
    FakeRank,
    case_order,
    make_fake_case,
    make_outcome,
    make_plan,
    time_limit,
)

CASES = [make_fake_case(number) for number in range(4)]

Act = Callable[[FakeLauncher, FakeRank], None]
MakeRun = Callable[..., "FakeRun"]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(monitor_module, "_GRACE_SECONDS", 0.2)
    monkeypatch.setattr(monitor_module, "_SHORT_GRACE", 0.2)
    monkeypatch.setattr(monitor_module, "_TICK_SECONDS", 0.02)
    monkeypatch.setattr(module, "_FAREWELL_SECONDS", 1.0)
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
        self.num_starts = 0
        self.jobs: list[Job] = []
        self.messages: list[str] = []
        self.hello: Callable[[int, int], dict[str, Any]] = lambda start, rank: {}
        self.on_visit: Callable[[], None] = lambda: None
        self.can_restart = True

    def launch(self, number: int, of: int, cases: int) -> None:
        """Ignore the start of a launch."""

    def visit(self, case: Case, done: float) -> None:
        self.on_visit()

    def tell(self, sentence: str) -> None:
        self.messages.append(sentence)

    def record(self, record: Record) -> None:
        assert self.records()[-1].case == record.case, "a record is on disk at once"

    def start(self, number: int, variables: Mapping[str, str]) -> FakeLauncher:
        launcher = FakeLauncher(can_restart=self.can_restart)
        start = self.num_starts
        self.num_starts += 1
        ranks = []
        for rank in range(self.size):
            ranks.append(FakeRank(variables, rank, self.size, **self.hello(start, rank)))
        launcher.run(ranks, self.acts[min(start, len(self.acts) - 1)])
        return launcher

    def drive(self) -> list[str]:
        """Measure the pending cases, and return a line for each record of the run."""
        run = load_run(self.path)
        with open_writer(self.path) as writer:
            driver = Driver(
                run,
                writer,
                self.start,
                self,
                hosts=("127.0.0.1",),
                facts={},
                began=time.monotonic(),
            )
            driver.drive(remaining(run))
        lines = []
        for record in self.records():
            number = record.case.params["number"]
            lines.append(f"launch {record.launch} case {number}: {record.status}")
        return lines

    def records(self) -> list[Record]:
        return list(read_records(self.path / "records.jsonl"))

    def samples(self) -> list[list[float]]:
        return [record.samples.values for record in self.records()]

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


def kill_rank_1(launcher: FakeLauncher, rank: FakeRank) -> None:
    if rank.rank == 1:
        launcher.exit_codes = {1: -9}
        rank.die()
    rank.client.hear()


def die_at(number: int) -> Act:
    """Return an act that completes the cases before this one, in which rank 1 is killed."""

    def act(launcher: FakeLauncher, rank: FakeRank) -> None:
        rank.say_hello()
        for index, case in enumerate(rank.receive_job().plan.cases):
            rank.start(index)
            if case.params["number"] == number:
                kill_rank_1(launcher, rank)
                return
            if rank.rank == 0:
                rank.finish(index)
        rank.say(Done())

    return act


def do_not_start(launcher: FakeLauncher, rank: FakeRank) -> None:
    """End without a message."""


# --- records ---


def test_driver_records_each_case_of_each_launch(make_run: MakeRun) -> None:
    run = make_run(CASES[:2], launches=2)
    assert run.drive() == [
        "launch 0 case 0: ok",
        "launch 0 case 1: ok",
        "launch 1 case 0: ok",
        "launch 1 case 1: ok",
    ]
    assert run.num_starts == 2
    launches = load_run(run.path).info.launches
    assert [info.launch for info in launches] == [0, 1]


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
    assert record.check == outcome.check
    assert record.stop == outcome.stop
    assert record.details == {"loss": None}
    assert record.notes == ["of the plan", "of the case"]
    assert record.seconds == 0.25
    assert record.world.size == 2
    assert (run.path / "samples" / f"{CASES[0].id}-0.npz").read_bytes() == b"npz"
    contents = [path.read_bytes() for path in run.path.rglob("*") if path.is_file()]
    assert b"spans" in contents
    assert skipped_record.status == "skipped"
    assert skipped_record.reason == "no such dtype"
    assert skipped_record.metrics == {}


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


def test_run_names_the_hosts_of_its_ranks(make_run: MakeRun) -> None:
    def hello(start: int, rank: int) -> dict[str, Any]:
        host = ["n1", "n2"][rank]
        return {"host": host, "place": RankPlace(host=host, cpus=(0,), numa_nodes=(0,))}

    run = make_run(CASES[:1])
    run.hello = hello
    run.drive()
    assert run.records()[0].world.nodes == 2
    assert run.environment()["hosts"] == ["n1", "n2"]
    assert run.environment()["locality"]["0-1"] == "other node"


# --- several visits of a case ---


def visit_in_order(monkeypatch: pytest.MonkeyPatch, *visits: int) -> None:
    monkeypatch.setattr(module, "order_of_visits", lambda cases, *_: ([*visits], []))


def make_visits(*seconds: float, more: bool = False) -> Outcome:
    """Return the outcome of a case after visits with one sample each."""
    return replace(make_outcome(), seconds=list(seconds), visits=[1] * len(seconds), more=more)


def test_case_is_recorded_after_its_last_visit(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    visit_in_order(monkeypatch, 0, 1, 1, 0)
    first_visits = [make_visits(1.0, more=True), make_visits(2.0, more=True)]
    last_visits = [make_visits(2, 2), make_visits(1, 1)]
    run = make_run(CASES[:2], finish_with(*first_visits, *last_visits))
    assert run.drive() == ["launch 0 case 1: ok", "launch 0 case 0: ok"]
    assert run.samples() == [[2, 2], [1, 1]]


@pytest.mark.parametrize(("can_restart", "stop"), [(True, "precision"), (False, "budget")])
def test_case_of_a_broken_launch_is_repeated_or_kept(
    make_run: MakeRun, can_restart: bool, stop: str
) -> None:
    def die_in_second_visit(launcher: FakeLauncher, rank: FakeRank) -> None:
        rank.say_hello()
        assert rank.receive_job().visits == [0, 1]
        rank.start(0)
        if rank.rank == 0:
            rank.finish(0, make_visits(7.0, more=True))
        rank.start(1)
        kill_rank_1(launcher, rank)

    run = make_run(CASES[:2])
    run.acts = (die_in_second_visit, run.complete)
    run.can_restart = can_restart
    assert run.drive() == ["launch 0 case 1: failed", "launch 0 case 0: ok"]
    assert run.records()[1].stop == stop


def test_partial_records_are_written_during_a_launch(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    visit_in_order(monkeypatch, 0, 1, 0, 1)
    monkeypatch.setattr(module, "_KEPT_SECONDS", 0.0)
    first_visits = [make_visits(1.0, more=True), make_visits(2.0, more=True)]
    last_visits = [make_visits(1, 1), make_visits(2, 2)]
    run = make_run(CASES[:2], finish_with(*first_visits, *last_visits))
    samples_at_visits: list[list[list[float]]] = []
    run.on_visit = lambda: samples_at_visits.append(run.samples())
    run.drive()
    assert [1.0] in samples_at_visits[2]
    records = load_run(run.path).records
    assert [record.samples.values for record in records] == [[1, 1], [2, 2]]


# --- faults ---


def test_dead_rank_ends_its_case_only(make_run: MakeRun) -> None:
    run = make_run(CASES[:3], die_at(1))
    assert run.drive() == [
        "launch 0 case 0: ok",
        "launch 0 case 1: failed",
        "launch 0 case 2: ok",
    ]
    failed = run.records()[1]
    assert failed.reason == "rank 1 died: ended by SIGKILL"
    assert [state.state for state in failed.ranks] == ["alive", "died: ended by SIGKILL"]
    assert failed.metrics == {}


def test_failed_case_is_skipped_in_later_launches(make_run: MakeRun) -> None:
    run = make_run(CASES[:2], die_at(0), launches=2)
    assert run.drive() == [
        "launch 0 case 0: failed",
        "launch 0 case 1: ok",
        "launch 1 case 0: skipped",
        "launch 1 case 1: ok",
    ]
    assert "rank 1 died: ended by SIGKILL" in run.records()[2].reason


def test_failed_start_is_retried_once(make_run: MakeRun) -> None:
    run = make_run(CASES[:1])
    run.acts = (do_not_start, run.complete)
    assert run.drive() == ["launch 0 case 0: ok"]

    run = make_run(CASES[:1], do_not_start)
    assert run.drive() == ["launch 0 case 0: failed"]
    assert "ended before every rank had started" in run.records()[0].reason
    assert run.num_starts == 2


def test_ranks_of_another_launcher_are_not_restarted(make_run: MakeRun) -> None:
    run = make_run(CASES, die_at(1))
    run.can_restart = False
    assert run.drive() == ["launch 0 case 0: ok", "launch 0 case 1: failed"]
    assert run.num_starts == 1


# --- the budget ---


def test_time_of_named_cases_ends_a_repetition(make_run: MakeRun) -> None:
    measure = Measure(seconds_per_case=0.3)
    run = make_run(CASES[:2], launches=3, budget_seconds=90.0, measure=measure)
    run.drive()
    seconds = sampling_seconds(CASES[:2], measure)
    assert [job.budget_seconds for job in run.jobs] == pytest.approx([seconds] * 3, abs=0.2)


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
        monotonic=lambda: time.monotonic() + 20.0 * len(run.records()), sleep=time.sleep
    )
    monkeypatch.setattr(module, "time", clock)
    run.drive()
    reasons = [record.skip_reason for record in run.records()]
    assert reasons == [None] * 6 + [SkipReason.OUT_OF_BUDGET] * 4
    [message] = run.messages
    assert "3 of 5 launches" in message
    assert "--budget" in message


# --- where the ranks are ---


def make_hellos(hosts: str, *cpus: tuple[int, ...]) -> list[Hello]:
    """Return the hellos of ranks on hosts with names of one letter, promised two CPUs each."""
    hellos = []
    for rank, host in enumerate(hosts):
        own_cpus = cpus[rank] if cpus else (0, 1)
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
    ("distribution", "hosts", "fact"),
    [
        ("block", "abab", "ranks are on a, b, a, b"),
        ("cyclic", "abba", "ranks are on a, b, b, a"),
        ("block", "aaab", "3 on a, 1 on b"),
    ],
)
def test_unexpected_distribution_is_reported(distribution: Any, hosts: str, fact: str) -> None:
    layout = NodeLayout(nodes=2, ntasks_per_node=2, distribution=distribution)
    [warning] = placement_warnings(layout, make_hellos(hosts))
    assert fact in warning


@pytest.mark.parametrize(("distribution", "hosts"), [("block", "bbaa"), ("cyclic", "baba")])
def test_expected_distribution_is_not_reported(distribution: Any, hosts: str) -> None:
    layout = NodeLayout(nodes=2, ntasks_per_node=2, distribution=distribution)
    assert placement_warnings(layout, make_hellos(hosts)) == ()


def test_missing_and_shared_cpus_are_reported() -> None:
    hellos = make_hellos("aabb", (3,), (3,), (0, 1), (2, 3))
    layout = NodeLayout(nodes=2, ntasks_per_node=2)
    first, second, shared = placement_warnings(layout, hellos)
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
    assert time.unit == "s"
    assert rate.better == "higher"
    assert time.value == pytest.approx(0.011)
    assert rate.value == pytest.approx(4e6 / 0.011)
    assert time.low is not None
    assert time.high is not None
    assert time.low < 0.011 < time.high
    assert rate.low == pytest.approx(4e6 / time.high)
    assert rate.high == pytest.approx(4e6 / time.low)


def test_percentiles_require_enough_iterations() -> None:
    seconds = np.random.default_rng(0).exponential(1e-3, MIN_ITERATIONS_FOR_P99).tolist()
    metrics = compute_metrics(seconds, headline="step_time")
    assert metrics["step_time_p99"].value == pytest.approx(np.quantile(seconds, 0.99))
    assert metrics["step_time_q10"].value == pytest.approx(np.quantile(seconds, 0.10))
    assert list(compute_metrics(seconds[1:])) == ["time", "time_q10"]
    assert list(compute_metrics(seconds[: MIN_ITERATIONS_FOR_Q10 - 1])) == ["time"]


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


@pytest.mark.parametrize(("seconds", "amount"), [(0.0, 4e6), (1e-3, 0.0)])
def test_rate_of_no_time_or_no_work_is_unknown(seconds: float, amount: float) -> None:
    metrics = compute_metrics([seconds] * 10, Work(name="algbw", amount=amount))
    assert metrics["algbw"].value is None


# --- arrivals ---


@pytest.mark.parametrize(
    ("last_in", "late_rank", "share"), [([1, 1, 0, 1], 1, 0.75), ([0, 0, 1, 1], 0, 0.5)]
)
def test_blame_names_the_rank_most_often_last(
    last_in: list[int], late_rank: int, share: float
) -> None:
    arrival = make_arrival(last_in, [0] * 4, [1e-3] * 4, "ping-pong", 5e-6)
    assert arrival.late_rank == late_rank
    assert arrival.share == share
    assert arrival.last_out_rank == 0
    assert arrival.last_out_share == 1.0


def test_blame_ignores_skews_below_the_clock_uncertainty() -> None:
    nobody = make_arrival([1, 1], [0, 0], [1e-6, 2e-6], "ping-pong", 5e-6)
    assert nobody.late_rank is None
    arrival = make_arrival([1, 1, 1, 0], [0] * 4, [5e-6, 5e-6, 5e-6, 6e-6], "ping-pong", 5e-6)
    assert arrival.late_rank == 0
    assert arrival.share == 0.25
