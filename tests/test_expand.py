"""From a sweep file to points: the whole product, without what is excluded, largest first, each known by its id."""

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.definitions import DEFINITIONS
from bench.errors import UserError
from slurm.expand import Expansion, expand
from slurm.sweepfile import SweepFile


def expanded(**given_values: Any) -> Expansion:
    """Expand a sweep of one small case unless told otherwise."""
    values = {"nodes": 2, "budget": "6s", "case": [{"name": "all_reduce", "set": {"size_bytes": "64K"}}]}
    return expand(msgspec.convert({**values, **given_values}, SweepFile), DEFINITIONS)


def labels(**given_values: Any) -> list[str]:
    return [point.label for point in expanded(**given_values).points]


def refusal(**given_values: Any) -> str:
    with pytest.raises(UserError) as caught:
        expanded(**given_values)
    return str(caught.value)


def test_the_least_sweep_is_one_point() -> None:
    [point] = expanded().points
    assert (point.nodes, point.ntasks_per_node, point.placement, point.repeat) == (2, 1, "block", 1)
    assert (point.environment, point.variables, point.seconds, point.label) == ("", {}, 16.0, "2 nodes x 1")
    assert [(case.name, case.set) for case in point.cases] == [("all_reduce", {"size_bytes": "64K"})]


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.integers(2, 9), min_size=1, max_size=3, unique=True),
    st.lists(st.integers(1, 3), min_size=1, max_size=2, unique=True),
    st.lists(st.sampled_from(["float32", "float64", "int32"]), min_size=1, unique=True),
    st.integers(1, 3),
)
def test_every_combination_is_there_once_and_no_two_points_are_one(
    nodes: list[int], tasks: list[int], dtypes: list[str], repeat: int
) -> None:
    points = expanded(nodes=nodes, ntasks_per_node=tasks, matrix={"dtype": dtypes}, repeat=repeat).points
    found = [(p.nodes, p.ntasks_per_node, p.cases[0].set["dtype"], p.repeat) for p in points]
    assert sorted(found) == sorted(itertools.product(nodes, tasks, dtypes, range(1, repeat + 1)))
    assert len({point.id for point in points}) == len(points)
    assert [point.nodes for point in points] == sorted((point.nodes for point in points), reverse=True)


def test_points_come_large_to_small_then_in_rounds_then_as_written_environments_in_turns() -> None:
    environments = {"ring": {"variables": {"NCCL_ALGO": "Ring"}}, "tree": {"variables": {"NCCL_ALGO": "Tree"}}}
    assert labels(nodes=[2, 4], repeat=2, environment=environments) == [
        "4 nodes x 1, environment ring, repeat 1",
        "4 nodes x 1, environment tree, repeat 1",
        "4 nodes x 1, environment ring, repeat 2",
        "4 nodes x 1, environment tree, repeat 2",
        "2 nodes x 1, environment ring, repeat 1",
        "2 nodes x 1, environment tree, repeat 1",
        "2 nodes x 1, environment ring, repeat 2",
        "2 nodes x 1, environment tree, repeat 2",
    ]


def test_a_point_carries_the_variables_of_its_environment() -> None:
    points = expanded(environment={"a": {"variables": {"X": 1, "Y": True}}, "b": {}}).points
    assert [(point.environment, point.variables) for point in points] == [("a", {"X": "1", "Y": "true"}), ("b", {})]


def test_a_label_tells_the_placement_where_it_varies_or_is_not_the_usual_one() -> None:
    assert labels(placement=["block", "cyclic"]) == ["2 nodes x 1, block", "2 nodes x 1, cyclic"]
    assert labels(placement="cyclic") == ["2 nodes x 1, cyclic"]
    assert labels(nodes=1, ntasks_per_node=2) == ["1 node x 2"]


def test_a_varying_parameter_goes_to_the_cases_that_have_it_and_is_written_as_it_was() -> None:
    cases = [{"name": "all_reduce"}, {"name": "broadcast", "set": {"dtype": "int8"}}]
    [point, _] = expanded(case=cases, matrix={"root": [0, 1]}).points
    assert [case.set for case in point.cases] == [{}, {"dtype": "int8", "root": "0"}]
    [point] = expanded(case=[{"name": "all_reduce"}], matrix={"size_bytes": ["64K"]}).points
    assert point.cases[0].set == {"size_bytes": "64K"}


def test_a_list_in_a_case_is_measured_within_one_point() -> None:
    [point] = expanded(case=[{"name": "all_reduce", "set": {"dtype": ["float32", "int8"]}}]).points
    assert point.cases[0].set == {"dtype": "float32,int8"}


def test_a_sweep_of_a_preset_needs_no_case() -> None:
    [point] = expanded(case=[], preset="smoke").points
    assert point.cases == ()


def test_what_a_condition_names_is_left_out() -> None:
    found = labels(
        nodes=[2, 4],
        matrix={"dtype": ["float32", "float16"]},
        repeat=2,
        exclude=["nodes == 4 and dtype in ['float16']", "repeat == 2 and ranks < 4"],
    )
    assert found == [
        "4 nodes x 1, dtype=float32, repeat 1",
        "4 nodes x 1, dtype=float32, repeat 2",
        "2 nodes x 1, dtype=float32, repeat 1",
        "2 nodes x 1, dtype=float16, repeat 1",
    ]


def test_a_condition_compares_a_size_with_a_size_however_each_is_written() -> None:
    case = [{"name": "all_reduce"}]
    assert labels(case=case, matrix={"size_bytes": ["64K", 1048576]}, exclude=["size_bytes >= 1M"]) == [
        "2 nodes x 1, size_bytes=64K"
    ]


def test_an_excluded_point_need_not_be_able_to_run() -> None:
    assert labels(nodes=[1, 2], exclude=["ranks == 1"]) == ["2 nodes x 1"]


@pytest.mark.parametrize(
    ("given_values", "words"),
    [
        ({"exclude": ["nodes > 0"]}, "$.exclude takes out all of the 1 points"),
        ({"exclude": ["nodes == 4", "nods == 2"]}, "$.exclude[1]: 'nods == 2' speaks of 'nods', and a point has nodes"),
        ({"exclude": ["dtype == 'x'"]}, "$.exclude[0]: \"dtype == 'x'\" speaks of 'dtype', and a point has nodes"),
        ({"exclude": ["nodes = 2"]}, "$.exclude[0]: 'nodes = 2' is not understood from character 7 on"),
        ({"exclude": ["nodes == 'x'"]}, "$.exclude[0]: \"nodes == 'x'\" compares 2, a number, with 'x', a word"),
        ({"nodes": [1, 2]}, "the point '1 node x 1' cannot run: nodes(1) * ntasks_per_node(1) = 1 rank"),
        (
            {"case": [{"name": "broadcast"}], "matrix": {"root": [0, 2]}},
            "the point '2 nodes x 1, root=2' cannot run: root = 2: root 2 is not one of the 2 ranks",
        ),
        (
            {"nodes": list(range(2, 102)), "repeat": 101},
            "100 * 101 = 10100 points are more than 10000: make several sweeps of them",
        ),
        ({"case": [], "preset": "nod"}, "the point '2 nodes x 1' cannot run: no preset is named 'nod'"),
    ],
)
def test_what_makes_no_sweep_is_refused_in_words(given_values: dict[str, Any], words: str) -> None:
    assert refusal(**given_values).startswith(words)


def test_a_condition_without_effect_and_cases_that_are_skipped_are_noted() -> None:
    cases = [
        {"name": "all_reduce", "set": {"size_bytes": "1002", "dtype": "float16"}},
        {"name": "all_gather", "set": {"size_bytes": "1002,1000", "dtype": "float16"}},
    ]
    assert expanded(nodes=4, case=cases, repeat=2, exclude=["nodes == 8"]).notes == (
        "exclude 'nodes == 8' takes out no point",
        "on 4 x 1 ranks 1 of 3 cases are skipped: collective.all_gather size_bytes=1002 dtype=float16 mode=blocking: "
        "size 1002 B is not a multiple of 4 ranks x 2 B (float16); nearest are 1000 and 1008",
    )
