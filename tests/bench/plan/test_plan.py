"""Plans: what presets, options and plan files select, skip and refuse."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from parbench.bench.files import encode_json, read_toml
from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.cases import Definition
from parbench.bench.plan.catalogue import DEFINITIONS as CATALOGUE
from parbench.bench.plan.options import Options, make_plan
from parbench.bench.plan.params import Param
from parbench.bench.plan.plan import PRESETS, Entry, FileCase, Plan, PlanFile, read_plan_file
from tests.support.refusals import usage_error as error_of

GLOO = WorldSpec(nproc=2, backend="gloo", device="cpu")
GLOO3 = dataclasses.replace(GLOO, nproc=3)
GLOO4 = dataclasses.replace(GLOO, nproc=4)
SHARDED = ["collective.all_gather", "collective.reduce_scatter", "collective.all_to_all"]
NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "sendrecv")
DEFINITIONS = tuple(entry for entry in CATALOGUE if entry.name.partition(".")[2] in NAMES)


def plan(spec: WorldSpec = GLOO, **options: object) -> Plan:
    """Plan the smoke preset unless the options name another."""
    return make_plan(Options(**{"preset": "smoke", **options}), DEFINITIONS, spec)  # type: ignore[arg-type]


def refusal(spec: WorldSpec = GLOO, **options: object) -> str:
    return error_of(plan, spec, **options)


def sizes(entries: Plan) -> list[int]:
    return [int(case.params["size_bytes"]) for case in entries.cases]


def test_plan_takes_defaults_from_the_preset() -> None:
    smoke, preset = plan(), PRESETS["smoke"]
    assert (smoke.preset, smoke.nproc, smoke.backend, smoke.device) == ("smoke", 2, "gloo", "cpu")
    assert (smoke.launches, smoke.budget_seconds) == (preset.launches, preset.budget_seconds)
    assert (smoke.timeout_seconds, smoke.measure) == (preset.timeout_seconds, preset.measure)
    custom = plan(launches=7, budget="1.5s", timeout="2.5s")
    assert (custom.launches, custom.budget_seconds, custom.timeout_seconds) == (7, 1.5, 2.5)
    assert make_plan(Options(), DEFINITIONS, GLOO) == plan(preset="node")


def test_cases_are_the_product_in_order() -> None:
    settings = {"size_bytes": "4K,1K", "mode": "pipelined,blocking"}
    cases = plan(only=("p2p.sendrecv", "all_reduce"), settings=settings).cases
    names = ("collective.all_reduce", "p2p.sendrecv")
    assert [(case.name, case.params["size_bytes"], case.params["mode"]) for case in cases] == [
        (name, size, mode)
        for name in names
        for size in (4096, 1024)
        for mode in ("pipelined", "blocking")
    ]


def test_setting_replaces_values_of_the_preset() -> None:
    settings = {"mode": "blocking", "size_bytes": "1K"}
    [case] = plan(preset="node", only=("all_reduce",), settings=settings).cases
    assert case.params == {"size_bytes": 1024, "dtype": "float32", "mode": "blocking"}
    rooted = plan(settings={"root": "1"}).cases
    roots = {case.params["root"] for case in rooted if case.name == "collective.broadcast"}
    assert roots == {1}
    assert {case.name for case in rooted} == {definition.name for definition in DEFINITIONS}


def test_entries_replace_those_of_the_preset() -> None:
    entries = (Entry(name="p2p.*", set={"size_bytes": "8K"}), Entry(name="all_gather"))
    assert sizes(plan(entries=entries)) == [1 << 20, 8192]
    overlapping = (
        Entry(name="all_reduce", set={"size_bytes": "1K,2K"}),
        Entry(name="all_*", set={"size_bytes": "2K,4K"}),
    )
    assert sizes(plan(entries=overlapping, only=("all_reduce",))) == [1024, 2048, 4096]


def test_operation_outside_the_preset_runs_with_defaults() -> None:
    param = Param(name="a", kind="int", default=3, help="x")
    own = Definition(name="step.mine", target="m:f", help="x", params=(param,))
    own_plan = make_plan(Options(preset="smoke", only=("mine",)), (*DEFINITIONS, own), GLOO)
    assert [case.params for case in own_plan.cases] == [{"a": 3}]


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"preset": "nod"}, "mean 'node'?"),
        ({"only": ("allreduce",)}, "mean 'all_reduce'?"),
        ({"entries": (Entry(name="allreduce"),)}, "mean 'all_reduce'?"),
        ({"entries": (Entry(name="p2p.*"),), "only": ("all_reduce",)}, "--only all_reduce"),
        ({"settings": {"dtpye": "float16"}}, "mean 'dtype'?"),
        ({"only": ("all_reduce",), "settings": {"root": "0"}}, "no parameter 'root'"),
        ({"entries": (Entry(name="all_*", set={"siz": "1K"}),)}, "no parameter 'siz'"),
        ({"entries": (Entry(name="all_gather", set={"size_bytes": "4"}),)}, "the least is 8"),
    ],
)
def test_unknown_names_are_refused(options: dict[str, Any], fact: str) -> None:
    assert fact in refusal(**options)


SMALL = dataclasses.replace(GLOO, rank_bytes=1_000_000_000)


@pytest.mark.parametrize(
    ("spec", "name", "text", "start"),
    [
        (GLOO, "dtype", "float32,float8_e5m2", "dtype = float8_e5m2: gloo"),
        (GLOO, "size_bytes", "1001", "size_bytes = 1001: "),
        (SMALL, "size_bytes", "1K,1G", "size_bytes = 1073741824: "),
        (GLOO3, "group", "pairs", "group = pairs: "),
    ],
)
def test_value_that_no_case_can_use_is_refused(
    spec: WorldSpec, name: str, text: str, start: str
) -> None:
    assert refusal(spec, only=("all_reduce",), settings={name: text}).startswith(start)


def test_value_that_some_cases_can_use_is_skipped_elsewhere() -> None:
    partial = plan(GLOO4, settings={"size_bytes": "1002", "dtype": "float16"})
    names = [case.name for case in partial.cases]
    assert names == ["collective.all_reduce", "collective.broadcast", "p2p.sendrecv"]
    assert [skipped.case.name for skipped in partial.skipped] == SHARDED
    assert all("nearest are 1000 and 1008" in skipped.reason for skipped in partial.skipped)

    product = plan(GLOO4, settings={"size_bytes": "2,1002,1024", "dtype": "float16,float32"})
    cases = [*product.cases, *(skipped.case for skipped in product.skipped)]
    assert len({case.id for case in cases}) == len(cases) == 6 * 3 * 2


def test_plan_without_a_runnable_case_is_refused() -> None:
    message = refusal(dataclasses.replace(GLOO, rank_bytes=1), only=("all_gather",))
    assert "none of the 2 cases" in message
    assert "collective.all_gather size_bytes=1024" in message


@pytest.mark.parametrize("nproc", [3, 6, 7])
def test_preset_sizes_are_rounded_up_for_any_rank_count(nproc: int) -> None:
    rounded = plan(dataclasses.replace(GLOO, nproc=nproc))
    unit = 8 * nproc
    assert not rounded.skipped
    assert {*sizes(rounded)} == {-(-size // unit) * unit for size in (1024, 1 << 20)}


def test_sizes_of_the_user_are_not_rounded() -> None:
    exact = plan(GLOO3, settings={"size_bytes": "1K"})
    assert {*sizes(exact)} == {1024}
    assert [skipped.case.name for skipped in exact.skipped] == SHARDED


def test_presets_exceed_the_gpu_cache_where_memory_allows() -> None:
    cuda = dataclasses.replace(GLOO, backend="nccl", device="cuda")
    only: dict[str, Any] = {"only": ("p2p.sendrecv",)}
    for preset in ("node", "full"):
        assert max(sizes(plan(preset=preset, **only))) <= 64 << 20
        large = {size for size in sizes(plan(cuda, preset=preset, **only)) if size > 64 << 20}
        assert {round(size / 2**20) for size in large} == {256, 1024}
    assert max(sizes(plan(cuda, **only))) < 2 << 20
    exact = plan(cuda, preset="full", settings={"size_bytes": "64M", "mode": "pipelined"}, **only)
    assert {*sizes(exact)} == {64 << 20}
    short = plan(dataclasses.replace(cuda, rank_bytes=4 << 30), preset="node", **only)
    [reason] = {skipped.reason for skipped in short.skipped}
    assert reason.startswith("size 1G needs about")


FILE_CATALOGUE = (
    Definition(name="n.x", target="m:f", help="", params=()),
    Definition(
        name="n.mesh",
        target="m:f",
        help="",
        params=(Param(name="mesh", kind="mesh", default="", help=""),),
    ),
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "plan.toml"


def test_plan_file_is_utf8_toml(file: Path) -> None:
    text = '# größer\nbudget = "2m"\n[[case]]\nname = "größe"\n[case.set]\nroot = [0, 1]\n'
    file.write_text(text, encoding="utf-8")
    case = FileCase(name="größe", set={"root": [0, 1]})
    assert read_plan_file(file) == PlanFile(budget="2m", case=(case,))
    file.write_text("# nothing\n")
    assert read_plan_file(file) == PlanFile()


def test_plan_file_may_be_json(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    case = FileCase(name="größe", set={"root": [0, 1], "fused": True})
    content = PlanFile(nproc=2, timeout=12.5, case=(case,))
    file.write_bytes(encode_json(content))
    assert read_plan_file(file) == content
    file.write_text('{"nproc": 2, "time": 3}')
    assert "`time`" in error_of(read_plan_file, file)


def test_file_case_becomes_an_entry() -> None:
    values: dict[str, Any] = {"a": 1, "b": 0.1, "c": True, "d": "1K:4K", "e": [1, 2.5, False, "w"]}
    entry = FileCase(name="n.*", set=values).entry(FILE_CATALOGUE)
    texts = {"a": "1", "b": "0.1", "c": "True", "d": "1K:4K", "e": "1,2.5,False,w"}
    assert entry == Entry(name="n.*", set=texts)
    meshes: dict[str, Any] = {"mesh": ["dp=2", "dp=1,tp=2"], "x": [1, 2]}
    entry = FileCase(name="n.mesh", set=meshes).entry(FILE_CATALOGUE)
    assert entry.set == {"mesh": "dp=2;dp=1,tp=2", "x": "1,2"}
    assert "'m'" in error_of(FileCase(name="m", set={}).entry, FILE_CATALOGUE)


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("time-out = 3", "mean 'timeout'?"),
        ("[measure]\nwarmup = 3", "`measure`"),
        ("[[case]]\nname = 'a'\nsets = {}", "mean 'set'?"),
        ("preset = smoke", "line 1"),
        ("nproc = 1\nnproc = 2", "line 2"),
        ('preset = "\xff"\n', "0xff"),
    ],
)
def test_invalid_plan_file_is_refused(file: Path, text: str, fact: str) -> None:
    file.write_bytes(text.encode("latin-1"))
    message = error_of(read_plan_file, file)
    assert message.startswith(f"plan file {file}")
    assert fact in message or "end of document" in message


def test_absent_plan_file_is_refused(file: Path) -> None:
    assert "No such file" in error_of(read_toml, file, "plan file", PlanFile)
