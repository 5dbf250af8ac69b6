"""Sweep files: what they may say, vary and leave out, and for everything else the place and what is allowed."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from parbench.bench.plan.catalogue import DEFINITIONS
from parbench.slurm.sweep.expand import read_axes
from parbench.slurm.sweep.sweepfile import SweepFile, read_sweep_file
from tests.support.paths import ROOT
from tests.support.refusals import usage_error as told


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "sweep.toml"


def read(file: Path, text: str) -> SweepFile:
    file.write_text(text)
    return read_sweep_file(file)


def refusal(file: Path, text: str) -> str:
    words = told(read, file, text)
    assert words.startswith(f"sweep file {file}")
    assert "\n" not in words
    return words.removeprefix(f"sweep file {file}").removeprefix(": ")


def test_a_file_has_documented_defaults_and_options_become_what_sbatch_takes(file: Path) -> None:
    found = read(file, "# nothing\n")
    assert found == SweepFile()
    assert (found.out, found.mode, found.repeat) == ("sweeps", "one", None)
    assert (found.slurm.requeue, found.slurm.on_dead_node) == (True, "fail")
    text = "environment.ring.variables = { NCCL_ALGO = 'Ring', NCCL_NTHREADS = 256, FAST = true }\n"
    text += "[slurm]\ntime = '30m'\n"
    found = read(
        file, text + "options = { account = 'me', mem = 0, exclusive = true, spread-job = false }"
    )
    assert found.environment["ring"].texts() == {
        "NCCL_ALGO": "Ring",
        "NCCL_NTHREADS": "256",
        "FAST": "true",
    }
    assert found.slurm.all_options() == {"account": "me", "mem": "0", "exclusive": True}


def test_a_wrong_type_count_key_or_choice_is_refused_with_what_is_allowed_what_was_found_and_where(
    file: Path,
) -> None:
    for name in ("nodes", "ntasks_per_node", "repeat", "launches"):
        assert f"Expected `int` >= 1 - at `$.{name}`" in refusal(file, f"{name} = 0"), name
    for text, words in (
        ("name = 3", "Expected `str | null`, got `int` - at `$.name`"),
        ("nodes = [1, 'x']", "Expected `int`, got `str` - at `$.nodes[1]`"),
        (
            "[environment.a]\nvariables = { X = [1] }",
            "got `array` - at `$.environment[...].variables[...]`",
        ),
        ("nodes = []", "Expected `array` of length >= 1 - at `$.nodes`"),
        (
            "node = 3",
            "unknown field `node`; allowed are name, out, mode, nodes, ntasks_per_node, placement, repeat, preset, "
            "launches, budget, timeout, backend, device, link, case, matrix, zip, exclude, environment, slurm, "
            "prologue, container or python; did you mean 'nodes'?",
        ),
        (
            "slurm.partitions = 'x'",
            "`partitions` - at `$.slurm`; allowed are partition, time, options, requeue or on_dead_node; "
            "did you mean 'partition'?",
        ),
        (
            "[[case]]\nname = 'a'\nsets = {}",
            "`sets` - at `$.case[0]`; allowed are name or set; did you mean 'set'?",
        ),
        (
            "mode = 'arrays'",
            "'arrays' - at `$.mode`; allowed are one or array; did you mean 'array'?",
        ),
        ("slurm.on_dead_node = 'go on'", "allowed are fail or go-on; did you mean 'go-on'?"),
    ):
        assert words in refusal(file, text), text


def test_what_has_the_right_type_and_no_meaning_is_refused_with_the_place(file: Path) -> None:
    for text, words in (
        ("budget = '30 years'", "$.budget: duration '30 years' is not understood"),
        ("timeout = -1", "$.timeout: duration '-1.0' is not understood"),
        ("slurm.time = '1:00:00'", "$.slurm.time: duration '1:00:00' is not understood"),
        ("link = '200'", "$.link: link speed '200' is not understood"),
        (
            "backend = 'gloop'",
            "$.backend: 'gloop' is not known; did you mean 'gloo'?; allowed: gloo or nccl",
        ),
        (
            "backend = 'nccl'\ndevice = 'cpu'",
            "$.backend: 'nccl' moves data between GPUs, and $.device is 'cpu'",
        ),
        (
            "[environment.a]\nvariables = { 'A-B' = 1 }",
            "$.environment.a.variables: 'A-B' is no name",
        ),
        ("slurm.options.nodes = 4", "$.slurm.options: parbench sets 'nodes' itself"),
        (
            "slurm.options.--mem = 1",
            "$.slurm.options: '--mem' is not a long option of sbatch; write it without dashes",
        ),
        (
            'slurm.options.comment = "a\\n#SBATCH --x"',
            "$.slurm.options: comment = 'a\\n#SBATCH --x' is not one",
        ),
        (
            'slurm.options.account = "a\\nb"',
            "$.slurm.options: account = 'a\\nb' is not one printable line",
        ),
        ("slurm.partition = ''", "$.slurm.partition: '' is not one printable line"),
        ('prologue = ["a", "b\\nc"]', "$.prologue[1]: 'b\\nc' is more than one line"),
    ):
        assert refusal(file, text).startswith(words), text


def test_the_readmes_sweep_is_the_example_and_is_one() -> None:
    example = ROOT / "slurm" / "example.toml"
    shown = "\n".join(line for line in example.read_text().splitlines() if not line.startswith("#"))
    assert f"```toml\n{shown}\n```" in (ROOT / "slurm" / "README.md").read_text()
    assert read_sweep_file(example).nodes == [2, 4]


def sweep(**given: Any) -> SweepFile:
    return msgspec.convert({"case": [{"name": "all_reduce"}], **given}, SweepFile)


def texts(**given: Any) -> list[list[dict[str, str]]]:
    axes = read_axes(sweep(**given), DEFINITIONS)
    return [axis for axis in axes if len(axis) > 1]


def test_what_varies_comes_in_its_order_and_environments_vary_fastest_unless_a_zip_chooses_them() -> (
    None
):
    axes = read_axes(sweep(nodes=2), DEFINITIONS)
    merged = {name: text for axis in axes for row in axis for name, text in row.items()}
    shape = {
        "nodes": "2",
        "ntasks_per_node": "1",
        "placement": "block",
        "environment": "",
        "repeat": "1",
    }
    assert merged == shape
    environments: dict[str, object] = {"a": {}, "b": {}}
    both = {"placement": ["block", "cyclic"], "matrix": {"dtype": ["float32", "float16"]}}
    assert texts(nodes=[1, 2], **both, environment=environments) == [
        [{"nodes": "1"}, {"nodes": "2"}],
        [{"dtype": "float32"}, {"dtype": "float16"}],
        [{"placement": "block"}, {"placement": "cyclic"}],
        [{"environment": "a"}, {"environment": "b"}],
    ]
    assert texts(environment=environments, zip=[{"nodes": [1, 2], "environment": ["b", "a"]}]) == [
        [{"nodes": "1", "environment": "b"}, {"nodes": "2", "environment": "a"}]
    ]


def test_what_cannot_vary_so_is_refused_with_the_place_and_what_is_allowed(file: Path) -> None:
    empty, both = (
        "an empty table or list leaves no point; give it values",
        "is given too; leave out one of them",
    )
    again = "is given 2 times; give it once, and repeat = 2 if that is meant"
    for text, words in (
        ("", "$.nodes is missing: write nodes = 2, or nodes = [1, 2, 4]"),
        ("nodes = [2, 4, 2]", f"$.nodes: nodes = 2 {again}"),
        (
            "matrix.nodes = [0]",
            "$.matrix.nodes: nodes = 0 is not allowed: it is a whole number of at least 1",
        ),
        ("matrix.nodes = [true]", "$.matrix.nodes: nodes = True is not allowed"),
        (
            "zip = [{ nodes = [1, 2], root = [0] }]",
            "$.zip[0]: nodes has 2 values and root has 1: what varies together",
        ),
        ("nodes = 2\nzip = [{}]", f"$.zip[0]: {empty}"),
        (
            "nodes = 2\nmatrix.dtype = []",
            "$.matrix.dtype: an empty list leaves no point; give it a value",
        ),
        (
            "nodes = 2\nmatrix.dtype = ['int8']\nzip = [{ dtype = ['int32'] }]",
            "'dtype' varies in 2 places of matrix",
        ),
        (
            "nodes = 2\nrepeat = 3\nmatrix.repeat = [1, 2]",
            f"'repeat' varies in matrix or zip, and $.repeat {both}",
        ),
        (
            "nodes = 2\nplacement = 'block'\nmatrix.placement = ['cyclic']",
            f"'placement' varies in matrix or zip, and $.placement {both}",
        ),
        (
            "nodes = 2\nmatrix.placement = ['blok']",
            "$.matrix.placement: placement = 'blok' is not allowed: it is block or cyclic; did you mean 'block'?",
        ),
        (
            "nodes = 2\nmatrix.environment = ['rings']\n[environment.ring]",
            "$.matrix.environment: environment = 'rings' is not allowed: it is ring; did you mean 'ring'?",
        ),
        (
            "nodes = 2\nmatrix.environment = ['ring']",
            "$.matrix.environment: environment = 'ring' is not allowed: it is one of the tables [environment.NAME]",
        ),
        (
            "nodes = 2\nmatrix.dtpye = ['int8']",
            "$.matrix.dtpye: 'dtpye' is not a parameter of the cases; there are nodes",
        ),
        (
            "nodes = 2\nmatrix.dtype = ['float31']",
            "$.matrix.dtype: dtype = 'float31' is not allowed",
        ),
        (
            "nodes = 2\nmatrix.size_bytes = ['1K:4K:x2']",
            "$.matrix.size_bytes: size_bytes = '1K:4K:x2' is 3 values: a",
        ),
        (
            "nodes = 2\nmatrix.size_bytes = ['1K', '1K']",
            f"$.matrix.size_bytes: size_bytes = 1K {again}",
        ),
        (
            "nodes = 2\nmatrix.mode = ['async']",
            "$.matrix.mode: 'mode' is set in $.case[0] too; leave out one of them",
        ),
    ):
        found = read(file, f"{text}\n[[case]]\nname = 'all_reduce'\nset.mode = 'blocking'")
        assert told(read_axes, found, DEFINITIONS).startswith(words), text
    matrix: dict[str, list[Any]] = {"dtype": ["int32"]}
    assert "'dtype' is a parameter of no case: add a [[case]]" in told(
        read_axes, sweep(nodes=2, case=[], matrix=matrix), DEFINITIONS
    )
    unknown = sweep(nodes=2, case=[{"name": "allreduce"}], matrix=matrix)
    assert told(read_axes, unknown, DEFINITIONS).startswith("$.matrix.dtype: no case is")
    assert told(read_axes, sweep(nodes=2, matrix={"dtpye": ["int8"]}), DEFINITIONS).endswith(
        "did you mean 'dtype'?"
    )
