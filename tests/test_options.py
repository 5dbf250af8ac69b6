"""From options to a plan: what goes before what, ranks that are there, and ranks on the nodes of an allocation."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import node_machine
from bench import options as module
from bench.errors import UserError
from bench.machine import Gpu, Machine
from bench.options import Joined, Options, plan_run
from bench.plan import Plan, Spread
from workloads.hybrid import constraints

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


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(node_machine, "look", lambda environ: MACHINE)
    monkeypatch.chdir(tmp_path)


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


def test_a_slow_rank_is_refused_where_the_device_replays_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(name="H100", memory_bytes=80 << 30)
    monkeypatch.setattr(node_machine, "look", lambda environ: replace(MACHINE, gpus=(gpu, gpu), torch_has_cuda=True))
    graph = replace(ONE, settings={"size_bytes": "1K", "mode": "blocking,graph"}, inject="slow:1:10%")
    told = refusal(graph)
    assert told.startswith("--inject slow:1:10%: ")
    assert told.endswith("is replayed by the device; slow knows no mode graph")
    for inject in ("late:1:3ms", "corrupt:1"):
        assert len(planned(replace(graph, inject=inject)).cases) == 2
    assert planned(replace(ONE, inject="slow:1:10%")).injection is not None


HYBRID = Options(only=("workload.hybrid",))


def test_a_mesh_without_a_group_is_that_of_the_step_named_and_says_how_many_ranks() -> None:
    plan = planned(replace(HYBRID, mesh="dp=2,fsdp=2,pp=2,cp=1,tp=2,ep=2"))
    [case] = plan.cases
    assert plan.nproc == 16
    assert case.params["mesh"] == "dp=2,fsdp=2,pp=2,cp=1,tp=2,ep=2"
    assert case.params["experts"] == 8
    assert planned(replace(HYBRID, mesh="dp=2,pp=2", settings={"layers": "2"})).nproc == 4


def test_a_mesh_of_one_rank_is_one_where_that_is_meant() -> None:
    assert planned(replace(HYBRID, mesh="dp=1,tp=1", allow_single=True)).nproc == 1


def test_axes_inside_others_are_those_of_the_step() -> None:
    assert module.INSIDE == constraints.INSIDE


def test_a_mesh_is_left_to_those_that_have_none(file: Path) -> None:
    plan = planned(Options(only=("ddp", "hybrid"), mesh="pp=2"))
    assert [(case.name, case.params.get("mesh")) for case in plan.cases] == [
        ("workload.ddp", None),
        ("workload.hybrid", "pp=2"),
    ]
    assert plan.nproc == 2


def test_several_meshes_of_other_products_do_not_say_how_many_ranks() -> None:
    assert planned(replace(HYBRID, mesh="dp=2,tp=2;pp=2,tp=2")).nproc == 4
    assert refusal(replace(HYBRID, mesh="dp=2;pp=2,tp=2")) == "mesh = dp=2: dp(2) != world size(4)"


def test_a_mesh_with_a_group_is_for_groups_of_ranks_still() -> None:
    plan = planned(replace(ONE, mesh="dp=2,tp=2", group="tp"))
    assert {case.params["group"] for case in plan.cases} == {"dp=2 tp=2:tp"}
    mixed = planned(replace(ONE, only=("all_reduce", "hybrid"), mesh="dp=2,tp=2", group="tp"))
    assert [case.params["mesh"] for case in mixed.cases if case.name == "workload.hybrid"] == [""]


MESHES = [
    (replace(HYBRID, mesh="dp=2,dp=2"), "mesh 'dp=2,dp=2' is not understood at 'dp=2': write AXIS=SIZE,..., each axis"),
    (replace(HYBRID, mesh="dp=0"), "mesh 'dp=0' is not understood at 'dp=0'"),
    (replace(HYBRID, mesh="dp=2,pq=2"), "mesh axis 'pq' is not dp, fsdp, pp, cp, tp"),
    (replace(HYBRID, mesh="tp=8"), r"heads(4) % tp(8) != 0"),
    (replace(HYBRID, mesh="ep=2"), "dp(1) != world size(4)"),
    (replace(HYBRID, mesh="dp=2,pp=2", nproc=2), "dp(2) * pp(2) != world size(2)"),
    (replace(HYBRID, mesh="dp=2", settings={"mesh": "pp=2"}), "--mesh dp=2 and --set mesh=pp=2 say the same"),
    (replace(HYBRID, mesh="dp=2,ep=2", settings={"experts": "0"}), "ep(2) > 1 without experts"),
    (replace(ONE, mesh="dp=2,tp=2"), "--mesh dp=2,tp=2 needs --group, one of its axes: dp or tp"),
    (Options(mesh="dp=2,tp=2"), "--mesh dp=2,tp=2 needs --group, one of its axes: dp or tp"),
]


@pytest.mark.parametrize(("options", "told"), MESHES, ids=[told for _, told in MESHES])
def test_a_mesh_that_cannot_be_is_refused_in_one_sentence(options: Options, told: str) -> None:
    assert told in refusal(options)


def test_ranks_that_are_there_are_not_those_of_the_mesh() -> None:
    joined = Joined(rank=0, size=2, local_size=2, one_node=True)
    assert planned(replace(HYBRID, mesh="dp=2"), joined).nproc == 2
    assert refusal(replace(HYBRID, mesh="dp=4"), joined) == "mesh = dp=4: dp(4) != world size(2)"


def test_a_plan_file_may_name_the_step_of_a_mesh(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text('[[case]]\nname = "workload.hybrid"\nset = { layers = 2 }\n')
    plan = planned(Options(plan_file=tmp_path / "plan.toml", mesh="pp=2"))
    assert (plan.nproc, [case.params["mesh"] for case in plan.cases]) == (2, ["pp=2"])


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
    monkeypatch.setattr(module, "check_srun", lambda: None)


def test_ranks_are_spread_over_the_allocation_as_it_was_asked_for(allocation: None) -> None:
    plan = planned(SRUN)
    assert plan.spread == Spread(nodes=4, ntasks_per_node=2)
    assert plan.nproc == 8
    assert plan.notes == ()


def test_fewer_nodes_other_ranks_and_an_order_may_be_asked_for(allocation: None) -> None:
    plan = planned(replace(SRUN, nodes=3, ntasks_per_node=1, placement="cyclic"))
    assert plan.spread == Spread(nodes=3, ntasks_per_node=1, placement="cyclic")
    assert plan.nproc == 3


def test_a_node_holds_as_many_ranks_as_alone_where_the_allocation_does_not_say(
    allocation: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE")
    assert planned(SRUN).spread == Spread(nodes=4, ntasks_per_node=MACHINE.cores)


def test_on_a_login_node_the_setting_is_that_of_the_jobs_nodes(
    allocation: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have GPUs, and it has none."""
    gpu = Gpu(name="H100", memory_bytes=80 << 30)
    node = replace(MACHINE, gpus=(gpu,) * 8, torch_has_cuda=True)
    monkeypatch.setattr(node_machine, "_ask", lambda number, environ: node)
    assert planned(SRUN).device == "cpu"
    monkeypatch.delenv("SLURMD_NODENAME")
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE")
    plan = planned(SRUN)
    assert (plan.device, plan.backend, plan.nproc) == ("cuda", "nccl", 32)


def test_groups_are_formed_by_the_nodes_that_the_placement_means(allocation: None) -> None:
    across = replace(SRUN, settings={"size_bytes": "1K", "group": "across", "together": "false"})
    assert [case.params.get("member", 0) for case in planned(across).cases] == [0, 1]
    node = replace(across, settings={"size_bytes": "1K", "group": "node", "together": "false"}, placement="cyclic")
    assert [case.params.get("member", 0) for case in planned(node).cases] == [0, 1, 2, 3]


def test_more_ranks_than_cores_of_a_node_are_noted_and_on_an_emulated_cluster_of_the_machine(
    allocation: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert planned(replace(SRUN, ntasks_per_node=8)).notes[0].startswith("functional only: 8 ranks on 4 cores")
    monkeypatch.setenv("PARBENCH_EMULATED", "four nodes on one machine")
    emulated, functional = planned(SRUN).notes
    assert emulated == "emulated: four nodes on one machine"
    assert functional.startswith("functional only: 8 ranks on 4 cores")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"nodes": 5}, "--nodes 5: job 17 has 4 (n[1-4])"),
        ({"ntasks_per_node": 0}, "--ntasks-per-node 0: at least 1 is needed"),
        ({"nproc": 4}, "--nproc 4: with --launcher srun say --ntasks-per-node, and --nodes"),
        ({"placement": "circular"}, "--placement 'circular' is not known"),
        ({"nodes": 1, "ntasks_per_node": 1}, "one node with one rank moves nothing"),
    ],
)
def test_what_an_allocation_cannot_hold_is_refused(allocation: None, change: dict[str, Any], told: str) -> None:
    assert told in refusal(replace(SRUN, **change))


@pytest.mark.parametrize(
    ("option", "value"), [("nodes", 2), ("ntasks_per_node", 2), ("placement", "block"), ("nodelist", "n1")]
)
def test_what_only_srun_can_do_is_refused_without_it(option: str, value: Any) -> None:
    told = refusal(replace(ONE, **{option: value}))
    assert told == f"--{option.replace('_', '-')} {value} is for --launcher srun, which starts ranks on nodes"


def test_srun_starts_no_ranks_that_are_there_already(allocation: None) -> None:
    assert "RANK is set" in refusal(SRUN, Joined(rank=0, size=4, local_size=2, one_node=False))
