"""``parbench run`` from its options to a finished folder, with fake ranks and its display."""

import io
import resource
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console

from parbench.bench.launch import external
from parbench.bench.launch import measure as measuring
from parbench.bench.launch.display import Display
from parbench.bench.launch.measure import choose_variables, run_options
from parbench.bench.machine.world_spec import Joined
from parbench.bench.plan.options import Options
from parbench.bench.plan.plan import SkippedCase
from parbench.bench.results.records import Record, SkipReason
from parbench.bench.results.runs import create_run, load_run, open_writer
from parbench.bench.text import UserError
from tests.support.fake_runs import (
    MODULES,
    TORCHRUN,
    FakeRanks,
    isolate_driver,
    use_slurm_allocation,
)
from tests.support.fakes import make_fake_case, make_outcome, make_plan
from tests.support.refusals import usage_error
from tests.support.reports.reports_fixtures import ok_record, step_case

TWO_CASES = Options(preset="smoke", names=("all_reduce",), settings={"size_bytes": "1K,4K"})
SRUN = Options(
    preset="smoke",
    names=("all_reduce",),
    settings={"size_bytes": "1K"},
    launcher="srun",
)


@pytest.fixture(autouse=True)
def isolated_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate_driver(monkeypatch, tmp_path)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> FakeRanks:
    fake_ranks = FakeRanks()
    monkeypatch.setattr(measuring, "choose_launcher", fake_ranks.choose_launcher)
    return fake_ranks


def run(
    options: Options = TWO_CASES, *, resume_path: Path | None = None, command: str = ""
) -> Path:
    path = run_options(
        options, MODULES, out=Path("runs"), resume_path=resume_path, command=command
    )
    assert path is not None
    return path


def statuses(path: Path) -> list[str]:
    return [record.status for record in load_run(path).records]


def test_skipped_cases_are_recorded_first_and_once(
    ranks: FakeRanks, capsys: pytest.CaptureFixture[str]
) -> None:
    skipped_case = SkippedCase(case=make_fake_case(2), reason="gloo carries no float8")
    plan = make_plan([make_fake_case(0), make_fake_case(1)], skipped=[skipped_case])
    path = create_run(Path("runs"), plan, "0.1.0")[0]
    ranks.interrupt(case=2)
    run(resume_path=path)
    skipped, measured = load_run(path).records
    assert skipped.status == "skipped"
    assert skipped.reason == "gloo carries no float8"
    assert skipped.skip_reason is SkipReason.IMPOSSIBLE
    assert measured.status == "ok"
    run(resume_path=path)
    assert statuses(path) == ["skipped", "ok", "ok"]


def test_ranks_may_open_as_many_files_as_the_system_allows(ranks: FakeRanks) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, limits[1]))
    try:
        run(
            Options(),
            resume_path=create_run(Path("runs"), make_plan([make_fake_case()]), "0")[0],
        )
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 128
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_interrupted_run_can_be_resumed(
    ranks: FakeRanks, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.interrupt(case=2)
    path = run()
    assert statuses(path) == ["ok"]
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert last_line.endswith(f"parbench run --resume {path}")
    assert ranks.starts[0].killed_ranks == [0, 1, 2, 3]

    interrupted = load_run(path)
    first, second = (case.id for case in interrupted.info.plan.cases)
    assert run(Options(), resume_path=path) == path
    records = load_run(path).records
    assert records[:1] == interrupted.records
    assert ranks.begun == [first, second, second]
    run(Options(), resume_path=path)
    assert load_run(path).records == records
    assert len(ranks.starts) == 2, "a complete run starts no ranks"


def test_run_interrupted_during_imports_can_be_resumed(
    ranks: FakeRanks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(name: str) -> None:
        assert name == "pandas"
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring, "importlib", SimpleNamespace(import_module=interrupt))
    path = run_options(TWO_CASES, MODULES, out=Path("runs"), report_modules=["pandas"])
    assert (
        f"interrupted; continue with: parbench run --resume {path}" in capsys.readouterr().err
    )


def test_interrupted_command_is_repeated(
    ranks: FakeRanks, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.interrupt(case=1)
    run(replace(TWO_CASES, inject="late:1:3ms"), command="parbench check")
    expected = "note: injected: late:1:3ms\ninterrupted; run parbench check again\n"
    assert capsys.readouterr().err == expected


def test_resume_measures_what_the_budget_left_out(ranks: FakeRanks) -> None:
    path = run(replace(TWO_CASES, repetitions=3, budget="0.001ms"))
    reasons = [record.skip_reason for record in load_run(path).records]
    assert reasons == [None] * 2 + [SkipReason.OUT_OF_BUDGET] * 4
    run(Options(budget="1h"), resume_path=path)
    assert statuses(path) == ["ok"] * 6


def test_full_disk_stops_the_run(
    ranks: FakeRanks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: object, name: str, content: bytes) -> None:
        raise UserError("samples/x.npz cannot be written: No space left on device")

    monkeypatch.setattr("parbench.bench.results.runs.RecordWriter.write_file", fail)
    ranks.said = [make_outcome(raw=b"npz")]
    path = run()
    assert "No space left on device; continue with" in capsys.readouterr().err
    assert ranks.starts[0].killed_ranks == [0, 1, 2, 3]
    assert statuses(path) == [], "a resumed run measures the case again"


# --- what --resume refuses ---


def test_resume_refuses_before_a_rank_starts(
    ranks: FakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = create_run(Path("runs"), make_plan([make_fake_case()]), "0.1.0")[0]
    with open_writer(path):
        assert "another process" in usage_error(run, resume_path=path)
    assert "--nodes n1" in usage_error(run, Options(nodelist="n1"), resume_path=path)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert "--resume" in usage_error(run, Options(), resume_path=path)
    assert ranks.starts == []


# --- how ranks are started ---


@pytest.mark.parametrize(("nproc", "threads"), [(2, "2"), (64, "1")])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_variables_of_local_ranks(nproc: int, threads: str, device: str) -> None:
    """Gloo connects all pairs of many ranks only where data is exchanged."""
    variables = choose_variables(make_plan([make_fake_case()], nproc=nproc, device=device))
    assert variables["OMP_NUM_THREADS"] == threads
    assert ("PARBENCH_BIND" in variables) is (device == "cuda")
    assert ("CUDA_DEVICE_ORDER" in variables) is (device == "cuda")
    assert ("TORCH_GLOO_LAZY_INIT" in variables) is (nproc == 64)


@pytest.mark.parametrize("num_cores", [2, 1])
def test_ranks_of_a_launcher_get_variables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_cores: int
) -> None:
    """The launcher sets the number of threads. It has bound a rank that has not all cores."""
    monkeypatch.setattr(measuring, "get_affinity", lambda: frozenset(range(num_cores)))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "TORCH_GLOO_LAZY_INIT": "1"}
    bind = {"PARBENCH_BIND": "1"} if num_cores == 2 else {}
    started: list[Any] = []
    monkeypatch.setattr(external, "ExternalLauncher", lambda size: FakeLauncher(started))
    path, _ = create_run(tmp_path, make_plan([make_fake_case()], nproc=64, device="cuda"), "-")
    joined = Joined(rank=0, size=64, local_size=8)
    with ExitStack() as stack:
        start_ranks = measuring.choose_launcher(load_run(path), joined, None, stack, ())
        start_ranks(path, {"NCCL_ALGO": "Ring"})
    assert started == [{**order, **bind, "NCCL_ALGO": "Ring"}]


class FakeLauncher:
    """A launcher that stores the variables with which it would start ranks."""

    def __init__(self, started: list[Any]) -> None:
        self._started = started

    def start_ranks(self, folder: Path, variables: Any) -> None:
        self._started.append(variables)

    def close(self) -> None:
        pass


def test_variables_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert choose_variables(make_plan([make_fake_case()])) == {}


@pytest.fixture
def allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    use_slurm_allocation(monkeypatch)


@pytest.mark.usefixtures("allocation")
def test_srun_gets_layout_nodes_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: list[Any] = []

    def refuse(*args: Any) -> None:
        arguments.extend(args)
        raise UserError("not started")

    monkeypatch.setattr(measuring, "SrunRanks", refuse)
    path = run(replace(SRUN, nodelist="n[1-4]"))
    plan = load_run(path).info.plan
    layout, _, variables, nodelist = arguments
    assert layout == plan.spread
    assert nodelist == "n[1-4]"
    assert variables["OMP_NUM_THREADS"] == "2"
    on_gpus = msgspec.structs.replace(plan, device="cuda")
    assert "PARBENCH_BIND" in choose_variables(on_gpus)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "8")
    assert "PARBENCH_BIND" not in choose_variables(on_gpus), "Slurm binds the ranks"


@pytest.mark.usefixtures("allocation")
def test_run_over_nodes_resumes_in_an_allocation_that_fits(
    ranks: FakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run(SRUN)
    records = path / "records.jsonl"
    count = len(load_run(path).records)
    records.write_bytes(b"")
    run(Options(nodelist="n[1-4]"), resume_path=path)
    assert len(load_run(path).records) == count
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert "--nodes 4: job 17 has 2" in usage_error(run, Options(), resume_path=path)


def test_json_record_is_printed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.BytesIO()
    stdout = io.TextIOWrapper(io.BufferedWriter(pipe), encoding="utf-8")
    monkeypatch.setattr("sys.stdout", stdout)
    console = Console(file=io.StringIO())
    record = ok_record(step_case())
    with Display(console, as_json=True) as display:
        for count in (1, 2):
            display.show_record(record)
            lines = pipe.getvalue().splitlines()
            assert len(lines) == count
            assert msgspec.json.decode(lines[-1], type=Record) == record
