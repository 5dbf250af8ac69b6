"""Presets, settings and plan files select, skip and refuse cases."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parbench.bench.files import encode_json
from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.cases import Definition
from parbench.bench.plan.catalogue import DEFINITIONS as CATALOGUE
from parbench.bench.plan.options import Options, make_plan
from parbench.bench.plan.params import Param
from parbench.bench.plan.plan import PRESETS, Entry, FileCase, Plan, PlanFile, read_plan_file
from tests.support.refusals import usage_error

GLOO = WorldSpec(nproc=2, backend="gloo", device="cpu")
GLOO3 = replace(GLOO, nproc=3)
GLOO4 = replace(GLOO, nproc=4)
NCCL = replace(GLOO, backend="nccl", device="cuda")
NAMES = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "sendrecv"}
DEFINITIONS = tuple(entry for entry in CATALOGUE if entry.name.partition(".")[2] in NAMES)


def plan(spec: WorldSpec = GLOO, **options: Any) -> Plan:
    """Plan six operations with the smoke preset, unless the options name another."""
    return make_plan(Options(**{"preset": "smoke", **options}), DEFINITIONS, spec)


def list_values(run_plan: Plan, name: str) -> list[Any]:
    return [case.params[name] for case in run_plan.cases]


def test_plan_takes_defaults_from_preset() -> None:
    run_plan = plan()
    preset = PRESETS["smoke"]
    assert run_plan.preset == "smoke"
    assert run_plan.launches == preset.launches
    assert run_plan.budget_seconds == preset.budget_seconds
    assert run_plan.timeout_seconds == preset.timeout_seconds
    assert run_plan.measure == preset.measure


def test_cases_are_product_in_order() -> None:
    settings = {"size_bytes": "4K,1K", "mode": "pipelined,blocking"}
    run_plan = plan(only=("p2p.sendrecv", "all_reduce"), settings=settings)
    sizes = [4096, 4096, 1024, 1024]
    modes = ["pipelined", "blocking", "pipelined", "blocking"]
    assert list_values(run_plan, "size_bytes") == sizes + sizes
    assert list_values(run_plan, "mode") == modes + modes
    assert run_plan.cases[0].name == "collective.all_reduce"
    assert run_plan.cases[-1].name == "p2p.sendrecv"


def test_setting_replaces_values_of_preset() -> None:
    settings = {"mode": "blocking", "size_bytes": "1K"}
    [case] = plan(preset="node", only=("all_reduce",), settings=settings).cases
    assert case.params == {"size_bytes": 1024, "dtype": "float32", "mode": "blocking"}


def test_entries_replace_preset() -> None:
    entries = (Entry(name="p2p.*", set={"size_bytes": "8K"}), Entry(name="all_gather"))
    assert list_values(plan(entries=entries), "size_bytes") == [1 << 20, 8192]


def test_overlapping_entries_are_merged() -> None:
    entries = (
        Entry(name="all_reduce", set={"size_bytes": "1K,2K"}),
        Entry(name="all_*", set={"size_bytes": "2K,4K"}),
    )
    run_plan = plan(entries=entries, only=("all_reduce",))
    assert list_values(run_plan, "size_bytes") == [1024, 2048, 4096]


def test_operation_outside_preset_has_defaults() -> None:
    param = Param(name="a", kind="int", default=3, help="x")
    step = Definition(name="step.mine", target="m:f", help="x", params=(param,))
    [case] = make_plan(Options(only=("mine",)), (*DEFINITIONS, step), GLOO).cases
    assert case.params == {"a": 3}


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"preset": "nod"}, "'node'"),
        ({"entries": (Entry(name="allreduce"),)}, "'all_reduce'"),
        ({"entries": (Entry(name="p2p.*"),), "only": ("all_reduce",)}, "--only all_reduce"),
        ({"settings": {"dtpye": "float16"}}, "'dtype'"),
        ({"only": ("all_reduce",), "settings": {"root": "0"}}, "'root'"),
        ({"entries": (Entry(name="all_*", set={"siz": "1K"}),)}, "'siz'"),
    ],
)
def test_unknown_name_is_refused(options: dict[str, Any], fact: str) -> None:
    assert fact in usage_error(plan, **options)


@pytest.mark.parametrize(
    ("spec", "name", "text", "value"),
    [
        (GLOO, "dtype", "float32,float8_e5m2", "dtype = float8_e5m2"),
        (GLOO, "size_bytes", "1001", "size_bytes = 1001"),
        (replace(GLOO, rank_bytes=10**9), "size_bytes", "1K,1G", "size_bytes = 1073741824"),
        (GLOO3, "group", "pairs", "group = pairs"),
    ],
)
def test_unusable_value_is_refused(spec: WorldSpec, name: str, text: str, value: str) -> None:
    message = usage_error(plan, spec, only=("all_reduce",), settings={name: text})
    assert message.startswith(value)


def test_value_is_skipped_where_it_is_unusable() -> None:
    run_plan = plan(GLOO4, settings={"size_bytes": "1002", "dtype": "float16"})
    names = [case.name for case in run_plan.cases]
    assert names == ["collective.all_reduce", "collective.broadcast", "p2p.sendrecv"]
    assert len(run_plan.skipped) == 3
    assert "1000 and 1008" in run_plan.skipped[0].reason


def test_plan_without_usable_case_is_refused() -> None:
    message = usage_error(plan, replace(GLOO, rank_bytes=1), only=("all_gather",))
    assert "collective.all_gather size_bytes=1024" in message


@pytest.mark.parametrize("num_ranks", [3, 7])
def test_preset_sizes_are_rounded_up(num_ranks: int) -> None:
    run_plan = plan(replace(GLOO, nproc=num_ranks))
    unit = 8 * num_ranks
    assert not run_plan.skipped
    sizes = sorted(set(list_values(run_plan, "size_bytes")))
    assert [size % unit for size in sizes] == [0, 0]
    assert 0 <= sizes[0] - 1024 < unit
    assert 0 <= sizes[1] - (1 << 20) < unit


def test_sizes_of_user_are_not_rounded() -> None:
    run_plan = plan(GLOO3, settings={"size_bytes": "1K"})
    assert set(list_values(run_plan, "size_bytes")) == {1024}
    assert len(run_plan.skipped) == 3


@pytest.mark.parametrize("preset", ["node", "full"])
def test_presets_exceed_cache_of_gpus(preset: str) -> None:
    on_cpu = plan(preset=preset, only=("p2p.sendrecv",))
    on_gpu = plan(NCCL, preset=preset, only=("p2p.sendrecv",))
    assert max(list_values(on_cpu, "size_bytes")) <= 64 << 20
    assert max(list_values(on_gpu, "size_bytes")) == 1 << 30


def test_size_beyond_memory_of_gpu_is_skipped() -> None:
    run_plan = plan(replace(NCCL, rank_bytes=4 << 30), preset="node", only=("p2p.sendrecv",))
    assert {skipped.reason.split()[1] for skipped in run_plan.skipped} == {"1G"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "plan.toml"


CONTENT = PlanFile(budget="2m", case=(FileCase(name="größe", set={"root": [0, 1]}),))


def test_plan_file_may_be_toml(file: Path) -> None:
    text = '# größer\nbudget = "2m"\n[[case]]\nname = "größe"\n[case.set]\nroot = [0, 1]\n'
    file.write_text(text, encoding="utf-8")
    assert read_plan_file(file) == CONTENT


def test_plan_file_may_be_json(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_bytes(encode_json(CONTENT))
    assert read_plan_file(file) == CONTENT


MESH = Param(name="mesh", kind="mesh", default="", help="")
STEP = Definition(name="n.step", target="m:f", help="", params=(MESH,))


def test_lists_of_plan_file_become_text() -> None:
    values: dict[str, Any] = {"a": 1, "b": "1K:4K", "c": [1, 2.5, False, "w"], "mesh": ["a", "b"]}
    entry = FileCase(name="n.*", set=values).entry((STEP,))
    assert entry.set == {"a": "1", "b": "1K:4K", "c": "1,2.5,False,w", "mesh": "a;b"}
    assert "'m'" in usage_error(FileCase(name="m", set={}).entry, (STEP,))


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("time-out = 3", "'timeout'"),
        ("[measure]\nwarmup = 3", "`measure`"),
        ("preset = smoke", "line 1"),
        ('preset = "\xff"\n', "0xff"),
    ],
)
def test_invalid_plan_file_is_refused(file: Path, text: str, fact: str) -> None:
    file.write_bytes(text.encode("latin-1"))
    message = usage_error(read_plan_file, file)
    assert str(file) in message
    assert fact in message
