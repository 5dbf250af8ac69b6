"""From a sweep file to points: every combination once, exclusions, refusals, ids and plans."""

import itertools
from typing import Any

import msgspec
import pytest

from parbench.bench.plan.catalogue import DEFINITIONS
from parbench.bench.plan.plan import Entry, Plan
from parbench.slurm.sweep.expand import expand, plan_point
from parbench.slurm.sweep.folder import Point
from parbench.slurm.sweep.sweepfile import SweepFile
from tests.support.paths import ROOT
from tests.support.refusals import usage_error
from tests.support.slurm.sweeps import make_point

ALL_REDUCE = {"name": "all_reduce", "set": {"size_bytes": "64K"}}


def expand_file(**fields: Any) -> tuple[tuple[Point, ...], list[str]]:
    """Return the points and the notes of a file whose default is one point of two nodes."""
    defaults = {"nodes": 2, "budget": "6s", "case": [ALL_REDUCE]}
    return expand(msgspec.convert({**defaults, **fields}, SweepFile), DEFINITIONS)


def expand_points(**fields: Any) -> tuple[Point, ...]:
    return expand_file(**fields)[0]


def expand_labels(**fields: Any) -> list[str]:
    return [point.label for point in expand_points(**fields)]


def test_expand_smallest_file_to_one_point() -> None:
    [point] = expand_points()
    assert point.label == "2 nodes x 1"
    assert point.nodes == 2
    assert point.ntasks_per_node == 1
    assert point.distribution == "block"
    assert point.repeat == 1
    assert point.variables == {}
    assert point.seconds == 16.0, "the budget and ten seconds to start"
    assert point.cases == (Entry(name="all_reduce", set={"size_bytes": "64K"}),)


def test_expand_contains_every_combination_once() -> None:
    nodes = [2, 9, 4]
    dtypes = ["float32", "bfloat16"]
    points = expand_points(nodes=nodes, matrix={"dtype": dtypes}, repeat=2)
    combinations = []
    for point in points:
        combinations.append((point.nodes, point.cases[0].set["dtype"], point.repeat))
    assert sorted(combinations) == sorted(itertools.product(nodes, dtypes, [1, 2]))
    assert len({point.id for point in points}) == len(points)


def test_values_of_variables_are_an_axis() -> None:
    environment = {"NCCL_DEBUG": "WARN", "NCCL_ALGO": ["Ring", "Tree", ""], "FAST": True}
    points = expand_points(environment=environment)
    assert [point.variables["NCCL_ALGO"] for point in points] == ["Ring", "Tree", ""]
    assert {point.variables["FAST"] for point in points} == {"true"}
    assert points[0].label == "2 nodes x 1, NCCL_ALGO=Ring"
    assert points[0].environment == "NCCL_ALGO=Ring"
    assert points[0].cases == points[1].cases


def test_parameter_goes_to_the_cases_that_have_it() -> None:
    cases = [{"name": "all_reduce"}, {"name": "broadcast", "set": {"dtype": "int8"}}]
    point = expand_points(case=cases, matrix={"root": [0, 1]})[0]
    assert [case.set for case in point.cases] == [{}, {"dtype": "int8", "root": "0"}]


def test_exclude_removes_points_that_match_every_key() -> None:
    labels = expand_labels(
        nodes=[2, 4],
        matrix={"dtype": ["float32", "float16"]},
        repeat=2,
        exclude=[{"nodes": 4, "dtype": ["float16"]}, {"repeat": 2, "nodes": [2]}],
    )
    assert labels == [
        "4 nodes x 1, dtype=float32, repeat 1",
        "4 nodes x 1, dtype=float32, repeat 2",
        "2 nodes x 1, dtype=float32, repeat 1",
        "2 nodes x 1, dtype=float16, repeat 1",
    ]


def test_exclude_compares_values() -> None:
    labels = expand_labels(
        case=[{"name": "all_reduce"}],
        matrix={"size_bytes": ["1K", "1M", 1 << 20]},
        exclude=[{"size_bytes": 1024}],
    )
    assert labels == ["2 nodes x 1, size_bytes=1M"]


FP8 = {"name": "all_reduce", "set": {"dtype": "float8_e5m2"}}


@pytest.mark.parametrize(
    ("fields", "place", "message"),
    [
        ({"matrix": {"nodes": [4]}}, "$.matrix.nodes", "$.nodes sets 'nodes' too"),
        ({"matrix": {"dtpye": ["int8"]}}, "$.matrix.dtpye", "dtype"),
        ({"matrix": {"dtype": ["float31"]}}, "$.matrix.dtype", "float31"),
        ({"matrix": {"size_bytes": ["1K"]}}, "$.matrix.size_bytes", "$.case"),
        ({"exclude": [{"reepat": 2}]}, "$.exclude[0]", "repeat"),
        ({"nodes": [1, 2]}, "'1 node x 1'", "ntasks_per_node"),
        ({"nodes": list(range(2, 102)), "repeat": 101}, "101 * 100", "more than 10000"),
        ({"case": [FP8], "device": "cpu"}, "'2 nodes x 1'", "float8_e5m2"),
        ({"backend": "nccl", "device": "cpu"}, "'2 nodes x 1'", "device = 'cuda'"),
    ],
)
def test_expand_refuses_a_bad_file(fields: dict[str, Any], place: str, message: str) -> None:
    error = usage_error(expand_file, **fields)
    assert place in error
    assert message in error


def test_expand_notes_skipped_cases_once() -> None:
    cases = [
        {"name": "all_reduce", "set": {"size_bytes": "1002", "dtype": "float16"}},
        {"name": "all_gather", "set": {"size_bytes": "1002,1000", "dtype": "float16"}},
    ]
    _, [note] = expand_file(nodes=4, case=cases, repeat=2)
    assert "on 4 x 1 ranks 1 of 3 cases" in note
    assert "collective.all_gather size_bytes=1002" in note


def plan_case(dtype: str = "float32", **fields: Any) -> Plan:
    point = make_point(cases=(Entry(name="all_reduce", set={"dtype": dtype}),))
    return plan_point(msgspec.convert({"nodes": 2, **fields}, SweepFile), DEFINITIONS, point)


def test_plan_point_chooses_a_backend() -> None:
    assert plan_case().backend == "gloo"
    assert plan_case(dtype="float8_e5m2", backend="nccl").device == "cuda"
    assert plan_case(device="cuda").backend == "nccl"
    assert plan_case(device="cuda", backend="gloo").backend == "gloo"


def test_point_id_depends_on_what_is_measured() -> None:
    point = make_point(variables={"A": "1", "B": "2"}).with_id()
    renamed = make_point(label="renamed", seconds=99.0, variables={"B": "2", "A": "1"})
    assert renamed.with_id().id == point.id
    for changed in (make_point(nodes=4), make_point(variables={"A": "1"})):
        assert changed.with_id().id != point.id


def test_sweep_of_the_tutorial_has_ten_points() -> None:
    text = (ROOT / "docs" / "guides" / "slurm.md").read_text()
    block = text.partition("```toml\n")[2].partition("```")[0]
    points, _ = expand(msgspec.toml.decode(block, type=SweepFile), DEFINITIONS)
    assert len(points) == 10
