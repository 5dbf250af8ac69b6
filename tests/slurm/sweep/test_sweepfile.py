"""Sweep files: what they may say, vary and leave out, and for everything else the place and what is allowed."""

import contextlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from paths import ROOT
from refusals import refusal as told

from parbench.bench.plan.catalogue import DEFINITIONS
from parbench.bench.plan.params import Value
from parbench.bench.text import UserError
from parbench.slurm.sweep.condition import parse_condition
from parbench.slurm.sweep.expand import read_axes
from parbench.slurm.sweep.sweepfile import SweepFile, read_sweep_file


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
    assert (found.out, found.mode, found.repeat) == ("sweeps", "one", 1)
    assert (found.slurm.requeue, found.slurm.signal_seconds, found.slurm.on_dead_node) == (True, 120, "fail")
    text = "environment.ring.variables = { NCCL_ALGO = 'Ring', NCCL_NTHREADS = 256, FAST = true }\n"
    text += "[slurm]\ntime = '30m'\naccount = 'me'\ngres = 'gpu:8'\n"
    found = read(file, text + "options = { mem = 0, exclusive = true, spread-job = false }")
    assert found.environment["ring"].texts() == {"NCCL_ALGO": "Ring", "NCCL_NTHREADS": "256", "FAST": "true"}
    assert found.slurm.all_options() == {"account": "me", "gres": "gpu:8", "mem": "0", "exclusive": True}


def test_a_wrong_type_count_key_or_choice_is_refused_with_what_is_allowed_what_was_found_and_where(file: Path) -> None:
    for name in ("nodes", "ntasks_per_node", "repeat", "launches", "slurm.signal_seconds"):
        assert f"Expected `int` >= 1 - at `$.{name}`" in refusal(file, f"{name} = 0"), name
    for text, words in (
        ("name = 3", "Expected `str | null`, got `int` - at `$.name`"),
        ("nodes = true", "got `bool` - at `$.nodes`"),
        ("nodes = [1, 'x']", "Expected `int`, got `str` - at `$.nodes[1]`"),
        ("[environment.a]\nvariables = { X = [1] }", "got `array` - at `$.environment[...].variables[...]`"),
        ("[[case]]\nname = 3", "Expected `str`, got `int` - at `$.case[0].name`"),
        ("nodes = [1, 0]", "Expected `int` >= 1 - at `$.nodes[1]`"),
        ("nodes = []", "Expected `array` of length >= 1 - at `$.nodes`"),
        ("placement = []", "Expected `array` of length >= 1 - at `$.placement`"),
        (
            "node = 3",
            "unknown field `node`; allowed are name, out, mode, nodes, ntasks_per_node, placement, repeat, preset, "
            "launches, budget, timeout, backend, device, link, case, matrix, zip, exclude, environment, slurm, "
            "prologue, container or python; did you mean 'nodes'?",
        ),
        (
            "slurm.partitions = 'x'",
            "`partitions` - at `$.slurm`; allowed are partition, time, account, qos, constraint, exclude, nodelist, "
            "reservation, gres, options, requeue, signal_seconds or on_dead_node; did you mean 'partition'?",
        ),
        ("[environment.a]\nvars = {}", "`vars` - at `$.environment[...]`; allowed are variables"),
        ("[[case]]\nname = 'a'\nsets = {}", "`sets` - at `$.case[0]`; allowed are name or set; did you mean 'set'?"),
        ("mode = 'arrays'", "'arrays' - at `$.mode`; allowed are one, array or each; did you mean 'array'?"),
        ("placement = ['block', 'x']", "'x' - at `$.placement[1]`; allowed are block or cyclic"),
        ("slurm.on_dead_node = 'go on'", "allowed are fail or go-on; did you mean 'go-on'?"),
    ):
        assert words in refusal(file, text), text


def test_what_has_the_right_type_and_no_meaning_is_refused_with_the_place(file: Path) -> None:
    for text, words in (
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
    ):
        assert refusal(file, text).startswith(words), text


def test_what_is_no_toml_or_cannot_be_read_is_refused(tmp_path: Path, file: Path) -> None:
    assert refusal(file, "nodes = 1\nnodes = 2").startswith(" is no TOML: ")
    with pytest.raises(UserError, match=r"absent\.toml cannot be read: No such file or directory"):
        read_sweep_file(tmp_path / "absent.toml")
    file.write_bytes(b'name = "\xff"\n')
    with pytest.raises(UserError, match=r"is no TOML: 'utf-8' codec"):
        read_sweep_file(file)


def test_the_readmes_sweep_is_the_example_and_is_one() -> None:
    example = ROOT / "slurm" / "example.toml"
    shown = "\n".join(line for line in example.read_text().splitlines() if not line.startswith("#"))
    assert f"```toml\n{shown}\n```" in (ROOT / "slurm" / "README.md").read_text()
    assert read_sweep_file(example).nodes == [2, 4]


def sweep(**given: Any) -> SweepFile:
    return msgspec.convert({"case": [{"name": "all_reduce"}], **given}, SweepFile)


def texts(**given: Any) -> list[list[dict[str, str]]]:
    axes = read_axes(sweep(**given), DEFINITIONS)
    return [[{name: choice.text for name, choice in row.items()} for row in axis] for axis in axes if len(axis) > 1]


def test_what_varies_comes_in_its_order_and_environments_vary_fastest_unless_a_zip_chooses_them() -> None:
    axes = read_axes(sweep(nodes=2), DEFINITIONS)
    merged = {name: choice.value for axis in axes for row in axis for name, choice in row.items()}
    assert merged == {"nodes": 2, "ntasks_per_node": 1, "placement": "block", "environment": ""}
    assert [len(axis) for axis in axes] == [1, 1, 1, 1]
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
    [_, _, sizes, *_] = read_axes(sweep(nodes=2, matrix={"size_bytes": ["64K", 1024]}), DEFINITIONS)
    assert [(row["size_bytes"].text, row["size_bytes"].value) for row in sizes] == [("64K", 65536), ("1024", 1024)]


def test_what_cannot_vary_so_is_refused_with_the_place_and_what_is_allowed(file: Path) -> None:
    empty, both = "an empty table or list leaves no point; give it values", "is given too; leave out one of them"
    again = "is given 2 times; give it once, and repeat = 2 if that is meant"
    for text, words in (
        ("", "$.nodes is missing: write nodes = 2, or nodes = [1, 2, 4]"),
        ("nodes = [2, 4, 2]", f"nodes = 2 {again}"),
        ("matrix.nodes = [0]", "$.matrix.nodes: nodes = 0 is not allowed: it is a whole number of at least 1"),
        ("matrix.nodes = [true]", "$.matrix.nodes: nodes = True is not allowed"),
        ("zip = [{ nodes = [1, 2], root = [0] }]", "$.zip[0]: nodes has 2 values and root has 1: what varies together"),
        ("nodes = 2\nzip = [{}]", f"$.zip[0]: {empty}"),
        ("nodes = 2\nmatrix.dtype = []", "$.matrix.dtype: an empty list leaves no point; give it a value"),
        ("nodes = 2\nmatrix.dtype = ['int8']\nzip = [{ dtype = ['int32'] }]", "'dtype' varies in 2 places of matrix"),
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
        ("nodes = 2\nmatrix.dtpye = ['int8']", "$.matrix.dtpye: 'dtpye' is no parameter of the cases; there are nodes"),
        ("nodes = 2\nmatrix.dtype = ['float31']", "$.matrix.dtype: dtype = 'float31' is not allowed"),
        ("nodes = 2\nmatrix.size_bytes = ['1K:4K:x2']", "$.matrix.size_bytes: size_bytes = '1K:4K:x2' is 3 values: a"),
        ("nodes = 2\nmatrix.size_bytes = ['1K', 1024]", f"size_bytes = 1024 {again}"),
        ("nodes = 2\nmatrix.mode = ['async']", "$.matrix.mode: 'mode' is set in $.case[0] too; leave out one of them"),
    ):
        found = read(file, f"{text}\n[[case]]\nname = 'all_reduce'\nset.mode = 'blocking'")
        assert told(read_axes, found, DEFINITIONS).startswith(words), text
    matrix: dict[str, list[Any]] = {"dtype": ["int32"]}
    assert "'dtype' is a parameter of no case: add a [[case]]" in told(
        read_axes, sweep(nodes=2, case=[], matrix=matrix), DEFINITIONS
    )
    unknown = sweep(nodes=2, case=[{"name": "allreduce"}], matrix=matrix)
    assert told(read_axes, unknown, DEFINITIONS).startswith("$.matrix.dtype: no case is")
    assert told(read_axes, sweep(nodes=2, matrix={"dtpye": ["int8"]}), DEFINITIONS).endswith("did you mean 'dtype'?")


POINT: dict[str, Value] = {"nodes": 8, "dtype": "float16", "size_bytes": 64 << 20, "skew": 0.5, "together": True}
POINT["placement"] = "block"


def holds(text: str) -> bool:
    return parse_condition(text, POINT)(POINT)


def not_understood(text: str) -> str:
    words = told(holds, text)
    assert words.startswith(repr(text)), "every sentence begins with the condition"
    return words.removeprefix(f"{text!r} ")


def test_a_condition_that_holds() -> None:
    for text in (
        *("nodes == 8", "8 == nodes", "nodes != 4", "nodes < 9", "nodes <= 8", "nodes > 7.5", "nodes >= 8"),
        *("not nodes < 8", "not nodes > 8", "not nodes <= 7", "not nodes >= 9"),
        *("nodes > -1", "size_bytes == 64M", "size_bytes < 1G", "size_bytes >= 64MiB", "skew == 5e-1"),
        *("dtype == 'float16'", 'dtype == "float16"', "dtype in ['bfloat16', 'float16']", "nodes in [1, 8]"),
        *("nodes not in [1, 2]", "together == true", "together != false", "not nodes == 4", "not not nodes == 8"),
        *("nodes == 8 and dtype == 'float16'", "nodes == 1 or dtype == 'float16'", "dtype<'g'", "dtype != 'and'"),
        *("(nodes == 1 or nodes == 8) and placement == 'block'", "nodes == 8 or nodes == 8 and nodes == 1"),
        *("not nodes == 1 and nodes == 8", "not ((nodes == 8 or nodes == 8) and nodes == 1)"),
    ):
        assert holds(text), text
        assert not holds(f"not ({text})"), text


def test_what_cannot_be_understood_or_compared_is_refused_even_where_the_rest_decides() -> None:
    for text, words in (
        ("nodes == 'eight'", "compares 8, a number, with 'eight', a word"),
        ("together == 1", "compares True, true or false, with 1, a number"),
        ("together < false", "compares True with False by <: use == or !="),
        ("nodes in [8, 'x']", "compares 8, a number, with 'x', a word"),
        ("nodes == 8 or dtype == 16", "compares 'float16', a word, with 16, a number"),
        ("nodes == 1 and dtype == 16", "compares 'float16', a word, with 16, a number"),
    ):
        assert not_understood(text) == words, text
    for text, rest in (
        *(("nodes = 8", "= 8"), ("nodes == 8x", "8x"), ("dtype == 'float16", "'float16"), ("nodes == 8 # 9", "# 9")),
        *(("nodes.real == 8", ".real == 8"), ("(lambda: 8)() == 8", ": 8)() == 8"), ("nodes == 8.x", "8.x")),
    ):
        hint = "; did you mean '=='?" if text == "nodes = 8" else ""
        place = text.index(rest) + 1
        assert not_understood(text) == f"is not understood from character {place} on: {rest!r}{hint}"
    for text in ("", "nodes not 8", "nodes == and", "nodes == ", "nodes in [1 2]", "(nodes == 8", "nodes == 8)"):
        words = not_understood(text)
        assert words.startswith("is not understood: "), "the rest is Python's"
        assert words.endswith("; write it as in nodes == 8 and dtype in ['int8', 'int32']")
    comparison, brackets = "one comparison by ==, !=, <, <=, >, >=, in or not in", "a list in brackets, such as [1, 2]"
    operand = "a name, a number, a size such as 64K, a word in quotes, true or false"
    for expected, known in (
        (comparison, {text: text for text in ("nodes", "1 < nodes < 9", "nodes is 8", "print(1)")}),
        (brackets, {"nodes in 8": "8", "nodes in (8, 9)": "(8, 9)", "nodes in []": "[]"}),
        (operand, {"nodes == True": "True", "nodes == int(8)": "int(8)", "nodes == [8][0]": "[8][0]"}),
        (operand, {"dtype in ['a' 'b']": "'a'('b')", "dtype == f'a'": "f('a')", "-nodes == 8": "-nodes"}),
    ):
        for text, found in known.items():
            assert not_understood(text) == f"has {found!r} where {expected} is expected"
    assert not_understood("(" * 400 + "nodes == 8" + ")" * 400).startswith("is not understood: too many nested")
    for hostile in ("not " * 200 + "nodes == 8", f"nodes == {'-' * 900}8", f"nodes == {'[' * 400}", "\0", "9" * 900):
        with contextlib.suppress(UserError):
            holds(hostile)
    long = told(holds, "not " * 1000 + "nodes == 8")
    assert long.endswith("... has 4010 characters: a condition has at most 1000")


def test_unknown_names_in_a_condition_are_refused_with_the_nearest() -> None:
    assert not_understood("nodes == 8 or dtpye == 'x'") == (
        "speaks of 'dtpye', and a point has nodes, dtype, size_bytes, skew, together or placement; "
        "did you mean 'dtype'?"
    )
    assert not_understood("dtype in [bfloat16]").endswith("; write a word as 'bfloat16', in quotes")
