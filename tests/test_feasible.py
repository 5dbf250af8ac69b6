"""What cannot run on so many ranks is known before anything is submitted."""

from typing import Any

import msgspec
import pytest

from bench.definitions import DEFINITIONS
from bench.errors import UserError
from bench.plan import Plan
from bench.presets import PRESETS, Entry
from slurm.feasible import plan_point, possible
from slurm.sweepfile import SweepFile

ALL_REDUCE = Entry(name="all_reduce", set={"size_bytes": "64K"})


def planned(*entries: Entry, nodes: int = 2, ntasks_per_node: int = 1, **given: Any) -> Plan:
    file = msgspec.convert(given, SweepFile)
    return plan_point(file, DEFINITIONS, nodes=nodes, ntasks_per_node=ntasks_per_node, entries=entries)


def refusal(*entries: Entry, nodes: int = 2, ntasks_per_node: int = 1, **given: Any) -> str:
    with pytest.raises(UserError) as caught:
        planned(*entries, nodes=nodes, ntasks_per_node=ntasks_per_node, **given)
    return str(caught.value)


def test_a_point_is_planned_for_the_ranks_of_all_its_nodes() -> None:
    plan = planned(ALL_REDUCE, nodes=4, ntasks_per_node=2)
    assert (plan.nproc, plan.backend, plan.device, len(plan.cases)) == (8, "gloo", "cpu", 1)


def test_budget_timeout_and_launches_are_the_files_and_else_the_presets() -> None:
    plan = planned(ALL_REDUCE, preset="smoke", budget="2m", timeout=7, launches=3)
    assert (plan.preset, plan.budget_seconds, plan.timeout_seconds, plan.launches) == ("smoke", 120, 7, 3)
    plan = planned()
    assert (plan.preset, plan.budget_seconds) == ("node", PRESETS["node"].budget_seconds)
    assert len(plan.cases) > 10


def test_one_rank_is_refused_with_the_equation_and_the_way_out() -> None:
    assert refusal(ALL_REDUCE, nodes=1) == (
        "nodes(1) * ntasks_per_node(1) = 1 rank, which moves nothing; give ntasks_per_node, or leave it out with "
        'exclude = ["ranks == 1"]'
    )
    assert planned(ALL_REDUCE, nodes=1, ntasks_per_node=2).nproc == 2


def test_a_root_that_only_larger_points_have_is_refused_on_small_ones() -> None:
    root = Entry(name="broadcast", set={"root": "3"})
    assert planned(root, nodes=4).nproc == 4
    assert refusal(root, nodes=2) == "root = 3: root 3 is not one of the 2 ranks"


def test_a_group_of_nodes_knows_how_many_nodes_there_are() -> None:
    across = Entry(name="all_reduce", set={"group": "across"})
    assert planned(across, nodes=2, ntasks_per_node=2).cases
    assert "across" in refusal(across, nodes=1, ntasks_per_node=4)


def test_an_unknown_preset_or_case_is_refused() -> None:
    assert refusal(preset="nod").startswith("no preset is named 'nod'")
    assert refusal(Entry(name="allreduce")).startswith("no case is named 'allreduce'")


def test_where_the_nodes_decide_it_is_enough_that_one_backend_can() -> None:
    float8 = Entry(name="all_reduce", set={"dtype": "float8_e5m2"})
    assert planned(float8).backend == "nccl"
    assert refusal(float8, backend="gloo") == "dtype = float8_e5m2: gloo carries no float8_e5m2"
    assert refusal(float8, device="cpu") == "dtype = float8_e5m2: gloo carries no float8_e5m2"


def test_a_case_that_no_backend_runs_is_refused_for_the_likeliest() -> None:
    assert refusal(Entry(name="all_reduce", set={"size_bytes": "1001"})).startswith("size_bytes = 1001: size 1001 B")


@pytest.mark.parametrize(
    ("backend", "device", "expected"),
    [
        (None, None, [("gloo", "cpu"), ("nccl", "cuda")]),
        ("gloo", None, [("gloo", "cpu"), ("gloo", "cuda")]),
        ("nccl", None, [("nccl", "cuda")]),
        (None, "cpu", [("gloo", "cpu")]),
        (None, "cuda", [("nccl", "cuda")]),
        ("gloo", "cuda", [("gloo", "cuda")]),
    ],
)
def test_a_device_has_the_backend_that_suits_it_unless_one_is_named(
    backend: str | None, device: str | None, expected: list[tuple[str, str]]
) -> None:
    assert possible(backend, device) == expected
