"""From what the user asked, with options or a plan file, to a plan; what is skipped or refused, in words."""

import dataclasses
from pathlib import Path

import click
import pytest
from paths import ROOT
from refusals import refusal as error_of

from parbench.bench.commands import run
from parbench.bench.files import encode_json, read_toml
from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.cases import Definition
from parbench.bench.plan.catalogue import DEFINITIONS as EVERYTHING
from parbench.bench.plan.options import Options, make_plan
from parbench.bench.plan.params import Param
from parbench.bench.plan.plan import PRESETS, Entry, FileCase, Plan, PlanFile, read_plan_file

GLOO = WorldSpec(nproc=2, backend="gloo", device="cpu")
GLOO3 = dataclasses.replace(GLOO, nproc=3)
GLOO4 = dataclasses.replace(GLOO, nproc=4)
ALL_REDUCE = "collective.all_reduce"
SHARDED = ["collective.all_gather", "collective.reduce_scatter", "collective.all_to_all"]
# six operations that planning is shown with; more would show no more
NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "sendrecv")
DEFINITIONS = tuple(definition for definition in EVERYTHING if definition.name.partition(".")[2] in NAMES)


def plan(spec: WorldSpec = GLOO, **asked: object) -> Plan:
    """Plan a smoke run unless told otherwise: it is the smallest."""
    return make_plan(Options(**{"preset": "smoke", **asked}), DEFINITIONS, spec)  # type: ignore[arg-type]


def refusal(spec: WorldSpec = GLOO, **asked: object) -> str:
    return error_of(plan, spec, **asked)


def sizes(made: Plan) -> list[tuple[str, int]]:
    return [(case.name, int(case.params["size_bytes"])) for case in made.cases]


def test_a_plan_carries_the_setting_and_what_the_preset_decides_unless_the_user_says_it() -> None:
    made, preset = plan(), PRESETS["smoke"]
    assert (made.preset, made.nproc, made.backend, made.device) == ("smoke", 2, "gloo", "cpu")
    assert (made.launches, made.budget_seconds) == (preset.launches, preset.budget_seconds)
    assert (made.timeout_seconds, made.measure) == (preset.timeout_seconds, preset.measure)
    made = plan(launches=7, budget="1.5s", timeout="2.5s")
    assert (made.launches, made.budget_seconds, made.timeout_seconds) == (7, 1.5, 2.5)
    assert make_plan(Options(), DEFINITIONS, GLOO) == plan(preset="node")
    assert plan(preset="full") == plan(preset="full")


def test_cases_are_the_product_of_all_values_in_the_order_of_the_catalogue_and_of_the_values() -> None:
    made = plan(only=("p2p.sendrecv", "all_reduce"), settings={"size_bytes": "4K,1K", "mode": "pipelined,blocking"})
    product = [(size, mode) for size in (4096, 1024) for mode in ("pipelined", "blocking")]
    found = [(case.name, case.params["size_bytes"], case.params["mode"]) for case in made.cases]
    assert found == [(name, *values) for name in (ALL_REDUCE, "p2p.sendrecv") for values in product]


def test_a_setting_replaces_the_presets_values_where_there_is_such_a_parameter_and_equal_cases_are_one() -> None:
    made = plan(preset="node", only=("all_reduce",), settings={"mode": "blocking", "size_bytes": "1K"})
    assert [case.params for case in made.cases] == [{"size_bytes": 1024, "dtype": "float32", "mode": "blocking"}]
    made = plan(settings={"root": "1"})
    assert {case.params["root"] for case in made.cases if case.name == "collective.broadcast"} == {1}
    assert {case.name for case in made.cases} == {definition.name for definition in DEFINITIONS}


def test_given_entries_replace_the_presets_and_choose_the_cases() -> None:
    made = plan(entries=(Entry(name="p2p.*", set={"size_bytes": "8K"}), Entry(name="all_gather")))
    assert sizes(made) == [("collective.all_gather", 1 << 20), ("p2p.sendrecv", 8192)]
    entries = (Entry(name="all_reduce", set={"size_bytes": "1K,2K"}), Entry(name="all_*", set={"size_bytes": "2K,4K"}))
    made = plan(entries=entries, only=("all_reduce",))
    assert [size for _, size in sizes(made)] == [1024, 2048, 4096], "two entries for one case both count"


def test_an_operation_outside_the_presets_entries_runs_with_its_defaults() -> None:
    params = (Param(name="a", kind="int", default=3, help="x"),)
    mine = Definition(name="step.mine", target="m:f", help="x", params=params)
    made = make_plan(Options(preset="smoke", only=("mine",)), (*DEFINITIONS, mine), GLOO)
    assert [case.params for case in made.cases] == [{"a": 3}]


def test_an_unknown_name_is_refused_with_what_there_is_and_the_nearest() -> None:
    assert refusal(preset="nod") == "no preset is named 'nod': there are smoke, node or full; did you mean 'node'?"
    for asked in ({"only": ("allreduce",)}, {"entries": (Entry(name="allreduce"),)}):
        assert "no case is named 'allreduce'; did you mean 'all_reduce'?" in refusal(**asked)
    words = refusal(entries=(Entry(name="p2p.*"),), only=("all_reduce",))
    assert words == "--only all_reduce leaves nothing of the plan's cases"


def test_an_unknown_parameter_is_refused_and_not_dropped() -> None:
    assert refusal(settings={"dtpye": "float16"}) == (
        "--set: what was chosen (6 cases) has no parameter 'dtpye': "
        "it has background, concurrent, dtype, group, group_index, mode, placement, redop, root or size_bytes; "
        "did you mean 'dtype'?"
    )
    assert refusal(only=("all_reduce",), settings={"root": "0"}).startswith(f"{ALL_REDUCE} has no parameter 'root'")
    words = refusal(entries=(Entry(name="collective.*", set={"siz": "1K"}),))
    assert "case 'collective.*' (5 cases) has no parameter 'siz'" in words


def test_a_value_asked_for_by_name_under_which_nothing_runs_is_refused() -> None:
    small = dataclasses.replace(GLOO, rank_bytes=1_000_000_000)
    large = "size 1G needs about 6.4 GB a rank; a rank can have 1.0 GB"
    odd = "size 1001 B is not a multiple of 4 B (float32); nearest are 1000 and 1004"
    pairs = "group 'pairs' cannot be formed: world size(3) % 2 != 0"
    for spec, name, text, words in (
        (GLOO, "dtype", "float32,float8_e5m2", "dtype = float8_e5m2: gloo carries no float8_e5m2"),
        (GLOO, "size_bytes", "1001", f"size_bytes = 1001: {odd}"),
        (small, "size_bytes", "1K,1G", f"size_bytes = 1073741824: {large}"),
        (GLOO3, "group", "pairs", f"group = pairs: {pairs}"),
    ):
        assert refusal(spec, only=("all_reduce",), settings={name: text}) == words
    words = refusal(entries=(Entry(name="all_gather", set={"size_bytes": "4"}),))
    assert words == "size_bytes = 4: size 4 B is not a multiple of 2 ranks x 4 B (float32); the least is 8"


def test_what_suits_only_some_operations_runs_there_and_is_skipped_elsewhere_with_the_reason() -> None:
    made = plan(GLOO4, settings={"size_bytes": "1002", "dtype": "float16"})
    assert [case.name for case in made.cases] == [ALL_REDUCE, "collective.broadcast", "p2p.sendrecv"]
    reason = "size 1002 B is not a multiple of 4 ranks x 2 B (float16); nearest are 1000 and 1008"
    assert [(skipped.case.name, skipped.reason) for skipped in made.skipped] == [(name, reason) for name in SHARDED]
    made = plan(GLOO4, settings={"size_bytes": "2,1002,1024", "dtype": "float16,float32"})
    identities = [case.id for case in made.cases] + [skipped.case.id for skipped in made.skipped]
    assert len(identities) == len(set(identities)) == 6 * 3 * 2, "every case of the product is either run or skipped"


def test_a_plan_of_which_nothing_can_run_is_refused_with_the_first_case_and_its_reason() -> None:
    words = refusal(dataclasses.replace(GLOO, rank_bytes=1), only=("all_gather",))
    assert words == (
        "none of the 2 cases asked for can run here; "
        "collective.all_gather size_bytes=1024 dtype=float32 mode=blocking: "
        "size 1K needs about 0.0 GB a rank; a rank can have 0.0 GB"
    )


def test_a_presets_sizes_are_rounded_up_to_what_any_number_of_ranks_can_share_and_the_users_never() -> None:
    for nproc in (3, 6, 7):
        made = plan(dataclasses.replace(GLOO, nproc=nproc))
        assert not made.skipped
        step = 8 * nproc
        assert sorted({size for _, size in sizes(made)}) == [-(-about // step) * step for about in (1024, 1 << 20)]
    made = plan(GLOO3, settings={"size_bytes": "1K"})
    assert {size for _, size in sizes(made)} == {1024}
    assert [skipped.case.name for skipped in made.skipped] == SHARDED


CATALOGUE = (
    Definition(name="n.x", target="m:f", help="", params=()),
    Definition(name="n.mesh", target="m:f", help="", params=(Param(name="mesh", kind="mesh", default="", help=""),)),
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "plan.toml"


def unread(file: Path, text: str) -> str:
    file.write_bytes(text.encode("latin-1"))
    words = error_of(read_toml, file, "plan file", PlanFile)
    assert words.startswith(f"plan file {file}")
    return words


def test_a_file_is_read_as_utf8_and_an_empty_one_leaves_everything_to_the_preset(file: Path) -> None:
    file.write_bytes('# größer\nbudget = "2m"\n[[case]]\nname = "größe"\n[case.set]\nroot = [0, 1]\n'.encode())
    assert read_toml(file, "plan file", PlanFile) == PlanFile(
        budget="2m", case=(FileCase(name="größe", set={"root": [0, 1]}),)
    )
    file.write_text("# nothing\n")
    assert read_toml(file, "plan file", PlanFile) == PlanFile()


def test_read_plan_file_reads_json_by_its_suffix(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    plan = PlanFile(nproc=2, timeout=12.5, case=(FileCase(name="größe", set={"root": [0, 1], "fused": True}),))
    file.write_bytes(encode_json(plan))
    assert read_plan_file(file) == plan
    file.write_text('{"nproc": 2, "time": 3}')
    assert "unknown field `time`" in error_of(read_plan_file, file)


def test_a_case_becomes_an_entry_with_the_text_of_an_option(file: Path) -> None:
    file.write_text('[[case]]\nname = "n.*"\nset = { a = 1, b = 0.1, c = true, d = "1K:4K", e = [1, 2.5, false, "w"] }')
    (case,) = read_toml(file, "plan file", PlanFile).case
    texts = {"a": "1", "b": "0.1", "c": "True", "d": "1K:4K", "e": "1,2.5,False,w"}
    assert case.entry(CATALOGUE) == Entry(name="n.*", set=texts)
    assert "no case is named 'm'" in error_of(FileCase(name="m", set={}).entry, CATALOGUE)


def test_a_list_of_meshes_is_as_many_meshes() -> None:
    """Each has commas of its own, which must not make one other mesh of them."""
    entry = FileCase(name="n.mesh", set={"mesh": ["dp=2", "tp=2", "dp=1,tp=2"], "x": [1, 2]}).entry(CATALOGUE)
    assert entry.set == {"mesh": "dp=2;tp=2;dp=1,tp=2", "x": "1,2"}


def test_the_help_and_the_readme_say_which_options_a_file_holds() -> None:
    *options, _ = PlanFile.__struct_fields__
    (plan,) = (param for param in run.params if isinstance(param, click.Option) and "--plan" in param.opts)
    readme = (ROOT / "bench" / "README.md").read_text(encoding="utf-8")
    said = readme.partition("A plan file\nholds the cases")[2].partition(":")[0]
    for option in options:
        assert option in str(plan.help)
        assert f"`{option}`" in said


def test_an_unknown_key_is_refused_with_the_known_ones_and_the_nearest(file: Path) -> None:
    allowed = "preset, nproc, backend, device, launches, budget, timeout or case"
    for text, words in (
        ("time-out = 3", f"`time-out`; allowed are {allowed}; did you mean 'timeout'?"),
        ("[measure]\nwarmup = 3", f"`measure`; allowed are {allowed}"),
        ("[[case]]\nname = 'a'\nsets = {}", "`sets` - at `$.case[0]`; allowed are name or set; did you mean 'set'?"),
    ):
        assert unread(file, text).endswith(f"unknown field {words}")


def test_what_is_no_toml_or_no_file_is_refused_with_the_place_or_the_reason(file: Path) -> None:
    for text, place in (("preset = smoke", "(at line 1"), ("[[case]", "line 1"), ("nproc = 1\nnproc = 2", "line 2")):
        words = unread(file, text)
        assert "is no TOML: " in words, text
        assert place in words or "end of document" in words, text
    assert "is no TOML: 'utf-8' codec can't decode byte 0xff" in unread(file, 'preset = "\xff"\n')
    file.unlink()
    assert (
        error_of(read_toml, file, "plan file", PlanFile)
        == f"plan file {file} cannot be read: No such file or directory"
    )


def test_presets_go_beyond_a_gpus_cache_on_cuda_where_the_memory_suffices_and_leave_what_is_asked_for() -> None:
    cuda = dataclasses.replace(GLOO, backend="nccl", device="cuda")
    name, mode = "p2p.sendrecv", {"mode": "pipelined"}
    for preset in ("node", "full"):
        largest = {}
        for spec in (GLOO, cuda):
            made = plan(spec, preset=preset, only=(name,))
            largest[spec.device] = [size for _, size in sizes(made) if size > 64 << 20]
        assert not largest["cpu"]
        assert {round(size / 2**20) for size in largest["cuda"]} == {256, 1024}
    assert max(size for _, size in sizes(plan(cuda, only=(name,)))) < 2 << 20, "smoke is small"
    asked = plan(cuda, preset="full", only=(name,), settings={"size_bytes": "64M", **mode})
    assert {size for _, size in sizes(asked)} == {64 << 20}
    short = plan(dataclasses.replace(cuda, rank_bytes=4 << 30), preset="node", only=(name,))
    [reason] = {skipped.reason for skipped in short.skipped}
    assert reason.startswith("size 1G needs about")
