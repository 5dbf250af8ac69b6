"""``parbench run`` from its options to a finished folder, with ranks that are threads: no torch, no processes."""

import json
import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeGang, FakeRank, case, outcome, wait_until
from fakes import plan as make_plan

from bench import measuring, node_machine, options
from bench.addresses import reachable
from bench.display import Display
from bench.driver import StartGang
from bench.errors import UserError
from bench.machine import Machine
from bench.measuring import resume, run_options
from bench.messages import Bye
from bench.options import Joined, Options, plan_run
from bench.plan import Skipped
from bench.records import Record
from bench.runs import Run, create_run, load_run, open_writer

MODULES = ("bench.definitions", "workloads.definitions")
MACHINE = Machine(cores=4, physical_cores=4, memory_bytes=16 << 30, torch_version="2.13.0", torch_has_cuda=False)
TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
ONE = Options(preset="smoke", only=("all_reduce",), settings={"size_bytes": "1K,4K"})


class Ranks:
    """Starts fake ranks, which begin cases (``begun``), do ``mischief`` on rank 0, and say what is ``said``."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.shown = 0
        self.gangs: list[FakeGang] = []
        self.mischief: Callable[[int], None] = lambda count: None
        self.said = outcome()

    def starter(self, run: Run, joined: Joined | None, nodelist: str | None = None) -> StartGang:
        size = run.info.plan.nproc

        def start(number: int, variables: Mapping[str, str]) -> FakeGang:
            gang = FakeGang()
            self.gangs.append(gang)
            gang.run([FakeRank(variables, rank, size) for rank in range(size)], self._act)
            return gang

        return start

    def _act(self, gang: FakeGang, rank: FakeRank) -> None:
        rank.hello()
        for index, asked in enumerate(rank.job().cases):
            rank.start(index)
            if rank.rank == 0:
                self.begun.append(asked.id)
                self.mischief(len(self.begun))
                rank.finish(index, self.said)
        rank.say(Bye())


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(node_machine, "look", lambda environ: MACHINE)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    fake = Ranks()
    show = Display.record

    def count(display: Display, record: Record) -> None:
        show(display, record)
        fake.shown += 1

    monkeypatch.setattr(Display, "record", count)
    monkeypatch.setattr(measuring, "_starter", fake.starter)
    return fake


def run(options: Options = ONE, *, resume_path: Path | None = None, as_json: bool = False) -> Path:
    path = run_options(options, MODULES, out=Path("runs"), resume_path=resume_path, as_json=as_json)
    assert path is not None
    return path


# --- a run ---


def test_a_run_makes_a_folder_with_a_record_for_every_case(ranks: Ranks) -> None:
    path = run()
    done = load_run(path)
    assert path.parent == Path("runs")
    assert [(record.case.params["size_bytes"], record.status) for record in done.records] == [
        (1024, "ok"),
        (4096, "ok"),
    ]
    assert done.info.plan.preset == "smoke"
    assert done.info.environment is not None


def interrupt(ranks: Ranks, at: int, records: int, sign: signal.Signals = signal.SIGINT) -> None:
    """Send this process a signal when rank 0 begins its case of a number, and so many records are shown."""

    def stop(count: int) -> None:
        if count == at:
            wait_until(lambda: ranks.shown == records)
            os.kill(os.getpid(), sign)
            threading.Event().wait(1)

    ranks.mischief = stop


def test_what_cannot_run_is_written_first_and_counted_in_the_progress(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan([case(0), case(1)], skipped=[Skipped(case=case(2), reason="gloo carries no float8")])
    interrupt(ranks, at=2, records=2)
    path = create_run(Path("runs"), plan, "0.1.0")[0]
    resume(path, as_json=False)
    assert [record.status for record in load_run(path).records] == ["skipped", "ok"]
    assert "interrupted: 2 of 3 cases measured" in capsys.readouterr().err


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_run_keeps_what_is_done_and_says_how_to_go_on(
    ranks: Ranks, capsys: pytest.CaptureFixture[str], sign: signal.Signals
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    interrupt(ranks, at=2, records=1, sign=sign)
    path = run()
    assert len(load_run(path).records) == 1
    assert capsys.readouterr().err.endswith(
        f"interrupted: 1 of 2 cases measured; go on with: parbench run --resume {path}\n"
    )
    assert ranks.gangs[0].told_to_end == [0, 1, 2, 3]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_run_goes_on_where_it_stopped_and_does_nothing_twice(ranks: Ranks) -> None:
    interrupt(ranks, at=2, records=1)
    path = run()
    first, second = (asked.id for asked in load_run(path).info.plan.cases)
    kept = load_run(path).records
    ranks.mischief = lambda count: None
    assert run(Options(), resume_path=path) == path
    done = load_run(path).records
    assert done[:1] == kept
    assert [record.case.id for record in done] == [first, second]
    assert ranks.begun == [first, second, second]
    run(Options(), resume_path=path)
    assert load_run(path).records == done
    assert len(ranks.gangs) == 2


def test_a_run_that_is_whole_skips_nothing_anew(ranks: Ranks) -> None:
    plan = make_plan([case(0)], skipped=[Skipped(case=case(2), reason="gloo carries no float8")])
    path = create_run(Path("runs"), plan, "0.1.0")[0]
    resume(path, as_json=False)
    resume(path, as_json=False)
    assert [record.status for record in load_run(path).records] == ["skipped", "ok"]


def test_a_disk_that_takes_no_more_stops_the_run_with_a_sentence(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(self: object, name: str, content: bytes) -> None:
        raise UserError("samples/x.npz cannot be written: No space left on device")

    monkeypatch.setattr("bench.runs.RecordWriter.write_samples", full)
    ranks.said = outcome(raw=b"npz")
    path = run()
    assert "No space left on device: 1 of 2 cases measured" in capsys.readouterr().err
    assert len(load_run(path).records) == 1


def test_json_is_a_record_a_line_on_stdout_as_it_is_in_the_folder(
    ranks: Ranks, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    path = run(as_json=True)
    assert capfdbinary.readouterr().out == (path / "records.jsonl").read_bytes()


def test_a_run_that_is_being_written_is_not_gone_on_with(ranks: Ranks) -> None:
    path = create_run(Path("runs"), make_plan([case()]), "0.1.0")[0]
    with open_writer(path), pytest.raises(UserError, match="another process"):
        resume(path, as_json=False)
    assert ranks.gangs == []


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"preset": "smoke"}, "--preset"),
        ({"settings": {"dtype": "float32"}}, "--set, --sizes and --dtype"),
        ({"plan_file": Path("plan.toml")}, "--plan"),
        ({"allow_single": True}, "--allow-single"),
        ({"only": ("all_reduce",)}, "--only"),
    ],
)
def test_going_on_takes_no_other_options_and_names_them_as_they_are_written(
    ranks: Ranks, given: dict[str, Any], told: str
) -> None:
    with pytest.raises(UserError) as caught:
        run(Options(**given), resume_path=Path("runs/x"))
    assert str(caught.value).endswith(f"leave out {told}")


def test_ranks_that_are_there_cannot_go_on_with_a_run(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="--resume starts its own ranks"):
        run(Options(), resume_path=Path("runs/x"))


# --- what ranks on one node are given ---


def test_ranks_share_the_cores_and_gloo_takes_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    given = measuring._node_variables(make_plan([case()]), MACHINE)
    assert given["OMP_NUM_THREADS"] == "2"
    assert given["GLOO_SOCKET_IFNAME"].startswith("lo")
    assert measuring._node_variables(make_plan([case()], nproc=8), MACHINE)["OMP_NUM_THREADS"] == "1"
    # the ranks of NCCL have a gloo group too
    assert measuring._node_variables(make_plan([case()], backend="nccl"), MACHINE) == given


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert measuring._node_variables(make_plan([case()]), MACHINE) == {}


def test_gangs_are_started_in_the_runs_folder_with_the_hubs_variables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(measuring, "TorchrunGang", lambda *given: calls.append(given))
    path, info = create_run(tmp_path, make_plan([case()]), "0.1.0")
    measuring._starter(Run(path=path, info=info, records=()), None, None)(3, {"PARBENCH_DRIVER": "here"})
    [(nproc, logs, number, variables)] = calls
    assert (nproc, logs, number) == (2, path / "logs", 3)
    assert variables["PARBENCH_DRIVER"] == "here"


def test_the_finished_folder_is_json_throughout(ranks: Ranks) -> None:
    path = run()
    for line in (path / "records.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    json.loads((path / "run.json").read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


# --- ranks on the nodes of an allocation ---

FOUR_NODES = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURMD_NODENAME": "n1",
}
SRUN = Options(preset="smoke", only=("all_reduce",), settings={"size_bytes": "1K"}, launcher="srun")


@pytest.fixture
def allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PARBENCH_EMULATED", raising=False)
    for name, value in FOUR_NODES.items():
        monkeypatch.setenv(name, value)
    for module in (options, measuring):
        monkeypatch.setattr(module, "check_srun", lambda: None)


def test_srun_is_given_the_spread_the_nodes_and_threads_that_fit_a_node(
    allocation: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(measuring, "SrunGang", lambda *given: calls.append(given))
    plan = plan_run(SRUN, MODULES, None)
    path, info = create_run(tmp_path, plan, "0.1.0")
    measuring._starter(Run(path=path, info=info, records=()), None, "n[2-4]")(3, {"PARBENCH_DRIVER": "here"})
    variables = {"OMP_NUM_THREADS": "2", "PARBENCH_DRIVER": "here"}
    assert calls == [(plan.spread, path / "logs", 3, variables, "n[2-4]")]
    assert measuring._facts(plan) == {"slurm": {"job": "17", "nodelist": "n[1-4]", "placement": "block"}}
    assert measuring._hosts(plan, None) == reachable(os.environ)


def test_on_a_login_node_threads_are_those_that_fit_the_jobs_nodes(
    allocation: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("SLURMD_NODENAME")
    monkeypatch.setattr(node_machine, "_ask", lambda number, environ: replace(MACHINE, cores=64))
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(measuring, "SrunGang", lambda *given: calls.append(given))
    path, info = create_run(tmp_path, plan_run(SRUN, MODULES, None), "0.1.0")
    measuring._starter(Run(path=path, info=info, records=()), None, None)(0, {})
    assert calls[0][3] == {"OMP_NUM_THREADS": "32"}


def test_a_run_over_nodes_goes_on_in_an_allocation_that_holds_it_on_nodes_that_may_be_others(
    allocation: None, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run(SRUN)
    kept = (path / "records.jsonl").read_bytes().splitlines(keepends=True)
    (path / "records.jsonl").write_bytes(b"")
    assert run(Options(nodelist="n[1-4]"), resume_path=path) == path
    assert len((path / "records.jsonl").read_bytes().splitlines()) == len(kept)
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    with pytest.raises(UserError, match="--nodes 4: job 17 has 2"):
        run(Options(), resume_path=path)


def test_a_run_of_one_node_goes_on_without_a_list_of_nodes(ranks: Ranks) -> None:
    path = run()
    with pytest.raises(UserError, match=r"--nodelist n1: .* was not measured by srun"):
        run(Options(nodelist="n1"), resume_path=path)
