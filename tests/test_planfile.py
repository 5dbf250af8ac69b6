"""Plan files: what they may say, and for everything else the file, the place and what is allowed."""

from pathlib import Path

import click
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.cases import Definition, Setting
from bench.commands import run
from bench.definitions import DEFINITIONS
from bench.errors import UserError
from bench.params import Param
from bench.planfile import FileCase, PlanFile, read_plan_file
from bench.planning import Request, make_plan
from bench.presets import Entry

CATALOGUE = (
    Definition(name="n.x", target="m:f", help="", params=()),
    Definition(name="n.mesh", target="m:f", help="", params=(Param(name="mesh", kind="mesh", default="", help=""),)),
)
WHOLE = """
preset = "smoke"
nproc = 4
backend = "gloo"
device = "cpu"
launches = 3
budget = "2m"
timeout = 30

[[case]]
name = "collective.*"
set = { size_bytes = "1K:64K:x4", dtype = ["float16", "float32"] }

[[case]]
name = "broadcast"

[case.set]
root = [0, 1]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "plan.toml"


def refusal(file: Path, text: str) -> str:
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        read_plan_file(file)
    words = str(caught.value)
    assert words.startswith(f"plan file {file}")
    return words


def test_a_whole_file_is_read(file: Path) -> None:
    file.write_text(WHOLE)
    assert read_plan_file(file) == PlanFile(
        preset="smoke",
        nproc=4,
        backend="gloo",
        device="cpu",
        launches=3,
        budget="2m",
        timeout=30.0,
        case=(
            FileCase(name="collective.*", set={"size_bytes": "1K:64K:x4", "dtype": ["float16", "float32"]}),
            FileCase(name="broadcast", set={"root": [0, 1]}),
        ),
    )


def test_an_empty_file_leaves_everything_to_the_preset(file: Path) -> None:
    file.write_text("# nothing\n")
    assert read_plan_file(file) == PlanFile()


def test_a_file_is_utf8_whatever_the_locale(file: Path) -> None:
    file.write_bytes('preset = "smoke" # größer\n[[case]]\nname = "größe"\n'.encode())
    assert read_plan_file(file).case[0].name == "größe"


def test_a_case_becomes_an_entry_with_the_text_of_an_option() -> None:
    values: dict[str, bool | int | float | str | list[bool | int | float | str]] = {
        "a": 1,
        "b": 0.1,
        "c": True,
        "d": "1K:4K:x2",
        "e": [1, 2.5, False, "word"],
    }
    assert FileCase(name="n.*", set=values).entry(CATALOGUE) == Entry(
        name="n.*", set={"a": "1", "b": "0.1", "c": "True", "d": "1K:4K:x2", "e": "1,2.5,False,word"}
    )


@settings(deadline=None)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, unique=True))
def test_numbers_of_a_file_reach_the_parameter_exactly(numbers: list[float]) -> None:
    entry = FileCase(name="n.x", set={"x": [*numbers]}).entry(CATALOGUE)
    assert list(Param(name="x", kind="float", default=0.0, help="").parse_many(entry.set["x"])) == numbers


def test_a_boolean_of_a_file_reaches_the_parameter() -> None:
    entry = FileCase(name="n.x", set={"x": [True, False]}).entry(CATALOGUE)
    assert Param(name="x", kind="bool", default=True, help="").parse_many(entry.set["x"]) == (True, False)


def test_a_list_of_meshes_is_as_many_meshes(file: Path) -> None:
    """Each has commas of its own, which must not make one other mesh of them."""
    file.write_text('[[case]]\nname = "n.mesh"\nset = { mesh = ["dp=2", "tp=2", "dp=1,tp=2"], x = [1, 2] }\n')
    (case,) = read_plan_file(file).case
    entry = case.entry(CATALOGUE)
    assert entry.set == {"mesh": "dp=2;tp=2;dp=1,tp=2", "x": "1,2"}
    (mesh,) = CATALOGUE[1].params
    assert mesh.parse_many(entry.set["mesh"]) == ("dp=2", "tp=2", "dp=1,tp=2")


def test_a_case_that_nothing_bears_is_refused_by_its_name() -> None:
    with pytest.raises(UserError, match="no case is named 'm'"):
        FileCase(name="m", set={}).entry(CATALOGUE)


def test_the_help_and_the_readme_say_which_options_a_file_holds() -> None:
    *options, _ = PlanFile.__struct_fields__
    (plan,) = (param for param in run.params if isinstance(param, click.Option) and "--plan" in param.opts)
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    said = readme.partition("A plan file holds the cases")[2].partition(":")[0]
    for option in options:
        assert option in str(plan.help)
        assert f"`{option}`" in said


def test_a_file_and_options_of_the_same_meaning_make_the_same_plan(file: Path) -> None:
    file.write_text('[[case]]\nname = "all_reduce"\nset = { size_bytes = [1024, "4K"] }\n')
    setting = Setting(nproc=2, backend="gloo", device="cpu")
    entries = tuple(case.entry(DEFINITIONS) for case in read_plan_file(file).case)
    by_file = make_plan(Request(preset="smoke", entries=entries), DEFINITIONS, setting)
    by_options = make_plan(
        Request(preset="smoke", only=("all_reduce",), settings={"size_bytes": "1K,4K"}), DEFINITIONS, setting
    )
    assert by_file == by_options


@pytest.mark.parametrize(
    ("text", "expected", "found", "place"),
    [
        ("preset = 3", "str", "int", "$.preset"),
        ("nproc = 'two'", "int", "str", "$.nproc"),
        ("nproc = true", "int", "bool", "$.nproc"),
        ("launches = 2.5", "int", "float", "$.launches"),
        ("backend = ['gloo']", "str", "array", "$.backend"),
        ("device = {}", "str", "object", "$.device"),
        ("budget = [90]", "float | str", "array", "$.budget"),
        ("timeout = 1979-05-27", "float | str", "date", "$.timeout"),
        ("case = 'all_reduce'", "array", "str", "$.case"),
        ("[case]\nname = 'all_reduce'", "array", "object", "$.case"),
        ("case = ['all_reduce']", "object", "str", "$.case[0]"),
        ("[[case]]\nname = 'a'\n[[case]]\nname = 3", "str", "int", "$.case[1].name"),
        ("[[case]]\nname = 'a'\nset = 'root=1'", "object", "str", "$.case[0].set"),
        ("[[case]]\nname = 'a'\nset.root = {}", "bool | int | float | str | array", "object", "$.case[0].set[...]"),
        ("[[case]]\nname = 'a'\nset.root = [1, []]", "bool | int | float | str", "array", "$.case[0].set[...][1]"),
    ],
)
def test_a_wrong_type_is_refused_with_what_was_expected_what_was_found_and_where(
    file: Path, text: str, expected: str, found: str, place: str
) -> None:
    words = refusal(file, text)
    assert f"Expected `{expected}" in words
    assert f"got `{found}` - at `{place}`" in words


@pytest.mark.parametrize("name", ["nproc", "launches"])
@pytest.mark.parametrize("count", [0, -1])
def test_a_count_below_one_is_refused_and_does_not_mean_the_presets(file: Path, name: str, count: int) -> None:
    assert f"Expected `int` >= 1 - at `$.{name}`" in refusal(file, f"{name} = {count}")


ALLOWED = "preset, nproc, backend, device, launches, budget, timeout or case"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("presett = 'smoke'", f"`presett`; allowed are {ALLOWED}; did you mean 'preset'?"),
        ("time-out = 3", f"`time-out`; allowed are {ALLOWED}; did you mean 'timeout'?"),
        ("xyzzy = 3", f"`xyzzy`; allowed are {ALLOWED}"),
        ("[measure]\nwarmup = 3", f"`measure`; allowed are {ALLOWED}"),
        ("[[case]]\nname = 'a'\nsets = {}", "`sets` - at `$.case[0]`; allowed are name or set; did you mean 'set'?"),
        ("[[case]]\nname = 'a'\n[[case]]\nroot = 1", "`root` - at `$.case[1]`; allowed are name or set"),
    ],
)
def test_an_unknown_key_is_refused_with_the_known_ones_and_the_nearest(file: Path, text: str, words: str) -> None:
    assert refusal(file, text).endswith(f"unknown field {words}")


def test_a_case_needs_a_name(file: Path) -> None:
    assert "missing required field `name` - at `$.case[0]`" in refusal(file, "[[case]]\nset = {}")


@pytest.mark.parametrize(
    "text", ["preset =", "preset = smoke", "[[case]", "nproc = 1\nnproc = 2", '{"preset": "smoke"}']
)
def test_what_is_no_toml_is_refused_with_the_place(file: Path, text: str) -> None:
    words = refusal(file, text)
    assert "is no TOML: " in words
    assert "line" in words or "end of document" in words


def test_what_is_not_utf8_is_refused(file: Path) -> None:
    file.write_bytes(b'preset = "\xff"\n')
    with pytest.raises(UserError, match=r"is no TOML: 'utf-8' codec can't decode byte 0xff"):
        read_plan_file(file)


def test_a_missing_file_and_a_folder_are_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent\.toml cannot be read: No such file or directory"):
        read_plan_file(tmp_path / "absent.toml")
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        read_plan_file(tmp_path)
