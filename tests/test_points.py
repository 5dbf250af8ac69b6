"""Points: their identity is what is measured and where, nothing else."""

from typing import Any

import msgspec
import pytest

from slurm.points import Point, PointCase, Sweep, make_point, point_label

GIVEN: dict[str, Any] = {
    "nodes": 4,
    "ntasks_per_node": 2,
    "placement": "block",
    "repeat": 1,
    "environment": "ring",
    "variables": {"NCCL_ALGO": "Ring", "A": "1"},
    "cases": (PointCase(name="all_reduce", set={"dtype": "float32", "mode": "blocking"}),),
    "seconds": 16.0,
}


def point(**changes: Any) -> Point:
    return make_point(**{**GIVEN, **changes})


def sweep(*points: Point) -> Sweep:
    return Sweep(
        name="s", file="/s.toml", created="now", mode="one", points=points, python="python", working_directory="/"
    )


def test_an_id_is_twelve_hexadecimal_digits_and_always_the_same() -> None:
    assert len(point().id) == 12
    assert set(point().id) <= set("0123456789abcdef")
    assert point() == point()


def test_the_order_of_names_does_not_change_an_id() -> None:
    turned = (PointCase(name="all_reduce", set={"mode": "blocking", "dtype": "float32"}),)
    assert point(cases=turned, variables={"A": "1", "NCCL_ALGO": "Ring"}).id == point().id


@pytest.mark.parametrize("change", [{"words": ("other",)}, {"seconds": 99.0}])
def test_neither_the_label_nor_the_expectation_changes_an_id(change: dict[str, object]) -> None:
    assert point(**change).id == point().id


@pytest.mark.parametrize(
    "change",
    [
        {"nodes": 2},
        {"ntasks_per_node": 4},
        {"placement": "cyclic"},
        {"repeat": 2},
        {"environment": "tree"},
        {"variables": {}},
        {"cases": ()},
        {"cases": (PointCase(name="all_reduce", set={"dtype": "float16", "mode": "blocking"}),)},
    ],
)
def test_everything_that_is_measured_changes_an_id(change: dict[str, object]) -> None:
    assert point(**change).id != point().id


def test_a_label_tells_the_shape_and_what_else_is_given() -> None:
    assert point(words=("cyclic", "repeat 2")).label == "4 nodes x 2, cyclic, repeat 2"
    assert point(nodes=1).label == point_label(1, 2) == "1 node x 2"


def test_a_point_has_the_ranks_of_all_nodes_and_its_cases_are_entries() -> None:
    assert point().ranks == 8
    entry = point().cases[0].entry()
    assert (entry.name, entry.set) == ("all_reduce", {"dtype": "float32", "mode": "blocking"})


def test_a_sweep_survives_being_written_and_read() -> None:
    whole = sweep(point(), point(repeat=2))
    assert msgspec.json.decode(msgspec.json.encode(whole), type=Sweep) == whole
