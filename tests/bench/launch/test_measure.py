"""``parbench run`` from its options to a finished folder, with ranks that are threads: no torch, no processes."""

import os
import signal
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from parbench.bench.launch import measure as measuring
from parbench.bench.launch.budget import Prices
from parbench.bench.launch.control_channel import LEFT_OUT
from parbench.bench.launch.measure import Display, resume, run_options
from parbench.bench.machine import slurm_allocation as node_machine
from parbench.bench.machine.slurm_allocation import reachable
from parbench.bench.machine.world_spec import Joined
from parbench.bench.plan.cases import make_case
from parbench.bench.plan.options import Options, plan_run
from parbench.bench.plan.plan import Plan, Skipped
from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run, create_run, load_run, open_writer
from parbench.bench.text import UserError
from tests.support.fake_runs import (
    MACHINE,
    MODULES,
    TORCHRUN,
    FakeRanks,
    isolate_driver,
    use_slurm_allocation,
)
from tests.support.fakes import make_fake_case, make_outcome, make_plan
from tests.support.nvidia import L40S, gpus, install
from tests.support.refusals import usage_error

ONE = Options(preset="smoke", only=("all_reduce",), settings={"size_bytes": "1K,4K"})
SRUN = Options(preset="smoke", only=("all_reduce",), settings={"size_bytes": "1K"}, launcher="srun")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate_driver(monkeypatch, tmp_path)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> FakeRanks:
    fake = FakeRanks()
    show = Display.record

    def count(display: Display, record: Record) -> None:
        show(display, record)
        fake.shown += 1

    monkeypatch.setattr(Display, "record", count)
    monkeypatch.setattr(measuring, "_starter", fake.starter)
    return fake


def run(options: Options = ONE, *, resume_path: Path | None = None) -> Path:
    path = run_options(options, MODULES, out=Path("runs"), resume_path=resume_path, as_json=False)
    assert path is not None
    return path


def test_what_cannot_run_is_written_first_and_once_and_counted_in_the_progress(
    ranks: FakeRanks, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(
        [make_fake_case(0), make_fake_case(1)],
        skipped=[Skipped(case=make_fake_case(2), reason="gloo carries no float8")],
    )
    ranks.interrupt(at=2, records=2)
    path = create_run(Path("runs"), plan, "0.1.0")[0]
    resume(path, as_json=False)
    skipped, done = load_run(path).records
    assert (skipped.status, skipped.reason, done.status) == (
        "skipped",
        "gloo carries no float8",
        "ok",
    )
    assert "interrupted: 2 of 3 cases measured" in capsys.readouterr().err
    resume(path, as_json=False)
    assert [record.status for record in load_run(path).records] == ["skipped", "ok", "ok"]


def test_what_disturbs_at_the_start_is_kept_that_of_gpus_where_they_are_measured(
    ranks: FakeRanks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", install(tmp_path, gpus(L40S, 2))["PATH"])
    for device in ("cpu", "cuda"):
        path = create_run(Path("runs"), make_plan([make_fake_case(0)], device=device), "0.1.0")[0]
        resume(path, as_json=False)
        kept = (load_run(path).info.environment or {})["load"]["disturbances"]
        expected = {"gpu persistence": "off"} if device == "cuda" else {}
        assert {
            topic: found for topic, found in kept.items() if topic.startswith("gpu")
        } == expected
        assert "interface" not in kept, "all ranks are on this host"


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_run_keeps_what_is_done_and_says_how_to_go_on_where_it_stopped(
    ranks: FakeRanks, capsys: pytest.CaptureFixture[str], sign: signal.Signals
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    ranks.interrupt(at=2, records=1, sign=sign)
    path = run()
    kept = load_run(path).records
    assert len(kept) == 1
    told = f"interrupted: 1 of 2 cases measured; go on with: parbench run --resume {path}\n"
    assert capsys.readouterr().err.endswith(told)
    assert ranks.gangs[0].told_to_end == [0, 1, 2, 3]
    assert signal.getsignal(signal.SIGTERM) is before
    first, second = (asked.id for asked in load_run(path).info.plan.cases)
    assert run(Options(), resume_path=path) == path
    done = load_run(path).records
    assert done[:1] == kept
    assert [record.case.id for record in done] == [first, second]
    assert ranks.begun == [first, second, second]
    run(Options(), resume_path=path)
    assert load_run(path).records == done
    assert len(ranks.gangs) == 2


def test_going_on_makes_what_the_budget_left_out_and_says_how_much_and_how_long(
    ranks: FakeRanks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run(replace(ONE, launches=3, budget="0.001ms"))
    assert [record.reason for record in load_run(path).records] == [""] * 2 + [LEFT_OUT] * 4
    monkeypatch.setattr(Prices, "launch", lambda prices, cases: 0.5)
    capsys.readouterr()
    run(Options(), resume_path=path)
    assert capsys.readouterr().err.splitlines()[0] == "4 measurements of 6 to make, about 1 s"
    assert [record.status for record in load_run(path).records] == ["ok"] * 6
    run(Options(budget="3m"), resume_path=path)
    assert capsys.readouterr().err.splitlines() == ["0 measurements of 6 to make"]
    assert len(ranks.gangs) == 3


def test_a_disk_that_takes_no_more_stops_the_run_with_a_sentence(
    ranks: FakeRanks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(self: object, name: str, content: bytes) -> None:
        raise UserError("samples/x.npz cannot be written: No space left on device")

    monkeypatch.setattr("parbench.bench.results.runs.RecordWriter.write_file", full)
    ranks.said = [make_outcome(raw=b"npz")]
    path = run()
    assert "No space left on device: 1 of 2 cases measured" in capsys.readouterr().err
    assert ranks.gangs[0].told_to_end == [0, 1, 2, 3]
    assert len(load_run(path).records) == 1


def test_going_on_takes_no_other_options_and_names_them_as_they_are_written() -> None:
    given: dict[str, dict[str, Any]] = {
        "--set, --sizes and --dtype": {"settings": {"dtype": "float32"}},
        "--plan": {"plan_file": Path("plan.toml")},
        "--allow-single": {"allow_single": True},
    }
    for told, options_given in given.items():
        words = usage_error(run, Options(**options_given), resume_path=Path("runs/x"))
        assert words.endswith(f"leave out {told}")


def test_what_cannot_be_gone_on_with_is_refused_before_a_rank_is_started(
    ranks: FakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = create_run(Path("runs"), make_plan([make_fake_case()]), "0.1.0")[0]
    with open_writer(path):
        assert "another process" in usage_error(resume, path, as_json=False)
    told = f"--nodelist n1: {path} was not measured by srun, but on one node"
    assert usage_error(run, Options(nodelist="n1"), resume_path=path) == told
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert "--resume starts its own ranks" in usage_error(run, Options(), resume_path=path)
    assert ranks.gangs == []


def started(
    monkeypatch: pytest.MonkeyPatch, launcher: str, plan: Plan, nodelist: str | None = None
) -> tuple[Path, tuple[Any, ...]]:
    """Return the folder of a run of a plan, and what ranks, or the server that forks them, are started with."""
    made: list[tuple[Any, ...]] = []

    def stand_in(*arguments: Any) -> Any:
        made.append(arguments)
        return MagicMock()

    monkeypatch.setattr(measuring, launcher, stand_in)
    path, info = create_run(Path("runs"), plan, "0.1.0")
    with ExitStack() as stack:
        measuring._starter(Run(path=path, info=info, records=()), None, nodelist, stack, ())(
            3, {"PARBENCH_DRIVER": "here"}
        )
    [arguments] = made
    return path, arguments


def test_ranks_share_the_cores_and_gloo_takes_the_loopback_unless_the_user_says_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = make_case("custom.step", "absent.module:step", {})
    path, (modules, given, log, _) = started(
        monkeypatch, "ForkServer", make_plan([make_fake_case(), own])
    )
    assert modules == [
        make_fake_case().target.partition(":")[0],
        "parbench.workloads.step.own",
    ]  # not the user's own module
    assert log == path / "logs" / "fork-server.log"
    assert given["OMP_NUM_THREADS"] == "2"
    assert given["GLOO_SOCKET_IFNAME"].startswith("lo")
    # the ranks of NCCL have a gloo group too
    crowded = started(
        monkeypatch, "ForkServer", make_plan([make_fake_case()], nproc=8, backend="nccl")
    )[1][1]
    assert crowded == {**given, "OMP_NUM_THREADS": "1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert started(monkeypatch, "ForkServer", make_plan([make_fake_case()]))[1][1] == {}


@pytest.fixture
def allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    use_slurm_allocation(monkeypatch)


def test_srun_is_given_the_spread_the_nodes_and_threads_that_fit_a_node(
    allocation: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_run(SRUN, MODULES, None)
    path, given = started(monkeypatch, "SrunLauncher", plan, "n[2-4]")
    variables = {"OMP_NUM_THREADS": "2", "PARBENCH_DRIVER": "here"}
    assert given == (plan.spread, path / "logs", 3, variables, "n[2-4]")
    facts = {"slurm": {"job": "17", "nodelist": "n[1-4]", "placement": "block"}}
    assert measuring._whereabouts(plan, None) == (reachable(os.environ), facts)
    # on a login node threads are those that fit the job's nodes
    monkeypatch.delenv("SLURMD_NODENAME")
    monkeypatch.setattr(node_machine, "_ask", lambda number, environ: replace(MACHINE, cores=64))
    assert (
        started(monkeypatch, "SrunLauncher", plan_run(SRUN, MODULES, None))[1][3]["OMP_NUM_THREADS"]
        == "32"
    )


def test_the_driver_of_one_node_is_on_its_loopback_and_that_of_many_where_the_ranks_meet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "n1")
    joined = Joined(rank=0, size=2, local_size=2, one_node=True)
    plan = make_plan([make_fake_case()])
    for among, host in (
        (None, "127.0.0.1"),
        (joined, "127.0.0.1"),
        (replace(joined, one_node=False), "n1"),
    ):
        assert measuring._whereabouts(plan, among) == ((host,), {})


def test_a_run_over_nodes_goes_on_in_an_allocation_that_holds_it_on_nodes_that_may_be_others(
    allocation: None, ranks: FakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run(SRUN)
    kept = (path / "records.jsonl").read_bytes().splitlines(keepends=True)
    (path / "records.jsonl").write_bytes(b"")
    assert run(Options(nodelist="n[1-4]"), resume_path=path) == path
    assert len((path / "records.jsonl").read_bytes().splitlines()) == len(kept)
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert "--nodes 4: job 17 has 2" in usage_error(run, Options(), resume_path=path)
