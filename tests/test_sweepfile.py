"""Sweep files: what they may say, and for everything else the file, the place and what is allowed."""

from pathlib import Path

import pytest

from bench.errors import UserError
from bench.planfile import FileCase
from slurm.sweepfile import Environment, SlurmTable, SweepFile, read_sweep_file

WHOLE = """
name = "ring against tree"
out = "/shared/sweeps"
mode = "array"
nodes = [1, 2, 4]
ntasks_per_node = 2
placement = ["block", "cyclic"]
repeat = 3
preset = "smoke"
launches = 2
budget = "30s"
timeout = 10
backend = "gloo"
device = "cpu"
link = "200mbit"
exclude = ["nodes == 1 and placement == 'cyclic'"]
prologue = ["module load cuda", "source venv/bin/activate"]
container = "image.sqsh"
python = "python3"

[[case]]
name = "all_reduce"
set = { size_bytes = ["1K", "1M"] }

[matrix]
dtype = ["float32", "bfloat16"]

[[zip]]
root = [0, 1]
member = [0, 1]

[environment.ring]
variables = { NCCL_ALGO = "Ring", NCCL_NTHREADS = 256, FAST = true }

[slurm]
partition = "gpu"
time = "30m"
account = "me"
gres = "gpu:8"
options = { mem = 0, exclusive = true, spread-job = false }
requeue = false
signal_seconds = 60
on_dead_node = "go-on"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "sweep.toml"


def read(file: Path, text: str) -> SweepFile:
    file.write_text(text)
    return read_sweep_file(file)


def refusal(file: Path, text: str) -> str:
    with pytest.raises(UserError) as caught:
        read(file, text)
    words = str(caught.value)
    assert words.startswith(f"sweep file {file}")
    assert "\n" not in words
    return words.removeprefix(f"sweep file {file}").removeprefix(": ")


def test_a_whole_file_is_read(file: Path) -> None:
    assert read(file, WHOLE) == SweepFile(
        name="ring against tree",
        out="/shared/sweeps",
        mode="array",
        nodes=[1, 2, 4],
        ntasks_per_node=2,
        placement=["block", "cyclic"],
        repeat=3,
        preset="smoke",
        launches=2,
        budget="30s",
        timeout=10.0,
        backend="gloo",
        device="cpu",
        link="200mbit",
        exclude=("nodes == 1 and placement == 'cyclic'",),
        prologue=("module load cuda", "source venv/bin/activate"),
        container="image.sqsh",
        python="python3",
        case=(FileCase(name="all_reduce", set={"size_bytes": ["1K", "1M"]}),),
        matrix={"dtype": ["float32", "bfloat16"]},
        zip=({"root": [0, 1], "member": [0, 1]},),
        environment={"ring": Environment(variables={"NCCL_ALGO": "Ring", "NCCL_NTHREADS": 256, "FAST": True})},
        slurm=SlurmTable(
            partition="gpu",
            time="30m",
            account="me",
            gres="gpu:8",
            options={"mem": 0, "exclusive": True, "spread-job": False},
            requeue=False,
            signal_seconds=60,
            on_dead_node="go-on",
        ),
    )


def test_what_is_absent_has_the_defaults_that_are_documented(file: Path) -> None:
    found = read(file, "# nothing\n")
    assert found == SweepFile()
    assert (found.out, found.mode, found.repeat) == ("sweeps", "one", 1)
    assert (found.slurm.requeue, found.slurm.signal_seconds, found.slurm.on_dead_node) == (True, 120, "fail")


def test_variables_become_text_as_a_shell_would_write_it(file: Path) -> None:
    assert read(file, WHOLE).environment["ring"].texts() == {
        "NCCL_ALGO": "Ring",
        "NCCL_NTHREADS": "256",
        "FAST": "true",
    }


def test_options_are_those_with_keys_of_their_own_and_those_passed_through(file: Path) -> None:
    assert read(file, WHOLE).slurm.all_options() == {
        "account": "me",
        "gres": "gpu:8",
        "mem": "0",
        "exclusive": True,
    }


@pytest.mark.parametrize(
    ("text", "expected", "found", "place"),
    [
        ("name = 3", "str", "int", "$.name"),
        ("nodes = 'two'", "int", "str", "$.nodes"),
        ("nodes = true", "int", "bool", "$.nodes"),
        ("nodes = [1, 'x']", "int", "str", "$.nodes[1]"),
        ("repeat = 1.5", "int", "float", "$.repeat"),
        ("matrix = []", "object", "array", "$.matrix"),
        ("[matrix]\ndtype = 'float32'", "array", "str", "$.matrix[...]"),
        ("[zip]\na = [1]", "array", "object", "$.zip"),
        ("exclude = 'nodes == 1'", "array", "str", "$.exclude"),
        ("prologue = 'module load x'", "array", "str", "$.prologue"),
        ("environment = ['ring']", "object", "array", "$.environment"),
        ("[environment.a]\nvariables = { X = [1] }", "bool | int | float | str", "array", "$.environment[...]"),
        ("slurm.time = 30", "str | null", "int", "$.slurm.time"),
        ("slurm.requeue = 'no'", "bool", "str", "$.slurm.requeue"),
        ("slurm.options.mem = []", "bool | int | str", "array", "$.slurm.options[...]"),
        ("[[case]]\nname = 3", "str", "int", "$.case[0].name"),
    ],
)
def test_a_wrong_type_is_refused_with_what_was_expected_what_was_found_and_where(
    file: Path, text: str, expected: str, found: str, place: str
) -> None:
    words = refusal(file, text)
    assert f"Expected `{expected}" in words
    assert f"got `{found}` - at `{place}" in words


@pytest.mark.parametrize("name", ["nodes", "ntasks_per_node", "repeat", "launches"])
@pytest.mark.parametrize("count", ["0", "-1"])
def test_a_count_below_one_is_refused(file: Path, name: str, count: str) -> None:
    assert f"Expected `int` >= 1 - at `$.{name}`" in refusal(file, f"{name} = {count}")


def test_a_count_below_one_in_a_list_and_a_list_of_none_are_refused(file: Path) -> None:
    assert "Expected `int` >= 1 - at `$.nodes[1]`" in refusal(file, "nodes = [1, 0]")
    assert "Expected `array` of length >= 1 - at `$.nodes`" in refusal(file, "nodes = []")
    assert "Expected `array` of length >= 1 - at `$.placement`" in refusal(file, "placement = []")
    assert "Expected `int` >= 1 - at `$.slurm.signal_seconds`" in refusal(file, "slurm.signal_seconds = 0")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("node = 3", "unknown field `node`; allowed are name, out, mode, nodes, "),
        ("node = 3", "did you mean 'nodes'?"),
        ("slurm.partitions = 'x'", "`partitions` - at `$.slurm`; allowed are partition, time, account, "),
        ("slurm.partitions = 'x'", "did you mean 'partition'?"),
        ("[environment.a]\nvars = {}", "`vars` - at `$.environment[...]`; allowed are variables"),
        ("[[case]]\nname = 'a'\nsets = {}", "`sets` - at `$.case[0]`; allowed are name or set; did you mean 'set'?"),
        ("nproc = 2", "unknown field `nproc`"),
    ],
)
def test_an_unknown_key_is_refused_with_the_known_ones_and_the_nearest(file: Path, text: str, words: str) -> None:
    assert words in refusal(file, text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mode = 'arrays'", "'arrays' - at `$.mode`; allowed are one, array or each; did you mean 'array'?"),
        ("placement = 'blok'", "'blok' - at `$.placement`; allowed are block or cyclic; did you mean 'block'?"),
        ("placement = ['block', 'x']", "'x' - at `$.placement[1]`; allowed are block or cyclic"),
        ("slurm.on_dead_node = 'go on'", "allowed are fail or go-on; did you mean 'go-on'?"),
    ],
)
def test_an_unknown_choice_is_refused_with_the_choices_and_the_nearest(file: Path, text: str, words: str) -> None:
    assert refusal(file, text).endswith(words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("budget = '30 years'", "$.budget: duration '30 years' is not understood"),
        ("budget = 0", "$.budget: duration '0.0' is not understood"),
        ("timeout = -1", "$.timeout: duration '-1.0' is not understood"),
        ("slurm.time = '1:00:00'", "$.slurm.time: duration '1:00:00' is not understood"),
        ("link = '200'", "$.link: link speed '200' is not understood"),
        ("backend = 'gloop'", "$.backend: 'gloop' is not known; did you mean 'gloo'?; allowed: gloo or nccl"),
        ("device = 'tpu'", "$.device: 'tpu' is not known"),
        ("backend = 'nccl'\ndevice = 'cpu'", "$.backend: 'nccl' moves data between GPUs, and $.device is 'cpu'"),
        ("[environment.a]\nvariables = { 'A-B' = 1 }", "$.environment.a.variables: 'A-B' is no name"),
        ("slurm.options.nodes = 4", "$.slurm.options: 'nodes' is for parbench to set; leave it out"),
        ("slurm.options.qos = 'x'", "$.slurm.options: 'qos' has a key of its own: write $.slurm.qos"),
        ("slurm.options.--mem = 1", "$.slurm.options: '--mem' is no long option of sbatch; write it without dashes"),
        ('slurm.options.comment = "a\\n#SBATCH --x"', "$.slurm.options: comment = 'a\\n#SBATCH --x' is not one"),
        ('slurm.account = "a\\nb"', "$.slurm.account: 'a\\nb' is not one printable line"),
        ("slurm.partition = ''", "$.slurm.partition: '' is not one printable line"),
        ('prologue = ["a", "b\\nc"]', "$.prologue[1]: 'b\\nc' is more than one line"),
    ],
)
def test_what_has_the_right_type_and_no_meaning_is_refused_with_the_place(file: Path, text: str, words: str) -> None:
    assert refusal(file, text).startswith(words)


@pytest.mark.parametrize("text", ["nodes =", "nodes = two", "[[case]", "nodes = 1\nnodes = 2"])
def test_what_is_no_toml_is_refused(file: Path, text: str) -> None:
    assert refusal(file, text).startswith(" is no TOML: ")


def test_a_missing_file_and_one_that_is_not_utf8_are_refused(tmp_path: Path, file: Path) -> None:
    with pytest.raises(UserError, match=r"absent\.toml cannot be read: No such file or directory"):
        read_sweep_file(tmp_path / "absent.toml")
    file.write_bytes(b'name = "\xff"\n')
    with pytest.raises(UserError, match=r"is no TOML: 'utf-8' codec"):
        read_sweep_file(file)


def test_the_readmes_sweep_is_the_example_and_is_one() -> None:
    root = Path(__file__).parents[1]
    example = root / "slurm" / "example.toml"
    shown = "\n".join(line for line in example.read_text().splitlines() if not line.startswith("#"))
    assert f"```toml\n{shown}\n```" in (root / "README.md").read_text()
    assert read_sweep_file(example).nodes == [2, 4]
