"""From options to a plan: what goes before what, ranks that are there, and ranks on the nodes of an allocation."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_runs import MACHINE, MODULES, TORCHRUN, be_allocated, be_alone
from refusals import refusal as error_of

from parbench.bench.machine import slurm_allocation as node_machine
from parbench.bench.machine.gpu import Gpu
from parbench.bench.machine.slurm_allocation import NodeLayout
from parbench.bench.machine.world_spec import Joined
from parbench.bench.plan.options import Options, plan_run
from parbench.bench.plan.plan import PRESETS, Measure, Plan

ONE = Options(preset="smoke", only=("all_reduce",), settings={"size_bytes": "1K,4K"})


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    be_alone(monkeypatch, tmp_path)


def planned(options: Options, joined: Joined | None = None) -> Plan:
    return plan_run(options, MODULES, joined)


def refusal(options: Options, joined: Joined | None = None) -> str:
    return error_of(planned, options, joined)


def params(plan: Plan, name: str) -> list[Any]:
    """Return a parameter of every case, None where a case has none."""
    return [case.params.get(name) for case in plan.cases]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    options = (
        'preset = "full"\nnproc = 3\nbackend = "gloo"\ndevice = "cpu"\nlaunches = 7\nbudget = "5m"\ntimeout = 45\n'
    )
    case = '[[case]]\nname = "all_reduce"\nset = { size_bytes = "1K,3K", dtype = "float16" }\n'
    path = tmp_path / "plan.toml"
    path.write_text(options + case)
    return path


def test_a_plan_file_goes_before_the_preset(file: Path) -> None:
    plan = planned(Options(plan_file=file))
    assert (plan.preset, plan.nproc, plan.launches) == ("full", 3, 7)
    assert (plan.budget_seconds, plan.timeout_seconds) == (300.0, 45.0)
    assert (params(plan, "size_bytes"), params(plan, "dtype")) == ([1024, 3072], ["float16"] * 2)
    assert plan.measure.precision == 0.01  # of the file's preset


def test_a_budget_given_with_the_command_for_several_launches_is_used_up_where_times_are_not_yet_precise(
    file: Path,
) -> None:
    usual, filled = PRESETS["smoke"].measure, Measure(precision=0.05, max_iterations=2000, more_visits=10)
    table: list[tuple[dict[str, Any], Measure]] = [
        ({"budget": "30s"}, usual),  # of the one launch more would not tell how launches differ
        ({"budget": "30s", "launches": 5}, filled),
        ({}, usual),
    ]
    for given, expected in table:
        assert planned(Options(preset="smoke", **given)).measure == expected, given
    assert planned(Options(plan_file=file)).measure == PRESETS["full"].measure, "a file's budget is a limit"


def test_the_command_line_goes_before_the_plan_file(file: Path) -> None:
    plan = planned(Options(plan_file=file, preset="smoke", nproc=2, budget="30s"))
    assert (plan.preset, plan.nproc, plan.launches) == ("smoke", 2, 7)
    assert (plan.budget_seconds, plan.timeout_seconds) == (30.0, 45.0)
    plan = planned(Options(plan_file=file, launches=2, timeout="500ms", settings={"size_bytes": "8K"}))
    assert (plan.launches, plan.budget_seconds, plan.timeout_seconds) == (2, 300.0, 0.5)
    assert (params(plan, "size_bytes"), params(plan, "dtype")) == ([8192], ["float16"])
    file.write_text(file.read_text() + '\n[[case]]\nname = "broadcast"\n')
    only = planned(Options(plan_file=file, only=("broadcast",)))
    assert {asked.name for asked in only.cases} == {"collective.broadcast"}
    file.write_text('preset = "fulll"')
    words = "no preset is named 'fulll': there are smoke, node or full; did you mean 'full'?"
    assert refusal(Options(plan_file=file)) == words


def test_what_is_usual_goes_before_the_preset_where_a_case_knows_it_and_after_the_user(file: Path) -> None:
    usual = Options(only=("all_gather", "barrier", "broadcast"), usual={"mode": "pipelined", "placement": "in_place"})
    plan = planned(usual)
    assert {(one.name.partition(".")[2], *map(one.params.get, usual.usual)) for one in plan.cases} == {
        ("all_gather", "pipelined", "in_place"), ("broadcast", "pipelined", None), ("barrier", "pipelined", None)
    }  # fmt: skip
    assert {*params(planned(replace(usual, settings={"mode": "blocking"})), "mode")} == {"blocking"}
    file.write_text(file.read_text().replace("float16", 'float16", mode = "blocking'))
    told = planned(Options(plan_file=file, usual={"mode": "pipelined", "placement": "out_of_place"}))
    assert {(one.whole["mode"], one.whole["placement"]) for one in told.cases} == {("blocking", "out_of_place")}


def test_the_plan_notes_more_ranks_than_cores_and_what_is_injected_and_keeps_the_links_speed() -> None:
    plan = planned(Options())
    assert (plan.preset, plan.nproc, plan.backend, plan.device, plan.path) == ("node", 4, "gloo", "cpu", None)
    assert {asked.name.partition(".")[0] for asked in plan.cases} == {"collective", "p2p", "memory", "workload"}
    plan = planned(replace(ONE, nproc=6, inject="corrupt:5", link="400Gbit"))
    functional, injected = plan.notes
    assert functional.startswith("functional only")
    assert injected == "injected: corrupt:5"
    assert plan.injection is not None
    assert (plan.injection.rank, plan.link_bytes_per_second) == (5, 50e9)


def test_a_slow_rank_is_refused_where_the_device_replays_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(name="H100", memory_bytes=80 << 30)
    machine = replace(MACHINE, gpus=(gpu, gpu), torch_has_cuda=True)
    monkeypatch.setattr(node_machine, "inspect_machine", lambda environ: machine)
    graph = replace(ONE, settings={"size_bytes": "1K", "mode": "blocking,graph"}, inject="slow:1:10%")
    told = refusal(graph)
    assert told.startswith("--inject slow:1:10%: ")
    assert told.endswith("is replayed by the device; slow knows no mode graph")
    for inject in ("late:1:3ms", "corrupt:1"):
        assert len(planned(replace(graph, inject=inject)).cases) == 2
    assert planned(replace(ONE, inject="slow:1:10%")).injection is not None


HYBRID = Options(only=("workload.hybrid",))


def test_a_mesh_without_a_group_is_that_of_the_step_named_and_says_how_many_ranks(tmp_path: Path) -> None:
    plan = planned(replace(HYBRID, mesh="dp=2,fsdp=2,pp=2,cp=1,tp=2,ep=2"))
    assert (plan.nproc, params(plan, "experts")) == (16, [8])
    assert params(plan, "mesh") == ["dp=2,fsdp=2,pp=2,cp=1,tp=2,ep=2"]
    assert planned(replace(HYBRID, mesh="dp=2,pp=2", settings={"layers": "2"})).nproc == 4
    assert planned(replace(HYBRID, mesh="dp=1,tp=1", allow_single=True)).nproc == 1
    assert planned(replace(HYBRID, mesh="dp=2,tp=2;pp=2,tp=2")).nproc == 4
    (tmp_path / "plan.toml").write_text('[[case]]\nname = "workload.hybrid"\nset = { layers = 2 }\n')
    plan = planned(Options(plan_file=tmp_path / "plan.toml", mesh="pp=2"))
    assert (plan.nproc, params(plan, "mesh")) == (2, ["pp=2"])


def test_a_mesh_is_left_to_those_that_have_none_and_with_a_group_is_for_groups_of_ranks() -> None:
    plan = planned(Options(only=("ddp", "hybrid"), mesh="pp=2"))
    assert [case.name for case in plan.cases] == ["workload.ddp", "workload.hybrid"]
    assert (plan.nproc, params(plan, "mesh")) == (2, [None, "pp=2"])
    assert set(params(planned(replace(ONE, mesh="dp=2,tp=2", group="tp")), "group")) == {"dp=2 tp=2:tp"}
    mixed = planned(replace(ONE, only=("all_reduce", "hybrid"), mesh="dp=2,tp=2", group="tp"))
    assert [case.params["mesh"] for case in mixed.cases if case.name == "workload.hybrid"] == [""]


def test_a_mesh_that_cannot_be_is_refused_in_one_sentence() -> None:
    twice = "mesh 'dp=2,dp=2' is not understood at 'dp=2': write AXIS=SIZE,..., each axis"
    needs = "--mesh dp=2,tp=2 needs --group, one of its axes: dp or tp"
    for options, told in (
        (replace(HYBRID, mesh="dp=2,dp=2"), twice),
        (replace(HYBRID, mesh="dp=2,pq=2"), "mesh axis 'pq' is not dp, fsdp, pp, cp, tp"),
        (replace(HYBRID, mesh="ep=2"), "dp(1) != world size(4)"),
        (replace(HYBRID, mesh="dp=2;pp=2,tp=2"), "mesh = dp=2: dp(2) != world size(4)"),
        (replace(HYBRID, mesh="dp=2", settings={"mesh": "pp=2"}), "--mesh dp=2 and --set mesh=pp=2 say the same"),
        (replace(HYBRID, mesh="dp=2,ep=2", settings={"experts": "0"}), "ep(2) > 1 without experts"),
        (replace(ONE, mesh="dp=2,tp=2"), needs),
        (Options(mesh="dp=2,tp=2"), needs),
    ):
        assert told in refusal(options), options.mesh


def test_a_target_is_planned_with_the_folder_it_lies_in(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def prepare(world, *, depth: int = 3): ...\n")
    plan = planned(Options(target="mine:prepare", settings={"depth": "1,2"}))
    assert plan.path == str(tmp_path)
    assert [(asked.name, asked.params["depth"]) for asked in plan.cases] == [("custom.mine", 1), ("custom.mine", 2)]


def test_ranks_that_are_there_are_found_in_the_variables() -> None:
    assert Joined.find(TORCHRUN) == Joined(rank=0, size=2, local_size=2, one_node=True)
    spread = Joined.find({**TORCHRUN, "RANK": "5", "WORLD_SIZE": "8"})
    assert spread == Joined(rank=5, size=8, local_size=2, one_node=False)
    assert Joined.find({}) is None
    assert Joined.find({"WORLD_SIZE": "2"}) is None
    unknown = Joined.find({name: value for name, value in TORCHRUN.items() if name != "LOCAL_WORLD_SIZE"})
    assert unknown == Joined(rank=0, size=2, local_size=2, one_node=False), "they may lie on several nodes"


def test_variables_that_make_no_sense_are_refused() -> None:
    whole = "RANK, WORLD_SIZE and LOCAL_WORLD_SIZE are whole numbers where they are set"
    assert error_of(Joined.find, {**TORCHRUN, "RANK": "zero"}) == whole
    assert error_of(Joined.find, {**TORCHRUN, "WORLD_SIZE": ""}) == whole
    without = {name: value for name, value in TORCHRUN.items() if name != "MASTER_PORT"}
    assert error_of(Joined.find, without).endswith("set MASTER_ADDR and MASTER_PORT too")


def test_ranks_that_are_there_make_one_launch_of_all_of_them(file: Path) -> None:
    joined = Joined(rank=0, size=3, local_size=3, one_node=True)
    plan = planned(Options(), joined)
    assert (plan.nproc, plan.launches) == (3, 1)
    assert planned(Options(nproc=3, launches=1), joined).nproc == 3
    assert planned(replace(HYBRID, mesh="dp=3"), joined).nproc == 3
    assert refusal(replace(HYBRID, mesh="dp=4"), joined) == "mesh = dp=4: dp(4) != world size(3)"
    assert "--nproc 4: 3 ranks are there already" in refusal(Options(nproc=4), joined)
    assert "--launches 2: ranks that are there already make one launch" in refusal(Options(launches=2), joined)
    assert "--launches 7" in refusal(Options(plan_file=file), joined)
    assert refusal(Options(launches=0)) == "--launches 0: at least 1 is needed"


def test_one_rank_that_is_there_is_refused_unless_it_is_meant_or_others_are_on_other_nodes() -> None:
    single = Joined(rank=0, size=1, local_size=1, one_node=True)
    assert "--allow-single" in refusal(Options(), single)
    assert planned(Options(allow_single=True), single).nproc == 1
    assert planned(Options(), Joined(rank=0, size=4, local_size=1, one_node=False)).nproc == 4


SRUN = Options(preset="smoke", only=("all_reduce",), settings={"size_bytes": "1K"}, launcher="srun")


@pytest.fixture
def allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    be_allocated(monkeypatch)


def test_ranks_are_spread_over_the_allocation_as_it_or_the_user_asked_for(
    allocation: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(SRUN)
    assert (plan.spread, plan.nproc, plan.notes) == (NodeLayout(nodes=4, ntasks_per_node=2), 8, ())
    plan = planned(replace(SRUN, nodes=3, ntasks_per_node=1, placement="cyclic"))
    assert (plan.spread, plan.nproc) == (NodeLayout(nodes=3, ntasks_per_node=1, placement="cyclic"), 3)
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE")
    assert planned(SRUN).spread == NodeLayout(nodes=4, ntasks_per_node=MACHINE.cores), "as many as alone"


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
    for group, placement, members in (("across", "block", [None, 1]), ("node", "cyclic", [None, 1, 2, 3])):
        settings = {"size_bytes": "1K", "group": group, "concurrent": "false"}
        assert params(planned(replace(SRUN, settings=settings, placement=placement)), "group_index") == members


def test_more_ranks_than_cores_of_a_node_are_noted_and_on_an_emulated_cluster_of_the_machine(
    allocation: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert planned(replace(SRUN, ntasks_per_node=8)).notes[0].startswith("functional only: 8 ranks on 4 cores")
    monkeypatch.setenv("PARBENCH_EMULATED", "four nodes on one machine")
    emulated, functional = planned(SRUN).notes
    assert emulated == "emulated: four nodes on one machine"
    assert functional.startswith("functional only: 8 ranks on 4 cores")


def test_what_an_allocation_cannot_hold_is_refused(allocation: None) -> None:
    changes: list[tuple[dict[str, Any], str]] = [
        ({"nodes": 5}, "--nodes 5: job 17 has 4 (n[1-4])"),
        ({"ntasks_per_node": 0}, "--ntasks-per-node 0: at least 1 is needed"),
        ({"nproc": 4}, "--nproc 4: with --launcher srun say --ntasks-per-node, and --nodes"),
        ({"placement": "circular"}, "--placement 'circular' is not known"),
        ({"nodes": 1, "ntasks_per_node": 1}, "needs at least 2 ranks, and this is one node"),
    ]
    for change, told in changes:
        assert told in refusal(replace(SRUN, **change))
    assert "RANK is set" in refusal(SRUN, Joined(rank=0, size=4, local_size=2, one_node=False))


def test_what_only_srun_can_do_is_refused_without_it() -> None:
    only: dict[str, Any] = {"nodes": 2, "ntasks_per_node": 2, "placement": "block", "nodelist": "n1"}
    for option, value in only.items():
        told = f"--{option.replace('_', '-')} {value} is for --launcher srun, which starts ranks on nodes"
        assert refusal(replace(ONE, **{option: value})) == told
