"""Scaling over nodes: a series for each placement from a common base, repeats by their median, environments apart."""

import msgspec
import pytest
from nodes_fixtures import hosts_of, operation, rates_of, run_of, scaling_run, world_of
from reports_fixtures import ok, step

from bench.runs import Run
from reports.nodes.node_scaling import Environments, OverNodes, environments, layout_of, node_counts, over_nodes
from reports.nodes.sweep_folder import Point
from reports.several import Several, several
from reports.summary import summarize

SIZE = 1 << 22


def of(*runs: Run, points: tuple[Point, ...] = ()) -> Several:
    return several([(run, summarize(run)) for run in runs], points)


def by_label(found: tuple[OverNodes, ...]) -> dict[str, OverNodes]:
    return {one.label: one for one in found}


def timed(nodes: int, rate: float) -> Run:
    hosts = hosts_of(nodes, 1)
    return run_of([ok(operation(SIZE), world=world_of(hosts), metrics=rates_of(SIZE, rate))], hosts)


def point(name: str, environment: str = "", placement: str = "block") -> Point:
    return Point(id=name, label=name, environment=environment, placement=placement)


def test_runs_on_more_nodes_are_a_series() -> None:
    found = by_label(over_nodes(of(*(scaling_run(nodes) for nodes in (1, 2, 4)))))
    assert list(found) == ["all_reduce 64K blocking float32", "all_reduce 4M blocking float32", "ddp"]
    big = found["all_reduce 4M blocking float32"].scaled
    assert sorted(big.rows) == [1, 2, 4]
    assert big.efficiency(2) == pytest.approx(0.125, rel=0.05)
    steps = found["ddp"].scaled
    # as many times the tokens in longer steps: the efficiency is the ratio of step times
    first, last = (steps.rows[nodes].value("step_time") or 0 for nodes in (1, 4))
    assert steps.efficiency(4) == pytest.approx(first / last)
    assert node_counts(tuple(found.values())) == (1, 2, 4)


def test_placements_are_series_of_their_own_from_one_base() -> None:
    runs = [scaling_run(nodes, 2, placement) for placement in ("block", "cyclic") for nodes in (2, 4)]
    found = by_label(over_nodes(of(scaling_run(1, 2), *runs)))
    assert list(found)[:2] == ["all_reduce 64K blocking float32, block", "all_reduce 64K blocking float32, cyclic"]
    block, cyclic = (found[f"all_reduce 4M blocking float32, {name}"].scaled for name in ("block", "cyclic"))
    assert block.rows[1] is cyclic.rows[1]
    rates = [one.rate(4) or 0 for one in (block, cyclic)]
    assert rates[1] == pytest.approx(rates[0] / 2, rel=0.02)


def test_one_rank_a_node_has_no_placement() -> None:
    one = of(scaling_run(4, 1, "cyclic"), points=(point("a", placement="cyclic"),)).runs[0]
    assert layout_of(one, one.shown[0]).placement == ""
    two = of(scaling_run(4, 2, "cyclic")).runs[0]
    assert layout_of(two, two.shown[0]).placement == "cyclic"
    assert layout_of(two, two.shown[0]).ranks_per_node == 2


def test_the_placement_found_counts_and_not_the_one_asked_for() -> None:
    one = of(scaling_run(4, 2, "cyclic"), points=(point("a", placement="block"),)).runs[0]
    assert layout_of(one, one.shown[0]).placement == "cyclic"


def test_an_unknown_placement_is_no_other_ones() -> None:
    """A run that does not tell its hosts, as those of older versions, stands apart from block and cyclic."""
    told, silent = scaling_run(4, 2), scaling_run(4, 2)
    records = tuple(msgspec.structs.replace(one, environment={}) for one in silent.records)
    info = msgspec.structs.replace(silent.info, environment={})
    silent = msgspec.structs.replace(silent, info=info, records=records)
    labels = list(by_label(over_nodes(of(scaling_run(1, 2), told, silent))))
    assert labels[-2:] == ["ddp, block", "ddp, placement unknown"]


def test_other_numbers_of_ranks_a_node_are_other_series() -> None:
    runs = [scaling_run(nodes, each) for each in (1, 2) for nodes in (2, 4)]
    labels = list(by_label(over_nodes(of(*runs))))
    assert labels[-2:] == ["ddp, 1 a node", "ddp, 2 a node, block"]


def test_of_repeats_the_median_counts() -> None:
    runs = [timed(1, 4e9), *(timed(2, rate) for rate in (1e9, 3e9, 2e9))]
    (found,) = over_nodes(of(*runs, points=tuple(point(name) for name in "abcd")))
    assert found.repeats == 3
    assert found.scaled.rate(2) == pytest.approx(2e9, rel=0.02)
    (even,) = over_nodes(of(*runs[:3]))
    assert even.scaled.rate(2) == pytest.approx(1e9, rel=0.02)  # of two the slower, which is a run that there was


def test_a_point_that_ran_twice_counts_once_with_its_last_run() -> None:
    runs = [timed(1, 4e9), timed(2, 1e9), timed(2, 3e9)]
    (found,) = over_nodes(of(*runs, points=(point("a"), point("b"), point("b"))))
    assert found.repeats == 1
    assert found.scaled.rate(2) == pytest.approx(3e9, rel=0.02)


def test_one_number_of_nodes_scales_nowhere_and_groups_are_left_out() -> None:
    assert over_nodes(of(scaling_run(2), scaling_run(2))) == ()
    grouped = [
        run_of([ok(operation(SIZE, group="node"), world=world_of(hosts_of(n, 2)))], hosts_of(n, 2)) for n in (2, 4)
    ]
    assert over_nodes(of(*grouped)) == ()


def test_rows_of_an_unknown_number_of_nodes_have_no_place() -> None:
    """As an imported file's, which does not tell it."""
    runs = [scaling_run(nodes) for nodes in (1, 2)]
    unknown = msgspec.structs.replace(runs[0].records[0].world, nodes=0)
    records = tuple(msgspec.structs.replace(one, world=unknown) for one in runs[0].records)
    foreign = msgspec.structs.replace(runs[0], records=records)
    assert over_nodes(of(foreign, *runs)) == over_nodes(of(*runs))
    assert over_nodes(of(foreign, runs[1])) == ()
    assert environments(of(foreign)) == ()


def test_environments_stand_beside_each_other_where_all_else_is_alike() -> None:
    runs = [scaling_run(nodes, factor=factor) for factor in (1.0, 2.0) for nodes in (2, 4)]
    points = [point(f"{name}{nodes}", name) for name in ("plain", "tuned") for nodes in (2, 4)]
    found = environments(of(*runs, points=tuple(points)))
    assert [(one.label, one.nodes) for one in found][:2] == [
        ("all_reduce 64K blocking float32", 2),
        ("all_reduce 64K blocking float32", 4),
    ]
    assert {one.names for one in found} == {("plain", "tuned")}
    assert ratio(found[-1]) == pytest.approx(0.5)


def ratio(one: Environments) -> float | None:
    found = one.beside.ratio(1)
    return found.value if found else None


def test_without_two_environments_there_is_nothing_to_compare() -> None:
    runs = [scaling_run(2), scaling_run(4)]
    assert environments(of(*runs)) == ()
    assert environments(of(*runs, points=(point("a", "plain"), point("b", "plain")))) == ()
    assert environments(of(*runs, points=(point("a", "plain"), point("b", "tuned")))) == ()  # on other nodes


def test_environments_scale_apart() -> None:
    runs = [scaling_run(nodes, factor=factor) for factor in (1.0, 2.0) for nodes in (2, 4)]
    points = [point(f"{name}{nodes}", name) for name in ("plain", "tuned") for nodes in (2, 4)]
    labels = list(by_label(over_nodes(of(*runs, points=tuple(points)))))
    assert labels[-2:] == ["ddp, plain", "ddp, tuned"]


def test_a_row_without_a_time_is_no_median() -> None:
    hosts = hosts_of(2, 1)
    unknown = run_of([ok(step(), world=world_of(hosts), metrics={})], hosts)
    assert over_nodes(of(scaling_run(1), unknown)) == ()
