"""``parbench run`` from its options to a finished folder, with ranks that are threads: no torch, no processes."""

import json
import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeGang, FakeRank, case, outcome, wait_until
from fakes import plan as make_plan

from bench import measuring
from bench.display import Display
from bench.driver import StartGang
from bench.errors import UserError
from bench.machine import Machine
from bench.measuring import Joined, Options, plan_run, resume, run_options
from bench.messages import Bye
from bench.plan import Plan, Skipped
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

    def starter(self, run: Run, joined: Joined | None) -> StartGang:
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
    monkeypatch.setattr(measuring, "look", lambda environ: MACHINE)
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


def planned(options: Options, joined: Joined | None = None) -> Plan:
    return plan_run(options, MODULES, joined)


def refusal(options: Options, joined: Joined | None = None) -> str:
    with pytest.raises(UserError) as caught:
        planned(options, joined)
    return str(caught.value)


# --- the plan: preset, then file, then command line ---


def test_without_options_the_plan_is_the_node_presets() -> None:
    plan = planned(Options())
    assert (plan.preset, plan.launches, plan.budget_seconds, plan.timeout_seconds) == ("node", 5, 95, 60)
    assert (plan.nproc, plan.backend, plan.device, plan.path) == (4, "gloo", "cpu", None)
    assert {asked.name.partition(".")[0] for asked in plan.cases} == {"collective", "p2p", "memory", "workload"}


FILE = """
preset = "full"
nproc = 3
backend = "gloo"
device = "cpu"
launches = 7
budget = "5m"
timeout = 45

[[case]]
name = "all_reduce"
set = { size_bytes = "1K,3K", dtype = "float16" }
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(FILE)
    return path


def test_a_plan_file_goes_before_the_preset(file: Path) -> None:
    plan = planned(Options(plan_file=file))
    assert (plan.preset, plan.nproc, plan.launches) == ("full", 3, 7)
    assert (plan.budget_seconds, plan.timeout_seconds) == (300.0, 45.0)
    assert [asked.params for asked in plan.cases] == [
        {"size_bytes": 1024, "dtype": "float16", "mode": "blocking"},
        {"size_bytes": 3072, "dtype": "float16", "mode": "blocking"},
    ]
    assert plan.measure.precision == 0.01  # of the file's preset


GIVEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "preset": ({"preset": "smoke"}, {"preset": "smoke", "launches": 7}),
    "nproc": ({"nproc": 2}, {"nproc": 2}),
    "launches": ({"launches": 2}, {"launches": 2}),
    "budget": ({"budget": "30s"}, {"budget_seconds": 30.0, "timeout_seconds": 45.0}),
    "timeout": ({"timeout": "500ms"}, {"timeout_seconds": 0.5, "budget_seconds": 300.0}),
}


@pytest.mark.parametrize("name", GIVEN)
def test_the_command_line_goes_before_the_plan_file(file: Path, name: str) -> None:
    given, wanted = GIVEN[name]
    plan = planned(Options(plan_file=file, **given))
    assert {name: getattr(plan, name) for name in wanted} == wanted


def test_set_replaces_a_value_of_the_file_and_leaves_the_others(file: Path) -> None:
    plan = planned(Options(plan_file=file, settings={"size_bytes": "8K"}))
    assert [asked.params["size_bytes"] for asked in plan.cases] == [8192]
    assert [asked.params["dtype"] for asked in plan.cases] == ["float16"]


def test_only_narrows_the_cases_of_the_file(file: Path) -> None:
    file.write_text(FILE + '\n[[case]]\nname = "broadcast"\n')
    assert {asked.name for asked in planned(Options(plan_file=file, only=("broadcast",))).cases} == {
        "collective.broadcast"
    }


def test_a_preset_of_the_file_that_does_not_exist_is_refused(file: Path) -> None:
    file.write_text('preset = "fulll"')
    assert refusal(Options(plan_file=file)).endswith("did you mean 'full'?")


def test_more_ranks_than_cores_are_noted_in_the_plan() -> None:
    assert any(note.startswith("functional only") for note in planned(Options(nproc=6)).notes)


def test_a_target_is_planned_with_the_folder_it_lies_in(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def prepare(world, *, depth: int = 3): ...\n")
    plan = planned(Options(target="mine:prepare", settings={"depth": "1,2"}))
    assert plan.path == str(tmp_path)
    assert [(asked.name, asked.params["depth"]) for asked in plan.cases] == [("custom.mine", 1), ("custom.mine", 2)]


# --- ranks that are there already ---


def test_ranks_that_are_there_are_found_in_the_variables() -> None:
    assert Joined.find(TORCHRUN) == Joined(rank=0, size=2, local_size=2, one_node=True)
    assert Joined.find({**TORCHRUN, "RANK": "5", "WORLD_SIZE": "8"}) == Joined(
        rank=5, size=8, local_size=2, one_node=False
    )
    assert Joined.find({}) is None
    assert Joined.find({"WORLD_SIZE": "2"}) is None


def test_ranks_may_lie_on_several_nodes_where_nothing_is_known_of_it() -> None:
    unknown = {name: value for name, value in TORCHRUN.items() if name != "LOCAL_WORLD_SIZE"}
    found = Joined.find(unknown)
    assert found is not None
    assert not found.one_node


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"RANK": "zero"}, "whole numbers"),
        ({"WORLD_SIZE": ""}, "whole numbers"),
        ({"MASTER_PORT": None}, "MASTER_PORT"),
    ],
)
def test_variables_that_make_no_sense_are_refused(change: dict[str, str | None], told: str) -> None:
    changed = {name: value for name, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(UserError, match=told):
        Joined.find(changed)


JOINED = Joined(rank=0, size=3, local_size=3, one_node=True)


def test_ranks_that_are_there_make_one_launch_of_all_of_them() -> None:
    plan = planned(Options(), JOINED)
    assert (plan.nproc, plan.launches) == (3, 1)
    assert planned(Options(nproc=3, launches=1), JOINED).nproc == 3


def test_what_ranks_that_are_there_cannot_do_is_refused(file: Path) -> None:
    assert "--nproc 4: 3 ranks are there already" in refusal(Options(nproc=4), JOINED)
    assert "--launches 2: ranks that are there already make one launch" in refusal(Options(launches=2), JOINED)
    assert "--launches 7" in refusal(Options(plan_file=file), JOINED)


def test_one_rank_that_is_there_is_refused_unless_it_is_meant() -> None:
    single = Joined(rank=0, size=1, local_size=1, one_node=True)
    assert "--allow-single" in refusal(Options(), single)
    assert planned(Options(allow_single=True), single).nproc == 1


def test_one_rank_on_each_of_several_nodes_is_no_single_rank() -> None:
    spread = Joined(rank=0, size=4, local_size=1, one_node=False)
    assert planned(Options(), spread).nproc == 4


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
    assert "GLOO_SOCKET_IFNAME" not in measuring._node_variables(make_plan([case()], backend="nccl"), MACHINE)


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
    measuring._starter(Run(path=path, info=info, records=()), None)(3, {"PARBENCH_DRIVER": "here"})
    [(nproc, logs, number, variables)] = calls
    assert (nproc, logs, number) == (2, path / "logs", 3)
    assert variables["PARBENCH_DRIVER"] == "here"


def test_the_finished_folder_is_json_throughout(ranks: Ranks) -> None:
    path = run()
    for line in (path / "records.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    json.loads((path / "run.json").read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
