"""Presets: every one makes a plan everywhere, and each is larger than the one before it."""

from itertools import pairwise

import pytest

from bench.cases import Setting, load_catalogue, select
from bench.plan import Plan
from bench.planning import Request, make_plan
from bench.presets import PRESETS
from parbench import DEFINITIONS as MODULES

DEFINITIONS = load_catalogue(MODULES)
ORDER = ["smoke", "node", "full"]
NAMES = (
    "ddp",
    "zero1",
    "zero2",
    "zero3",
    "hsdp",
    "tp",
    "tp_sp",
    "tp_fsdp",
    "pp",
    "cp",
    "ep_dispatch",
    "ep_layer",
    "ep_step",
    "hybrid",
)
STEPS = {f"workload.{name}" for name in NAMES}
ALIKE = {f"workload.{name}" for name in ("zero1", "zero2", "hsdp", "tp", "ep_dispatch", "ep_layer", "hybrid")}
"""Steps of whose kind there is another."""
BEYOND_SMOKE = {"p2p.matrix", "p2p.round", "compute.gemm"}
OMITTED = {
    "smoke": BEYOND_SMOKE | ALIKE,
    "node": BEYOND_SMOKE | STEPS - {"workload.ddp"},
    "full": set[str](),
}
REFUSED_STEPS = {
    2: {},
    3: {
        "workload.hsdp": "replicate(1) * shard(2) != world size(3)",
        "workload.tp": "heads(4) % tp(3) != 0",
        "workload.tp_sp": "heads(4) % tp(3) != 0",
        "workload.tp_fsdp": "dp(1) * tp(2) != world size(3)",
        "workload.pp": "layers(4) % stages(3) != 0: split = 2+1+... says how many each stage takes",
        "workload.cp": "sequence(64) % cp(3) != 0",
        **{f"workload.{name}": "experts(8) % ep(3) != 0" for name in ("ep_dispatch", "ep_layer", "ep_step")},
    },
    4: {},
    8: {
        "workload.tp": "heads(4) % tp(8) != 0",
        "workload.tp_sp": "heads(4) % tp(8) != 0",
        "workload.pp": "layers(4) % stages(8) != 0: split = 2+1+... says how many each stage takes",
    },
}
"""Which training steps of the tiny shape cannot be divided among so many ranks, and the equation."""


def plan(preset: str, backend: str = "gloo", nproc: int = 2) -> Plan:
    device = "cpu" if backend == "gloo" else "cuda"
    return make_plan(Request(preset=preset), DEFINITIONS, Setting(nproc=nproc, backend=backend, device=device))


def test_there_are_three_and_each_is_tested_here() -> None:
    assert list(PRESETS) == ORDER


@pytest.mark.parametrize("preset", ORDER)
def test_every_preset_measures_every_operation_and_step_but_what_it_omits(preset: str) -> None:
    assert {case.name for case in plan(preset).cases} == {d.name for d in DEFINITIONS} - OMITTED[preset]


def test_the_steps_are_those_of_this_list() -> None:
    assert {definition.name for definition in DEFINITIONS if definition.kind == "workload"} == STEPS


@pytest.mark.parametrize("preset", ORDER)
@pytest.mark.parametrize("nproc", [2, 3, 4, 8])
def test_on_nccl_only_groups_that_need_more_nodes_or_an_even_number_of_ranks_are_skipped(
    preset: str, nproc: int
) -> None:
    skipped = [entry for entry in plan(preset, "nccl", nproc).skipped if entry.case.name not in STEPS]
    groups = {"across", *(("pairs",) if nproc % 2 else ())} if preset == "full" else set()
    assert {entry.case.params.get("group") for entry in skipped} == groups
    assert all("2 nodes" in entry.reason or "% 2 != 0" in entry.reason for entry in skipped)


@pytest.mark.parametrize("preset", ORDER)
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("nproc", REFUSED_STEPS)
def test_a_step_that_cannot_be_divided_is_skipped_with_the_equation(preset: str, backend: str, nproc: int) -> None:
    planned = plan(preset, backend, nproc)
    skipped = {entry.case.name: entry.reason for entry in planned.skipped if entry.case.name in STEPS}
    expected = {name: why for name, why in REFUSED_STEPS[nproc].items() if name not in OMITTED[preset]}
    assert skipped == expected
    assert {case.name for case in planned.cases} & STEPS == STEPS - OMITTED[preset] - expected.keys()


@pytest.mark.parametrize("preset", ["smoke", "node"])
def test_on_gloo_nothing_of_the_small_presets_is_skipped(preset: str) -> None:
    assert plan(preset).skipped == ()


def test_on_gloo_the_full_preset_skips_float8_and_says_why() -> None:
    skipped = [entry for entry in plan("full").skipped if "group" not in entry.case.params]
    assert {entry.case.params["dtype"] for entry in skipped} == {"float8_e4m3fn"}
    assert {entry.reason for entry in skipped} == {"gloo carries no float8_e4m3fn"}
    assert {entry.case.params["size_bytes"] for entry in skipped} == {1 << 20}
    assert len(skipped) == 6  # the main operations


@pytest.mark.parametrize("preset", ORDER)
def test_every_parameter_of_a_preset_belongs_to_each_case_it_is_for(preset: str) -> None:
    for entry in PRESETS[preset].entries:
        for definition in select(DEFINITIONS, [entry.name]):
            assert set(entry.set) <= {param.name for param in definition.params}


def test_each_preset_asks_for_more_than_the_one_before() -> None:
    for smaller, larger in pairwise(ORDER):
        assert len(plan(smaller).cases) < len(plan(larger).cases)
        assert PRESETS[smaller].launches < PRESETS[larger].launches
        assert PRESETS[smaller].budget_seconds < PRESETS[larger].budget_seconds
        assert PRESETS[smaller].measure.precision > PRESETS[larger].measure.precision


def test_the_node_preset_has_the_launches_and_the_time_that_the_design_promises() -> None:
    assert PRESETS["node"].launches == 5
    assert PRESETS["node"].budget_seconds < 120


def test_the_full_preset_goes_to_64m_in_four_types_three_modes_and_beside_loads() -> None:
    cases = plan("full", "nccl").cases
    assert max(int(case.params.get("size_bytes", 0)) for case in cases) == 64 << 20
    assert {case.params.get("dtype") for case in cases} == {"float32", "bfloat16", "int32", "float8_e4m3fn", None}
    assert {case.params.get("mode") for case in cases} == {"blocking", "pipelined", "async", None}
    assert {case.params.get("beside") for case in cases} == {None, "gemm", "all_reduce", "all_to_all"}
    assert {case.params.get("group") for case in cases} == {None, "node", "pairs"}
    assert {case.params.get("together") for case in plan("full", "nccl", 4).cases} == {None, True}
    assert {case.params.get("redop") for case in cases} == {None, "avg", "min", "max", "product"}


def test_a_case_that_two_entries_name_is_measured_once() -> None:
    cases = plan("full", "nccl").cases
    assert len({case.id for case in cases}) == len(cases)
