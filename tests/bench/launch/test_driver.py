"""The driver: a record for each case, the budget, failed ranks, and metrics of outcomes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from msgspec.structs import replace
from rich.console import Console

from parbench.bench.launch import driver as module
from parbench.bench.launch import ranks as ranks_module
from parbench.bench.launch.display import Display
from parbench.bench.launch.driver import Driver
from parbench.bench.launch.messages import Hello, Job, Outcome
from parbench.bench.launch.processes import get_process_space
from parbench.bench.launch.recorder import Recorder, find_misplacements
from parbench.bench.machine.environment import RankPlace
from parbench.bench.plan.cases import make_case
from parbench.bench.plan.plan import Plan, parse_fault
from parbench.bench.results.records import Record, Samples, read_records
from parbench.bench.results.runs import (
    RecordWriter,
    create_run,
    load_run,
    open_writer,
    utc_now,
)
from tests.support.fakes import (
    Script,
    ScriptedRanks,
    complete_blocks,
    complete_job,
    make_fake_case,
    make_hello,
    make_outcome,
    make_plan,
    make_single_blocks,
    time_limit,
)

CASES = [make_fake_case(number) for number in range(4)]

MakeRun = Callable[..., "FakeRun"]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ranks_module, "_GRACE_SECONDS", 0.0)
    monkeypatch.setattr(ranks_module, "_POLL_SECONDS", 0.001)
    monkeypatch.setattr(module, "make_blocks", make_single_blocks)
    with time_limit(60):
        yield


class FakeRun:
    """A run folder with scripted ranks.

    The ranks of each start follow one of ``scripts`` in turn, or do not start for None. The last
    script is repeated.
    """

    def __init__(self, out: Path, plan: Plan, *scripts: Script | None) -> None:
        self.path = create_run(out, plan, "0.1.0")[0]
        self.size = plan.nproc
        self.scripts: Sequence[Script | None] = scripts or (complete_job,)
        self.starts: list[ScriptedRanks] = []
        self.hello: Callable[[int, int], dict[str, Any]] = lambda start, rank: {}

    def check_record(self, record: Record) -> None:
        assert self.records()[-1].case == record.case, "a record is on disk at once"

    def start(self, folder: Path, variables: Mapping[str, str]) -> ScriptedRanks:
        start = len(self.starts)
        script = self.scripts[min(start, len(self.scripts) - 1)]
        ranks = range(self.size) if script else []
        hellos = [make_hello(rank, **self.hello(start, rank)) for rank in ranks]
        self.starts.append(ScriptedRanks(self.size, folder, hellos, script or complete_job))
        self.starts[-1].has_ended = script is None
        self.starts[-1].variables = variables
        return self.starts[-1]

    def drive(self) -> list[str]:
        """Measure the pending cases, and return a line for each record of the run."""
        run = load_run(self.path)
        with (
            open_writer(self.path) as writer,
            Display(Console(quiet=True)) as display,
            mock.patch.object(display, "show_record", self.check_record),
        ):
            Driver(run, Recorder(run, writer), self.start, display).drive()
        lines = []
        for record in self.records():
            number = record.case.params["number"]
            lines.append(f"repetition {record.repetition} case {number}: {record.status}")
        return lines

    def records(self) -> list[Record]:
        return list(read_records(self.path / "records.jsonl"))

    def jobs(self) -> list[Job]:
        return [ranks.job for ranks in self.starts if ranks.job]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    return lambda cases, *scripts, **fields: FakeRun(
        tmp_path, make_plan(cases, **fields), *scripts
    )


def finish_with(*outcomes: Outcome) -> Script:
    """Return a script whose blocks end with these outcomes in turn."""
    return lambda ranks, job: complete_blocks(ranks, job, outcomes)


def die_at(number: int) -> Script:
    """Return a script that completes the cases before this one, in which rank 1 is killed."""

    def act(ranks: ScriptedRanks, job: Job) -> Iterator[None]:
        for case in job.plan.cases:
            if case.params["number"] == number:
                ranks.codes = {1: -9}
                return
            ranks.finish()
            yield
        ranks.complete(0, 1)
        ranks.has_ended = True

    return act


# --- records ---


def test_driver_records_each_case_of_each_repetition(make_run: MakeRun) -> None:
    run = make_run(CASES[:1], repetitions=2)
    assert run.drive() == ["repetition 0 case 0: ok", "repetition 1 case 0: ok"]
    assert len(run.starts) == 2
    repetitions = load_run(run.path).info.repetitions
    assert [info.repetition for info in repetitions] == [0, 1]


@pytest.mark.parametrize("num_spaces", [1, 2])
def test_load_needs_all_ranks_on_this_host(make_run: MakeRun, num_spaces: int) -> None:
    spaces = [get_process_space(), "that of another host of this name"]
    run = make_run(CASES[:1])
    run.hello = lambda start, rank: {"process_space": spaces[rank % num_spaces], "pid": 1 << 23}
    run.drive()
    [info] = load_run(run.path).info.repetitions
    assert (info.load is not None) == (num_spaces == 1)


def test_ranks_of_each_environment_are_interleaved(make_run: MakeRun) -> None:
    cases = [
        make_case("a.b", "c:d", {"number": number, "NCCL_ALGO": algorithm})
        for number, algorithm in enumerate(["Ring", "", "Ring"])
    ]
    run = make_run(cases, repetitions=2)
    run.drive()
    started = [ranks.variables["NCCL_ALGO"] for ranks in run.starts]
    assert started == ["Ring", "", "", "Ring"]
    measured = [[case.params["number"] for case in job.plan.cases] for job in run.jobs()]
    assert measured == [[0, 2], [1], [1], [0, 2]]


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
    run = make_run(
        CASES[:2],
        finish_with(outcome, skipped),
        notes=("of the plan",),
        injection=parse_fault("slow:1:10%", 2),
    )
    run.drive()
    record, skipped_record = run.records()
    assert record.case == CASES[0]
    assert record.samples.values == outcome.samples.values
    assert record.metrics["time"].value == 2e-3
    assert record.check == outcome.check
    assert record.stop == outcome.stop
    assert record.details == {"loss": None}
    assert record.notes == ["of the plan", "of the case"]
    assert record.seconds == 0.25
    assert record.injected == "slow:1:10%"
    assert record.world.size == 2
    assert (run.path / "samples" / f"{CASES[0].id}-0.npz").read_bytes() == b"npz"
    contents = [path.read_bytes() for path in run.path.rglob("*") if path.is_file()]
    assert b"spans" in contents
    assert skipped_record.status == "skipped"
    assert skipped_record.reason == "no such dtype"
    assert skipped_record.metrics == {}


def test_record_is_written_after_its_samples(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is interrupted between the two measures the case again when it is resumed."""
    monkeypatch.setattr(RecordWriter, "write", mock.Mock(side_effect=KeyboardInterrupt))
    run = make_run(CASES[:1], finish_with(make_outcome(raw=b"npz")))
    with pytest.raises(KeyboardInterrupt):
        run.drive()
    assert [path.read_bytes() for path in (run.path / "samples").iterdir()] == [b"npz"]


@pytest.mark.parametrize("hosts", [["n1", "n2"], ["n1", "n1"]])
def test_environment_is_split_by_rank_and_repetition(
    make_run: MakeRun, hosts: list[str]
) -> None:
    def hello(start: int, rank: int) -> dict[str, Any]:
        host = hosts[rank]
        kernel = ["6.1", "6.2"][start]
        return {
            "host": host,
            "place": RankPlace(host=host, boot_id=str(rank), cpus=(0,), numa_nodes=(0,)),
            "environment": {"host": {"kernel": kernel}, "process": {"affinity": rank}},
        }

    run = make_run(CASES[:1], repetitions=2)
    run.hello = hello
    run.drive()
    environment = load_run(run.path).info.environment or {}
    assert environment["host"] == {"kernel": "6.1"}
    assert environment["hosts"] == hosts
    assert environment["locality"]["0-1"] == "other node"
    first, second = run.records()
    assert first.world.nodes == 2
    assert first.environment == {
        "rank 0": {"process": {"affinity": 0}},
        "rank 1": {"process": {"affinity": 1}},
    }
    assert second.environment["changed"] == {"host.kernel": ["6.1", "6.2"]}


def test_ranks_with_slow_cpus_are_reported() -> None:
    def hello(rank: int, cpu: int, gpu_numa_node: int | None, boot_id: str = "1") -> Hello:
        place = RankPlace(
            host="a",
            boot_id=boot_id,
            cpus=(cpu,),
            numa_nodes=(0,),
            gpu_numa_node=gpu_numa_node,
        )
        return make_hello(rank, host="a", place=place)

    far, shared = find_misplacements([hello(0, 3, 0), hello(1, 3, 1), hello(2, 4, None)])
    assert far.startswith("rank 1: the CPUs are in another NUMA node than the GPU")
    assert shared == "2 ranks share CPU 3 of a"
    assert find_misplacements([hello(0, 3, 0), hello(1, 4, 0)]) == []
    assert find_misplacements([hello(0, 3, 0), hello(1, 3, 0, "2")]) == []


def test_record_has_the_time_at_which_its_case_began(make_run: MakeRun) -> None:
    before = utc_now()
    run = make_run(CASES[:2], die_at(1))
    run.drive()
    complete, failed = run.records()
    assert failed.status == "failed"
    assert before <= complete.started <= failed.started <= utc_now()


# --- several blocks of a case ---


def order_like(monkeypatch: pytest.MonkeyPatch, order: list[int]) -> None:
    monkeypatch.setattr(module, "make_blocks", lambda cases, seed: order)


def make_result(*seconds: float, more: bool = False) -> Outcome:
    """Return the outcome of a case after blocks with one sample each."""
    samples = Samples(values=list(seconds), samples_per_block=[1] * len(seconds))
    return replace(make_outcome(), samples=samples, more=more)


def test_case_is_recorded_after_its_last_block(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    order_like(monkeypatch, [0, 1, 1, 0])
    first_blocks = [make_result(1.0, more=True), make_result(2.0, more=True)]
    last_blocks = [make_result(2, 2), make_result(1, 1)]
    run = make_run(CASES[:2], finish_with(*first_blocks, *last_blocks))
    assert run.drive() == ["repetition 0 case 1: ok", "repetition 0 case 0: ok"]
    assert [record.samples.values for record in run.records()] == [[2, 2], [1, 1]]


def test_incomplete_case_of_broken_ranks_is_measured_again(make_run: MakeRun) -> None:
    run = make_run(CASES[:2], die_in_second_block, complete_job)
    assert run.drive() == ["repetition 0 case 1: failed", "repetition 0 case 0: ok"]
    assert run.records()[1].stop == "precision"


def die_in_second_block(ranks: ScriptedRanks, job: Job) -> Iterator[None]:
    """Leave case 0 with blocks to come, and kill rank 1 in case 1."""
    ranks.finish(make_result(7.0, more=True))
    yield
    ranks.codes = {1: -9}


# --- faults ---


def test_dead_rank_ends_its_case_which_is_not_tried_again(make_run: MakeRun) -> None:
    run = make_run(CASES[:3], die_at(1), complete_job, repetitions=2)
    assert run.drive() == [
        "repetition 0 case 0: ok",
        "repetition 0 case 1: failed",
        "repetition 0 case 2: ok",
        "repetition 1 case 1: skipped",
        "repetition 1 case 0: ok",
        "repetition 1 case 2: ok",
    ]
    failed, skipped = run.records()[1], run.records()[3]
    assert failed.reason == "rank 1 died: ended by SIGKILL"
    assert [state.state for state in failed.ranks] == ["alive", "died: ended by SIGKILL"]
    assert failed.metrics == {}
    assert failed.reason in skipped.reason


def test_failed_start_is_retried_once(make_run: MakeRun) -> None:
    run = make_run(CASES[:1])
    run.scripts = (None, complete_job)
    assert run.drive() == ["repetition 0 case 0: ok"]

    run = make_run(CASES[:1], None)
    assert run.drive() == ["repetition 0 case 0: failed"]
    assert run.records()[0].reason.startswith("the ranks ended; ")
    assert len(run.starts) == 2


# --- the budget ---


def test_budget_is_shared_by_the_remaining_repetitions(make_run: MakeRun) -> None:
    run = make_run(CASES[:1], repetitions=3, budget_seconds=90.0)
    run.drive()
    assert [job.budget_seconds for job in run.jobs()] == pytest.approx([30, 45, 90], abs=5)
