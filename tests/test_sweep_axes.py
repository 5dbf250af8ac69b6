"""What varies in a sweep: where it may be said, what its values are, and that it is said once."""

from typing import Any

import msgspec
import pytest

from bench.definitions import DEFINITIONS
from bench.errors import UserError
from slurm.sweep_axes import read_axes
from slurm.sweepfile import SweepFile


def file(**given: Any) -> SweepFile:
    return msgspec.convert({"case": [{"name": "all_reduce"}], **given}, SweepFile)


def texts(**given: Any) -> list[list[dict[str, str]]]:
    """Return the axes that vary, as texts."""
    axes = read_axes(file(**given), DEFINITIONS)
    return [[{name: choice.text for name, choice in row.items()} for row in axis] for axis in axes if len(axis) > 1]


def refusal(**given: Any) -> str:
    with pytest.raises(UserError) as caught:
        read_axes(file(**given), DEFINITIONS)
    return str(caught.value)


def test_nodes_alone_are_enough_and_the_rest_has_one_value_each() -> None:
    axes = read_axes(file(nodes=2), DEFINITIONS)
    merged = {name: choice.value for axis in axes for row in axis for name, choice in row.items()}
    assert merged == {"nodes": 2, "ntasks_per_node": 1, "placement": "block", "environment": ""}
    assert [len(axis) for axis in axes] == [1, 1, 1, 1]


def test_what_varies_comes_in_its_order_and_environments_vary_fastest() -> None:
    assert texts(
        nodes=[1, 2],
        placement=["block", "cyclic"],
        matrix={"dtype": ["float32", "float16"]},
        environment={"a": {}, "b": {}},
    ) == [
        [{"nodes": "1"}, {"nodes": "2"}],
        [{"dtype": "float32"}, {"dtype": "float16"}],
        [{"placement": "block"}, {"placement": "cyclic"}],
        [{"environment": "a"}, {"environment": "b"}],
    ]


def test_rows_of_a_zip_set_several_names_together() -> None:
    assert texts(zip=[{"nodes": [1, 2], "ntasks_per_node": [4, 2]}]) == [
        [{"nodes": "1", "ntasks_per_node": "4"}, {"nodes": "2", "ntasks_per_node": "2"}]
    ]


def test_a_value_is_read_as_the_case_reads_it_and_kept_as_it_was_written() -> None:
    [_, _, sizes, *_] = read_axes(file(nodes=2, matrix={"size_bytes": ["64K", 1024]}), DEFINITIONS)
    assert [(row["size_bytes"].text, row["size_bytes"].value) for row in sizes] == [("64K", 65536), ("1024", 1024)]


def test_an_environment_can_be_chosen_in_a_zip_and_is_then_no_axis_of_its_own() -> None:
    environments: dict[str, object] = {"a": {}, "b": {}, "c": {}}
    axes = texts(environment=environments, zip=[{"nodes": [1, 2], "environment": ["a", "c"]}])
    assert axes == [[{"nodes": "1", "environment": "a"}, {"nodes": "2", "environment": "c"}]]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "$.nodes is missing: write nodes = 2, or nodes = [1, 2, 4]"),
        ({"nodes": [2, 4, 2]}, "nodes = 2 is given 2 times; give it once, and repeat = 2 if that is meant"),
        ({"nodes": 2, "matrix": {"dtype": []}}, "$.matrix.dtype: an empty list leaves no point; give it a value"),
        ({"nodes": 2, "zip": [{}]}, "$.zip[0]: an empty table or list leaves no point; give it values"),
        ({"nodes": 2, "zip": [{"root": []}]}, "$.zip[0]: an empty table or list leaves no point; give it values"),
        (
            {"zip": [{"nodes": [1, 2, 4], "ntasks_per_node": [4, 2]}]},
            "$.zip[0]: nodes has 3 values and ntasks_per_node has 2: what varies together has as many",
        ),
        (
            {"nodes": 2, "matrix": {"dtype": ["float32"]}, "zip": [{"dtype": ["float16"]}]},
            "'dtype' varies in 2 places of matrix and zip; it can vary in one",
        ),
        (
            {"nodes": 2, "matrix": {"nodes": [1, 2]}},
            "'nodes' varies in matrix or zip, and $.nodes is given too; leave out one of them",
        ),
        (
            {"nodes": 2, "placement": "block", "matrix": {"placement": ["cyclic"]}},
            "'placement' varies in matrix or zip, and $.placement is given too; leave out one of them",
        ),
        ({"matrix": {"nodes": [0]}}, "$.matrix.nodes: nodes = 0 is not allowed: it is a whole number of at least 1"),
        ({"matrix": {"nodes": [-2]}}, "$.matrix.nodes: nodes = -2 is not allowed"),
        ({"matrix": {"nodes": ["2"]}}, "$.matrix.nodes: nodes = '2' is not allowed"),
        ({"matrix": {"nodes": [True]}}, "$.matrix.nodes: nodes = True is not allowed"),
        (
            {"nodes": 2, "matrix": {"placement": ["blok"]}},
            "$.matrix.placement: placement = 'blok' is not allowed: it is block or cyclic; did you mean 'block'?",
        ),
        (
            {"nodes": 2, "environment": {"ring": {}}, "matrix": {"environment": ["rings"]}},
            "$.matrix.environment: environment = 'rings' is not allowed: it is ring; did you mean 'ring'?",
        ),
        (
            {"nodes": 2, "matrix": {"environment": ["ring"]}},
            "$.matrix.environment: environment = 'ring' is not allowed: it is one of the tables [environment.NAME]",
        ),
        ({"nodes": 2, "matrix": {"dtpye": ["float32"]}}, "$.matrix.dtpye: 'dtpye' is no parameter of the cases; there"),
        ({"nodes": 2, "matrix": {"root": [0]}}, "$.matrix.root: 'root' is no parameter of the cases; there are nodes"),
        ({"nodes": 2, "matrix": {"dtype": ["float31"]}}, "$.matrix.dtype: dtype = 'float31' is not allowed"),
        (
            {"nodes": 2, "matrix": {"size_bytes": ["1K:4K:x2"]}},
            "$.matrix.size_bytes: size_bytes = '1K:4K:x2' is 3 values: a point has one; write each as its own",
        ),
        (
            {"nodes": 2, "matrix": {"size_bytes": ["1K", 1024]}},
            "size_bytes = 1024 is given 2 times; give it once, and repeat = 2 if that is meant",
        ),
        (
            {"nodes": 2, "case": [{"name": "all_reduce", "set": {"dtype": "int8"}}], "matrix": {"dtype": ["int32"]}},
            "$.matrix.dtype: 'dtype' is set in $.case[0] too; leave out one of them",
        ),
        (
            {"nodes": 2, "case": [], "matrix": {"dtype": ["int32"]}},
            "$.matrix.dtype: 'dtype' is a parameter of no case: add a [[case]] that has it, or vary nodes, ",
        ),
        ({"nodes": 2, "case": [{"name": "allreduce"}], "matrix": {"dtype": ["int8"]}}, "$.matrix.dtype: no case is"),
    ],
)
def test_what_cannot_vary_so_is_refused_with_the_place_and_what_is_allowed(given: dict[str, Any], words: str) -> None:
    assert refusal(**given).startswith(words)


def test_the_nearest_name_is_offered() -> None:
    assert refusal(nodes=2, matrix={"dtpye": ["float32"]}).endswith("did you mean 'dtype'?")
