"""From options to a plan: precedence, meshes, ranks that exist and nodes of an allocation."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parbench.bench.machine import slurm_allocation as node_machine
from parbench.bench.machine.gpu import Gpu
from parbench.bench.machine.slurm_allocation import NodeLayout
from parbench.bench.machine.world_spec import Joined
from parbench.bench.plan.options import Options, plan_run
from parbench.bench.plan.plan import PRESETS, Measure, Plan
from tests.support.fake_runs import MACHINE, MODULES, TORCHRUN, isolate_driver, use_slurm_allocation
from tests.support.refusals import usage_error as error_of

ALL_REDUCE = Options(preset="smoke", only=("all_reduce",), settings={"size_bytes": "1K,4K"})
HYBRID = Options(only=("workload.hybrid",))
SRUN = replace(ALL_REDUCE, settings={"size_bytes": "1K"}, launcher="srun")
GPU = Gpu(name="H100", memory_bytes=80 << 30)
PLAN_FILE = """
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


@pytest.fixture(autouse=True)
def single_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate_driver(monkeypatch, tmp_path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(PLAN_FILE)
    return path


def plan(options: Options, joined: Joined | None = None) -> Plan:
    return plan_run(options, MODULES, joined)


def refusal(options: Options, joined: Joined | None = None) -> str:
    return error_of(plan, options, joined)


def values(run_plan: Plan, name: str) -> list[Any]:
    """Return a parameter of every case, None where a case has none."""
    return [case.params.get(name) for case in run_plan.cases]


def test_plan_file_overrides_the_preset(file: Path) -> None:
    from_file = plan(Options(plan_file=file))
    assert (from_file.preset, from_file.nproc, from_file.launches) == ("full", 3, 7)
    assert (from_file.budget_seconds, from_file.timeout_seconds) == (300.0, 45.0)
    assert values(from_file, "size_bytes") == [1024, 3072]
    assert values(from_file, "dtype") == ["float16"] * 2
    assert from_file.measure == PRESETS["full"].measure


def test_options_override_the_plan_file(file: Path) -> None:
    options = Options(plan_file=file, preset="smoke", nproc=2, budget="30s", timeout="500ms")
    smoke = plan(replace(options, settings={"size_bytes": "8K"}))
    assert (smoke.preset, smoke.nproc, smoke.launches) == ("smoke", 2, 7)
    assert (smoke.budget_seconds, smoke.timeout_seconds) == (30.0, 0.5)
    assert values(smoke, "size_bytes") == [8192]
    assert values(smoke, "dtype") == ["float16"]
    file.write_text(PLAN_FILE + '[[case]]\nname = "broadcast"\n')
    selected = plan(Options(plan_file=file, only=("broadcast",)))
    assert {case.name for case in selected.cases} == {"collective.broadcast"}


@pytest.mark.parametrize(
    ("options", "fills"), [({"budget": "30s"}, False), ({"budget": "30s", "launches": 5}, True)]
)
def test_budget_option_of_several_launches_is_filled(options: dict[str, Any], fills: bool) -> None:
    filled = Measure(precision=0.05, max_iterations=2000, more_visits=10)
    measure = plan(Options(preset="smoke", **options)).measure
    assert measure == (filled if fills else PRESETS["smoke"].measure)


def test_usual_values_rank_between_preset_and_user(file: Path) -> None:
    usual = {"mode": "pipelined", "placement": "in_place"}
    options = Options(only=("all_gather", "barrier"), usual=usual)
    by_name = {
        case.name: (case.params["mode"], case.params.get("placement"))
        for case in plan(options).cases
    }
    assert by_name == {
        "collective.all_gather": ("pipelined", "in_place"),
        "collective.barrier": ("pipelined", None),
    }
    blocking = plan(replace(options, settings={"mode": "blocking"}))
    assert {*values(blocking, "mode")} == {"blocking"}
    file.write_text(PLAN_FILE.replace("float16", 'float16", mode = "blocking'))
    from_file = plan(Options(plan_file=file, usual=usual))
    assert {*values(from_file, "mode")} == {"blocking"}


def test_plan_notes_shared_cores_and_injection() -> None:
    options = replace(ALL_REDUCE, nproc=6, inject="corrupt:5", link="400Gbit")
    noted = plan(options)
    functional, injected = noted.notes
    assert functional.startswith("functional only")
    assert injected.endswith("corrupt:5")
    assert noted.injection is not None
    assert noted.injection.rank == 5
    assert noted.link_bytes_per_second == 50e9


def test_slow_injection_is_refused_in_graph_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(MACHINE, gpus=(GPU, GPU), torch_has_cuda=True)
    monkeypatch.setattr(node_machine, "inspect_machine", lambda environ: machine)
    graph = replace(ALL_REDUCE, settings={"size_bytes": "1K", "mode": "blocking,graph"})
    assert "mode graph" in refusal(replace(graph, inject="slow:1:10%"))
    for inject in ("late:1:3ms", "corrupt:1"):
        assert len(plan(replace(graph, inject=inject)).cases) == 2
    assert plan(replace(ALL_REDUCE, inject="slow:1:10%")).injection is not None


@pytest.mark.parametrize(
    ("mesh", "options", "nproc"),
    [
        ("dp=2,fsdp=2,pp=2,cp=1,tp=2,ep=2", {}, 16),
        ("dp=2,pp=2", {"settings": {"layers": "2"}}, 4),
        ("dp=1,tp=1", {"allow_single": True}, 1),
        ("dp=2,tp=2;pp=2,tp=2", {}, 4),
    ],
)
def test_mesh_sets_the_number_of_ranks(mesh: str, options: dict[str, Any], nproc: int) -> None:
    hybrid = plan(replace(HYBRID, mesh=mesh, **options))
    assert hybrid.nproc == nproc
    assert values(hybrid, "mesh") == mesh.split(";")


def test_mesh_applies_to_a_plan_file(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text('[[case]]\nname = "workload.hybrid"\nset = { layers = 2 }\n')
    hybrid = plan(Options(plan_file=file, mesh="pp=2"))
    assert (hybrid.nproc, values(hybrid, "mesh")) == (2, ["pp=2"])


def test_mesh_with_group_selects_groups_of_ranks() -> None:
    workloads = plan(Options(only=("ddp", "hybrid"), mesh="pp=2"))
    assert values(workloads, "mesh") == [None, "pp=2"]
    grouped = plan(replace(ALL_REDUCE, mesh="dp=2,tp=2", group="tp"))
    assert {*values(grouped, "group")} == {"dp=2 tp=2:tp"}
    mixed = plan(replace(ALL_REDUCE, only=("all_reduce", "hybrid"), mesh="dp=2,tp=2", group="tp"))
    assert {*values(mixed, "mesh")} == {None, ""}


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        (replace(HYBRID, mesh="dp=2,dp=2"), "at 'dp=2'"),
        (replace(HYBRID, mesh="dp=2,pq=2"), "'pq'"),
        (replace(HYBRID, mesh="ep=2"), "dp(1) != world size(4)"),
        (replace(HYBRID, mesh="dp=2;pp=2,tp=2"), "dp(2) != world size(4)"),
        (replace(HYBRID, mesh="dp=2", settings={"mesh": "pp=2"}), "--set mesh=pp=2"),
        (replace(HYBRID, mesh="dp=2,ep=2", settings={"experts": "0"}), "ep(2) > 1"),
        (replace(ALL_REDUCE, mesh="dp=2,tp=2"), "--group"),
        (Options(launches=0), "--launches 0"),
        (replace(ALL_REDUCE, nodes=2), "--nodes 2"),
        (replace(ALL_REDUCE, ntasks_per_node=2), "--ntasks-per-node 2"),
        (replace(ALL_REDUCE, placement="block"), "--placement block"),
        (replace(ALL_REDUCE, nodelist="n1"), "--nodelist n1"),
    ],
)
def test_invalid_options_are_refused(options: Options, fact: str) -> None:
    assert fact in refusal(options)


def test_target_is_planned_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def prepare(world, *, depth: int = 3): ...\n")
    custom = plan(Options(target="mine:prepare", settings={"depth": "1,2"}))
    assert custom.path == str(tmp_path)
    assert {case.name for case in custom.cases} == {"custom.mine"}
    assert values(custom, "depth") == [1, 2]


def test_joined_is_read_from_variables() -> None:
    assert Joined.find(TORCHRUN) == Joined(rank=0, size=2, local_size=2, one_node=True)
    spread = Joined.find({**TORCHRUN, "RANK": "5", "WORLD_SIZE": "8"})
    assert spread == Joined(rank=5, size=8, local_size=2, one_node=False)
    assert Joined.find({"WORLD_SIZE": "2"}) is None
    without = {key: value for key, value in TORCHRUN.items() if key != "LOCAL_WORLD_SIZE"}
    assert Joined.find(without) == Joined(rank=0, size=2, local_size=2, one_node=False)


def test_joined_refuses_invalid_variables() -> None:
    for name, value in (("RANK", "zero"), ("WORLD_SIZE", "")):
        assert name in error_of(Joined.find, {**TORCHRUN, name: value})
    without = {key: value for key, value in TORCHRUN.items() if key != "MASTER_PORT"}
    assert "MASTER_PORT" in error_of(Joined.find, without)


JOINED = Joined(rank=0, size=3, local_size=3, one_node=True)


def test_joined_ranks_make_one_launch() -> None:
    default = plan(Options(), JOINED)
    assert (default.nproc, default.launches) == (3, 1)
    assert plan(Options(nproc=3, launches=1), JOINED).nproc == 3
    assert plan(replace(HYBRID, mesh="dp=3"), JOINED).nproc == 3


def test_joined_ranks_refuse_other_numbers(file: Path) -> None:
    assert "dp(4) != world size(3)" in refusal(replace(HYBRID, mesh="dp=4"), JOINED)
    assert "--nproc 4" in refusal(Options(nproc=4), JOINED)
    assert "--launches 2" in refusal(Options(launches=2), JOINED)
    assert "--launches 7" in refusal(Options(plan_file=file), JOINED)
    assert "RANK is set" in refusal(SRUN, JOINED)


def test_single_joined_rank_needs_allow_single() -> None:
    single = Joined(rank=0, size=1, local_size=1, one_node=True)
    assert "--allow-single" in refusal(Options(), single)
    assert plan(Options(allow_single=True), single).nproc == 1
    assert plan(Options(), Joined(rank=0, size=4, local_size=1, one_node=False)).nproc == 4


@pytest.fixture
def allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    use_slurm_allocation(monkeypatch)


def test_ranks_are_spread_over_the_allocation(
    allocation: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = plan(SRUN)
    assert (default.nproc, default.notes) == (8, ())
    assert default.spread == NodeLayout(nodes=4, ntasks_per_node=2)
    cyclic = plan(replace(SRUN, nodes=3, ntasks_per_node=1, placement="cyclic"))
    assert cyclic.nproc == 3
    assert cyclic.spread == NodeLayout(nodes=3, ntasks_per_node=1, placement="cyclic")
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE")
    assert plan(SRUN).spread == NodeLayout(nodes=4, ntasks_per_node=MACHINE.cores)


def test_login_node_plans_for_the_nodes_of_the_job(
    allocation: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = replace(MACHINE, gpus=(GPU,) * 8, torch_has_cuda=True)
    monkeypatch.setattr(node_machine, "_ask", lambda number, environ: node)
    assert plan(SRUN).device == "cpu"
    monkeypatch.delenv("SLURMD_NODENAME")
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE")
    on_nodes = plan(SRUN)
    assert (on_nodes.device, on_nodes.backend, on_nodes.nproc) == ("cuda", "nccl", 32)


@pytest.mark.parametrize(
    ("group", "placement", "indexes"),
    [("across", "block", [None, 1]), ("node", "cyclic", [None, 1, 2, 3])],
)
def test_groups_follow_the_placement(
    allocation: None, group: str, placement: str, indexes: list[int | None]
) -> None:
    settings = {"size_bytes": "1K", "group": group, "concurrent": "false"}
    grouped = plan(replace(SRUN, settings=settings, placement=placement))
    assert values(grouped, "group_index") == indexes


def test_shared_cores_of_nodes_are_noted(allocation: None, monkeypatch: pytest.MonkeyPatch) -> None:
    [note] = plan(replace(SRUN, ntasks_per_node=8)).notes
    assert "8 ranks on 4 cores" in note
    monkeypatch.setenv("PARBENCH_EMULATED", "four nodes")
    emulated, functional = plan(SRUN).notes
    assert "four nodes" in emulated
    assert "8 ranks on 4 cores" in functional


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"nodes": 5}, "--nodes 5"),
        ({"ntasks_per_node": 0}, "--ntasks-per-node 0"),
        ({"nproc": 4}, "--nproc 4"),
        ({"placement": "circular"}, "--placement 'circular'"),
        ({"nodes": 1, "ntasks_per_node": 1}, "at least 2 ranks"),
    ],
)
def test_allocation_limits_are_checked(
    allocation: None, options: dict[str, Any], fact: str
) -> None:
    assert fact in refusal(replace(SRUN, **options))
