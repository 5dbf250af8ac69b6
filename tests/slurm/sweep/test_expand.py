"""From a sweep file to points: the whole product, what cannot run refused, each known by its id, and what it costs."""

import itertools
from typing import Any

import msgspec

from parbench.bench.plan.catalogue import DEFINITIONS
from parbench.bench.plan.plan import Entry, Plan
from parbench.slurm.sweep.expand import expand, plan_point
from parbench.slurm.sweep.folder import Point
from parbench.slurm.sweep.submit import about, batches, estimate
from parbench.slurm.sweep.sweepfile import SweepFile
from tests.support.refusals import usage_error
from tests.support.sweeps import make_point as any_point
from tests.support.sweeps import make_sweep

CASES = (Entry(name="all_reduce", set={"dtype": "float32", "mode": "blocking"}),)


def point(**changes: Any) -> Point:
    where = {"nodes": 4, "ntasks_per_node": 2, "environment": "ring"}
    what = {"variables": {"NCCL_ALGO": "Ring", "A": "1"}, "cases": CASES}
    return any_point(**{**where, **what, **changes}).identified()


def both(**given_values: Any) -> tuple[tuple[Point, ...], list[str]]:
    values = {
        "nodes": 2,
        "budget": "6s",
        "case": [{"name": "all_reduce", "set": {"size_bytes": "64K"}}],
    }
    return expand(msgspec.convert({**values, **given_values}, SweepFile), DEFINITIONS)


def expanded(**given_values: Any) -> tuple[Point, ...]:
    return both(**given_values)[0]


def labels(**given_values: Any) -> list[str]:
    return [one.label for one in expanded(**given_values)]


def test_the_least_sweep_is_one_point_and_of_more_every_combination_is_there_once() -> None:
    [one] = expanded()
    assert (one.nodes, one.ntasks_per_node, one.placement, one.repeat) == (2, 1, "block", 1)
    assert (one.environment, one.variables, one.seconds, one.label) == ("", {}, 16.0, "2 nodes x 1")
    assert [(case.name, case.set) for case in one.cases] == [("all_reduce", {"size_bytes": "64K"})]
    [one] = expanded(case=[], preset="smoke")
    assert one.cases == (), "a preset needs no case"
    nodes, tasks, dtypes = [2, 9, 4], [1, 3], ["float32", "float64", "int32"]
    points = expanded(nodes=nodes, ntasks_per_node=tasks, matrix={"dtype": dtypes}, repeat=3)
    found = [(p.nodes, p.ntasks_per_node, p.cases[0].set["dtype"], p.repeat) for p in points]
    assert sorted(found) == sorted(itertools.product(nodes, tasks, dtypes, (1, 2, 3)))
    assert len({one.id for one in points}) == len(points)
    assert [one.nodes for one in points] == sorted((one.nodes for one in points), reverse=True)


def test_points_come_large_to_small_then_in_rounds_then_environments_in_turns_with_their_variables() -> (
    None
):
    environments = {"ring": {"variables": {"X": 1, "Y": True}}, "tree": {}}
    assert labels(nodes=[2, 4], repeat=2, environment=environments) == [
        f"{nodes} nodes x 1, environment {environment}, repeat {repeat}"
        for nodes in (4, 2)
        for repeat in (1, 2)
        for environment in ("ring", "tree")
    ]
    points = expanded(environment=environments)
    assert [(one.environment, one.variables) for one in points] == [
        ("ring", {"X": "1", "Y": "true"}),
        ("tree", {}),
    ]
    assert labels(placement=["block", "cyclic"]) == ["2 nodes x 1, block", "2 nodes x 1, cyclic"]
    assert labels(placement="cyclic") == ["2 nodes x 1, cyclic"]
    assert labels(nodes=1, ntasks_per_node=2) == ["1 node x 2"]


def test_a_varying_parameter_goes_to_the_cases_that_have_it_and_is_written_as_it_was() -> None:
    cases = [{"name": "all_reduce"}, {"name": "broadcast", "set": {"dtype": "int8"}}]
    [one, _] = expanded(case=cases, matrix={"root": [0, 1]})
    assert [case.set for case in one.cases] == [{}, {"dtype": "int8", "root": "0"}]
    [one] = expanded(case=[{"name": "all_reduce"}], matrix={"size_bytes": ["64K"]})
    assert one.cases[0].set == {"size_bytes": "64K"}
    [one] = expanded(case=[{"name": "all_reduce", "set": {"dtype": ["float32", "int8"]}}])
    assert one.cases[0].set == {"dtype": "float32,int8"}, (
        "a list in a case is measured within one point"
    )


def test_exclude_removes_points_that_match_every_key() -> None:
    dtypes = {"dtype": ["float32", "float16"]}
    entries = [{"nodes": 4, "dtype": ["float16"]}, {"repeat": 2, "nodes": [2]}]
    assert labels(nodes=[2, 4], matrix=dtypes, repeat=2, exclude=entries) == [
        "4 nodes x 1, dtype=float32, repeat 1",
        "4 nodes x 1, dtype=float32, repeat 2",
        "2 nodes x 1, dtype=float32, repeat 1",
        "2 nodes x 1, dtype=float16, repeat 1",
    ]
    sizes = {"size_bytes": ["64K", 1048576]}
    assert labels(
        case=[{"name": "all_reduce"}], matrix=sizes, exclude=[{"size_bytes": 1048576}]
    ) == ["2 nodes x 1, size_bytes=64K"]
    assert labels(nodes=[1, 2], exclude=[{"nodes": 1}]) == ["2 nodes x 1"], (
        "a point that cannot run may be excluded"
    )


def test_what_makes_no_sweep_or_cannot_run_on_so_many_ranks_is_refused_with_the_way_out() -> None:
    float8, where = (
        [{"name": "all_reduce", "set": {"dtype": "float8_e5m2"}}],
        "the point '2 nodes x 1' cannot run: ",
    )
    known: list[tuple[dict[str, Any], str]] = [
        ({"exclude": [{"nodes": 2}]}, "$.exclude removes all 1 points"),
        (
            {"exclude": [{"repeat": 2}]},
            "$.exclude[0]: no point has repeat = 2; allowed are 1",
        ),
        (
            {"nodes": [2, 4], "exclude": [{"nodes": 4}, {"nods": 2}]},
            "$.exclude[1]: 'nods' is not a key of the points; allowed are repeat, nodes, ntasks_per_node, "
            "placement or environment; did you mean 'nodes'?",
        ),
        (
            {"nodes": [1, 2]},
            "the point '1 node x 1' cannot run: nodes(1) * ntasks_per_node(1) = 1 rank: at least 2 are needed; give "
            "ntasks_per_node, or exclude = [{ nodes = 1, ntasks_per_node = 1 }]",
        ),
        (
            {"case": [{"name": "broadcast"}], "matrix": {"root": [0, 2]}},
            "the point '2 nodes x 1, root=2' cannot run: root = 2: root 2 is not one of the 2 ranks",
        ),
        (
            {"nodes": list(range(2, 102)), "repeat": 101},
            "101 * 100 = 10100 points are more than 10000: make several sweeps of them",
        ),
        (
            {"nodes": 1 << 16, "ntasks_per_node": 4},
            "the point '65536 nodes x 4' cannot run: nodes(65536) * ntasks_per_node(4) > 131072",
        ),
        ({"case": [], "preset": "nod"}, f"{where}no preset is named 'nod'"),
        ({"case": [{"name": "allreduce"}]}, "no case is named 'allreduce'"),
        (
            {"case": [{"name": "all_reduce", "set": {"size_bytes": "1001"}}]},
            f"{where}size_bytes = 1001: size 1001 B",
        ),
        (
            {"case": float8, "backend": "gloo"},
            f"{where}dtype = float8_e5m2: gloo carries no float8_e5m2",
        ),
        (
            {"case": float8, "device": "cpu"},
            f"{where}dtype = float8_e5m2: gloo carries no float8_e5m2",
        ),
        (
            {
                "nodes": 1,
                "ntasks_per_node": 4,
                "case": [{"name": "all_reduce", "set": {"group": "across"}}],
            },
            "the point '1 node x 4' cannot run: group = across",
        ),
    ]
    for given_values, words in known:
        assert usage_error(expanded, **given_values).startswith(words), given_values


def test_expand_notes_skipped_cases() -> None:
    cases = [
        {"name": "all_reduce", "set": {"size_bytes": "1002", "dtype": "float16"}},
        {"name": "all_gather", "set": {"size_bytes": "1002,1000", "dtype": "float16"}},
    ]
    assert both(nodes=4, case=cases, repeat=2)[1] == [
        "on 4 x 1 ranks 1 of 3 cases are skipped: collective.all_gather size_bytes=1002 dtype=float16 mode=blocking: "
        "size 1002 B is not a multiple of 4 ranks x 2 B (float16); nearest are 1000 and 1008",
    ]


def planned(*entries: Entry, nodes: int = 2, ntasks_per_node: int = 1, **given: Any) -> Plan:
    where = point(nodes=nodes, ntasks_per_node=ntasks_per_node, cases=entries)
    return plan_point(msgspec.convert(given, SweepFile), DEFINITIONS, where)


def entry(name: str = "all_reduce", **params: str) -> Entry:
    return Entry(name=name, set=params)


def test_a_point_is_planned_for_the_ranks_of_all_its_nodes_as_the_file_and_else_the_preset_says() -> (
    None
):
    plan = planned(entry(size_bytes="64K"), nodes=4, ntasks_per_node=2)
    assert (plan.nproc, plan.backend, plan.device, len(plan.cases)) == (8, "gloo", "cpu", 1)
    plan = planned(entry(), preset="smoke", budget="2m", timeout=7, launches=3)
    assert (plan.preset, plan.budget_seconds, plan.timeout_seconds, plan.launches) == (
        "smoke",
        120,
        7,
        3,
    )
    assert planned(entry(dtype="float8_e5m2")).backend == "nccl", (
        "it is enough that one backend can"
    )
    assert planned(entry(), device="cuda").backend == "nccl", (
        "gloo on GPUs is used where it is asked for alone"
    )
    assert planned(entry(), device="cuda", backend="gloo").backend == "gloo"


def test_an_id_is_what_is_measured_and_where_and_nothing_else() -> None:
    assert len(point().id) == 12
    assert set(point().id) <= set("0123456789abcdef")
    turned = (Entry(name="all_reduce", set={"mode": "blocking", "dtype": "float32"}),)
    same: list[dict[str, Any]] = [{"label": "other"}, {"seconds": 99.0}, {"id": "other"}]
    for change in [*same, {"cases": turned, "variables": {"A": "1", "NCCL_ALGO": "Ring"}}]:
        assert point(**change).id == point().id, change
    float16 = (Entry(name="all_reduce", set={"dtype": "float16", "mode": "blocking"}),)
    other: list[dict[str, Any]] = [
        {"nodes": 2},
        {"ntasks_per_node": 4},
        {"placement": "cyclic"},
        {"repeat": 2},
    ]
    other += [{"environment": "tree"}, {"variables": {}}, {"cases": ()}, {"cases": float16}]
    assert len({point(**change).id for change in [{}, *other]}) == 1 + len(other)


def test_one_allocation_holds_its_largest_number_of_nodes_and_guesses_are_told_as_coarsely_as_they_deserve() -> (
    None
):
    points = (
        point(nodes=4, seconds=900),
        point(nodes=2, seconds=900),
        point(nodes=2, seconds=900, repeat=2),
    )
    assert estimate(points, "one") == "3 points in 1 job, about 45 min, 3 node-hours"
    assert estimate(points, "array") == "3 points in 2 jobs, about 45 min, 2 node-hours"
    assert (
        estimate((point(nodes=1, seconds=36),), "array")
        == "1 point in 1 job, about 36 s, 0.01 node-hours"
    )
    modes = [
        batches(make_sweep(points, mode=mode, time_seconds=None))[0].time_seconds
        for mode in ("one", "array")
    ]
    assert modes == [3480, 1200], "whole minutes, and more than the work"
    known = {16: "16 s", 119: "1 min 59 s", 120: "2 min", 3600: "60 min", 3 * 3600: "3.0 h"}
    assert {seconds: about(seconds) for seconds in known} == known
