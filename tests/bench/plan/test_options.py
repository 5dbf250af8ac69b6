"""Options, files of cases and presets become a plan, on this host, in joined ranks or on nodes."""

import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parbench.bench.launch.messages import Outcome
from parbench.bench.machine.gpu import Gpu
from parbench.bench.machine.slurm_allocation import NodeLayout
from parbench.bench.machine.world_spec import Joined
from parbench.bench.plan import options as options_module
from parbench.bench.plan.cases import make_case
from parbench.bench.plan.custom_step import define_custom_step, list_params
from parbench.bench.plan.options import Options, plan_run
from parbench.bench.plan.params import Value
from parbench.bench.plan.plan import Measure, Plan, compute_sampling_seconds
from parbench.bench.rank.progress import Progress
from parbench.bench.rank.runner import CaseRun
from parbench.bench.world.world import World
from tests.support.fake_runs import MACHINE, MODULES, isolate_driver, use_slurm_allocation
from tests.support.paths import ROOT
from tests.support.ranks import Ranks
from tests.support.refusals import usage_error

ALL_REDUCE = Options(preset="smoke", names=("all_reduce",), settings={"size_bytes": "1K,4K"})
HYBRID = Options(names=("workload.hybrid",))
SRUN = replace(ALL_REDUCE, settings={"size_bytes": "1K"}, launcher="srun")
GPU = Gpu(name="H100", memory_bytes=80 << 30)
JOINED = Joined(rank=0, size=3, local_size=3)


@pytest.fixture(autouse=True)
def _single_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate_driver(monkeypatch, tmp_path)


@pytest.fixture
def _allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four nodes with two tasks each, of which this host is the first."""
    use_slurm_allocation(monkeypatch)


def plan(options: Options, joined: Joined | None = None) -> Plan:
    return plan_run(options, MODULES, joined)


def list_values(run_plan: Plan, name: str) -> list[Any]:
    return [case.params.get(name) for case in run_plan.cases]


def test_default_run_has_groups_of_four_ranks() -> None:
    def list_groups(options: Options) -> set[Value | None]:
        return {case.params.get("group") for case in plan(options).cases} - {None, "world"}

    assert list_groups(Options(nproc=4)) == {"pairs"}
    assert list_groups(Options(nproc=2)) == set()
    assert list_groups(Options(nproc=4, names=("all_reduce",))) == set()


def test_budget_is_filled() -> None:
    measure = plan(Options(preset="smoke", budget="30s", repetitions=5)).measure
    assert measure == Measure(precision=0.05, max_iterations=2000)


@pytest.mark.parametrize(
    ("options", "repetitions", "seconds_per_case"),
    [
        (Options(names=("all_reduce",), settings={"size_bytes": "1M"}), 3, 0.95),
        (Options(names=("all_reduce",), settings={"size_bytes": "1K,4K,16K,64K"}), 3, 0.3),
        (Options(names=("ddp",), repetitions=7), 7, 0.3),
        (Options(budget="90s"), 5, None),
        (Options(names=("all_reduce",), preset="node"), 5, 0.05),
        (Options(names=("all_reduce",), budget="90s"), 5, None),
    ],
)
def test_time_follows_from_cases_preset_or_budget(
    options: Options, repetitions: int, seconds_per_case: float | None
) -> None:
    run_plan = plan(options)
    assert run_plan.repetitions == repetitions
    assert run_plan.measure.seconds_per_case == seconds_per_case
    if options.preset is None and options.budget is None:
        seconds = repetitions * compute_sampling_seconds(run_plan.cases, run_plan.measure)
        assert run_plan.budget_seconds > 2 * seconds


def test_plan_notes_blocking_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    machine = replace(MACHINE, gpus=(Gpu(),) * 2, torch_has_cuda=True)
    monkeypatch.setattr(options_module, "inspect_rank_machine", lambda *_: machine)
    assert any("CUDA_LAUNCH_BLOCKING" in note for note in plan(ALL_REDUCE).notes)
    assert plan(replace(ALL_REDUCE, device="cpu")).notes == ()


def test_plan_notes_shared_cores_and_injection() -> None:
    run_plan = plan(replace(ALL_REDUCE, nproc=6, inject="corrupt:5", link="400Gbit"))
    oversubscribed, injected = run_plan.notes
    assert "6 ranks on 4 cores" in oversubscribed
    assert "corrupt:5" in injected
    assert run_plan.injection is not None
    assert run_plan.link_bytes_per_second == 50e9


@pytest.mark.parametrize(
    ("mesh", "num_ranks"),
    [("dp=2,fsdp=2,pp=2,cp=1,tp=2", 16), ("dp=1,tp=1", 1), ("dp=2,tp=2;pp=2,tp=2", 4)],
)
def test_mesh_sets_number_of_ranks(mesh: str, num_ranks: int) -> None:
    run_plan = plan(replace(HYBRID, settings={"mesh": mesh}))
    assert run_plan.nproc == num_ranks
    assert list_values(run_plan, "mesh") == mesh.split(";")


def test_variables_are_an_axis_of_all_cases() -> None:
    options = Options(
        names=("copy", "ddp"), settings={"OMP_NUM_THREADS": "1,2", "NCCL_ALGO": ""}
    )
    variables = [case.variables for case in plan_run(options, MODULES, None).cases]
    expected = [{"OMP_NUM_THREADS": threads, "NCCL_ALGO": ""} for threads in "12"]
    assert variables == 2 * expected


def test_mesh_is_of_steps_and_group_of_operations() -> None:
    names = ("all_reduce", "hybrid")
    settings = {"size_bytes": "1K", "mesh": "dp=4", "group": "pairs,dp=2 tp=2:tp"}
    run_plan = plan(replace(ALL_REDUCE, names=names, settings=settings))
    assert set(list_values(run_plan, "group")) == {"pairs", "dp=2 tp=2:tp", None}
    assert set(list_values(run_plan, "mesh")) == {"dp=4", None}


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        (replace(HYBRID, settings={"mesh": "dp=2,pq=2"}), "'pq'"),
        (
            replace(ALL_REDUCE, settings={"mesh": "dp=2"}),
            "run hybrid --mesh",
        ),
        (replace(ALL_REDUCE, nodes=2), "--nodes 2"),
        (replace(ALL_REDUCE, nodelist="n1"), "--nodes n1"),
    ],
)
def test_invalid_options_are_refused(options: Options, fact: str) -> None:
    assert fact in usage_error(plan, options)


def test_joined_ranks_are_the_ranks_of_the_plan() -> None:
    assert plan(Options(), JOINED).nproc == 3
    assert "--nproc 4" in usage_error(plan, Options(nproc=4), JOINED)
    assert "RANK" in usage_error(plan, SRUN, JOINED)


def test_single_joined_rank_needs_nproc() -> None:
    single = Joined(rank=0, size=1, local_size=1)
    assert "one rank" in usage_error(plan, Options(), single)
    assert plan(Options(nproc=1), single).nproc == 1


@pytest.mark.usefixtures("_allocation")
def test_ranks_are_spread_over_allocation() -> None:
    run_plan = plan(SRUN)
    assert run_plan.nproc == 8
    assert run_plan.spread == NodeLayout(nodes=4, ntasks_per_node=2)
    cyclic = plan(replace(SRUN, nodes=3, nproc=1, distribution="cyclic"))
    assert cyclic.nproc == 3
    assert cyclic.spread == NodeLayout(nodes=3, ntasks_per_node=1, distribution="cyclic")


@pytest.mark.usefixtures("_allocation")
@pytest.mark.parametrize("num_gpus", [1, 8])
def test_every_gpu_of_each_node_is_measured(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int
) -> None:
    node = replace(MACHINE, gpus=(GPU,) * num_gpus, torch_has_cuda=True)
    monkeypatch.setattr(
        options_module, "inspect_rank_machine", lambda environ, allocation: node
    )
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE")
    run_plan = plan(SRUN)
    assert run_plan.backend == "nccl"
    assert run_plan.spread == NodeLayout(nodes=4, ntasks_per_node=num_gpus)


@pytest.mark.usefixtures("_allocation")
@pytest.mark.parametrize(
    ("group", "distribution", "indexes"),
    [("across", "block", [None, 1]), ("node", "cyclic", [None, 1, 2, 3])],
)
def test_groups_follow_distribution(
    group: str, distribution: str, indexes: list[int | None]
) -> None:
    settings = {"size_bytes": "1K", "group": group, "concurrent": "false"}
    run_plan = plan(replace(SRUN, settings=settings, distribution=distribution))
    assert list_values(run_plan, "group_index") == indexes


@pytest.mark.usefixtures("_allocation")
@pytest.mark.parametrize(
    ("option", "fact"), [({"nodes": 5}, "--nodes 5"), ({"nproc": 0}, "--nproc 0")]
)
def test_limits_of_allocation_are_checked(option: dict[str, Any], fact: str) -> None:
    assert fact in usage_error(plan, replace(SRUN, **option))


@pytest.mark.parametrize(
    ("function", "fact"),
    [
        (lambda: None, "def prepare(world)"),
        (lambda world, depth: None, "'depth'"),
        (lambda world, sizes=(1, 2): None, "'sizes'"),
        (lambda world, limit=math.inf: None, "limit = inf"),
        (lambda world, limit=1 << 63: None, "whole number"),
        (lambda world, **params: None, "'params'"),
        (lambda world, NCCL_ALGO="a": None, "'NCCL_ALGO'"),  # noqa: N803
        (lambda world, mode="a": None, "'mode'"),
    ],
)
def test_unusable_params_are_refused(function: Callable[..., Any], fact: str) -> None:
    assert fact in usage_error(list_params, function)


STEP = """
import tabnanny

print("a module may print")

def prepare(
    world: "only.for.a.type.checker", *, depth=3, share=0.5, fused=True, size_bytes=9, kind="a"
): ...
"""


@pytest.fixture
def step_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a user's modules, which are forgotten after the test."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    return tmp_path


def test_target_is_imported_from_folder(
    step_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The import shadows no standard module, and prints nothing."""
    (step_folder / "steps").mkdir()
    (step_folder / "steps/mine.py").write_text(STEP)
    (step_folder / "tabnanny.py").write_text("raise RuntimeError('shadowed')")
    definition = define_custom_step("steps.mine:prepare", step_folder)
    assert definition.name == "custom.mine"
    kinds = {param.name: param.kind for param in definition.params[1:]}
    assert [*kinds] == ["depth", "share", "fused", "size_bytes", "kind"]
    assert [*kinds.values()] == ["int", "float", "bool", "size", "str"]
    assert capsys.readouterr().out == ""
    options = Options(targets=("steps.mine:prepare",), settings={"depth": "1,2"})
    run_plan = plan(options)
    assert run_plan.path == str(step_folder)
    assert list_values(run_plan, "depth") == [1, 2]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise OSError('no such device')", "OSError: no such device ({file}:1)"),
        ("\n{}['hidden']", "KeyError: 'hidden' ({file}:2)"),
        ("import no_such_module", "'no_such_module' ({file}:1)"),
        ("raise SystemExit(3)", "SystemExit: 3 ({file}:1)"),
        ("def prepare(world:", "(broken.py, line 1)"),
        ("", "has no attribute 'prepare'"),
    ],
)
def test_broken_target_is_refused(step_folder: Path, code: str, reason: str) -> None:
    (step_folder / "broken.py").write_text(code)
    message = usage_error(define_custom_step, "broken:prepare", step_folder)
    assert "custom step 'broken:prepare'" in message
    assert message.endswith(reason.format(file=step_folder / "broken.py"))


def measure_readme_step(world: World, folder: str) -> Outcome:
    case = make_case("custom.mystep", "mystep:prepare", {"num_elements": 8, "mode": "blocking"})
    sys.path.append(folder)
    sys.modules.pop("mystep", None)
    try:
        run = CaseRun(case, world, Measure(max_iterations=8), Progress(), None)
        return run.run_block(30.0)
    finally:
        sys.path.remove(folder)


def test_documented_step_is_right_and_can_fail(two_ranks: Ranks, tmp_path: Path) -> None:
    target = "tests.bench.plan.test_options:measure_readme_step"
    page = (ROOT / "docs" / "guides" / "own-step.md").read_text()
    pattern = r"^```python\n(# mystep\.py\n.*?)^```"
    [code] = re.findall(pattern, page, re.DOTALL | re.MULTILINE)
    file = tmp_path / "mystep.py"
    file.write_text(code)
    [outcome, _] = two_ranks.call(target, folder=str(tmp_path))
    assert outcome.status == "ok"
    assert outcome.details["num_elements"] == 8
    file.write_text(
        code.replace("dist.all_reduce(self.buffer, group=self.world.group)", "pass")
    )
    [outcome, _] = two_ranks.call(target, folder=str(tmp_path))
    assert outcome.status == "wrong"
    assert outcome.check.wrong == 16
