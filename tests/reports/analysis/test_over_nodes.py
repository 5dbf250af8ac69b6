"""Cases of several runs over numbers of nodes, in placements and environments."""

import pytest
from msgspec.structs import replace

from parbench.bench.results.runs import Run
from parbench.reports.analysis.over_nodes import OverNodes, environments, over_nodes
from parbench.reports.analysis.several import Point, RunSet, several
from parbench.reports.analysis.summary import summarize
from parbench.reports.sections.several import report_of_several
from tests.support.nodes_fixtures import (
    failed_node_run,
    group_record,
    make_hosts,
    make_node_run,
    scaling_run,
)
from tests.support.report_rows import assert_cells, find_table, table_lines

SIZE = 1 << 22


def join(*runs: Run, points: tuple[Point, ...] = ()) -> RunSet:
    return several([(run, summarize(run)) for run in runs], points)


def lines_of(run_set: RunSet, table_id: str) -> list[dict[str, str]]:
    return table_lines(find_table(report_of_several(run_set).sections, table_id))


def series_of(*runs: Run, points: tuple[Point, ...] = ()) -> dict[str, OverNodes]:
    return {series.label: series for series in over_nodes(join(*runs, points=points))}


def rate_run(nodes: int, rate: float) -> Run:
    hosts = make_hosts(nodes, 1)
    return make_node_run([group_record(hosts, SIZE, rate)], hosts)


def test_table_has_rates_and_efficiency() -> None:
    runs = [scaling_run(nodes, 2) for nodes in (1, 2, 4)]
    small, large, step = lines_of(join(*runs), "over-nodes-table")
    assert small["case"] == "all_reduce 64K blocking float32"
    assert_cells(
        large,
        {
            "what": "busbw",
            "ranks a node": "2",
            "placement": "block",
            "1 node": "3.93 GB/s",
            "2 nodes": "0.499 GB/s",
            "efficiency 2 nodes": "12.7 %",
        },
    )
    assert_cells(
        step,
        {
            "what": "step time",
            "1 node": "10.0 ms",
            "4 nodes": "20.0 ms",
            "efficiency 4 nodes": "50.0 %",
        },
    )


def test_placements_are_series_from_one_base() -> None:
    runs = [scaling_run(1, 2)]
    runs += [
        scaling_run(nodes, 2, placement) for placement in ("block", "cyclic") for nodes in (2, 4)
    ]
    series = series_of(*runs)
    block = series["all_reduce 4M blocking float32, block"].scaled
    cyclic = series["all_reduce 4M blocking float32, cyclic"].scaled
    assert block.rows[1] is cyclic.rows[1]
    assert (cyclic.rate(4) or 0) / (block.rate(4) or 1) == pytest.approx(0.5, rel=0.02)


def test_unknown_placement_is_a_series_of_its_own() -> None:
    run = scaling_run(4, 2)
    records = tuple(replace(record, environment={}) for record in run.records)
    silent = replace(run, info=replace(run.info, environment={}), records=records)
    series = series_of(scaling_run(1, 2), scaling_run(4, 2), silent)
    assert list(series)[-2:] == ["ddp, block", "ddp, placement unknown"]


@pytest.mark.parametrize(
    ("rates", "point_ids", "repeats", "rate"),
    [
        pytest.param((1e9, 3e9, 2e9), "abcd", 3, 2e9, id="median"),
        pytest.param((1e9, 3e9), "", 2, 1e9, id="slower-of-two"),
        pytest.param((1e9, 3e9), "abb", 1, 3e9, id="last-of-a-point"),
    ],
)
def test_repeats_use_the_median_or_the_last(
    rates: tuple[float, ...], point_ids: str, repeats: int, rate: float
) -> None:
    runs = [rate_run(1, 4e9), *(rate_run(2, value) for value in rates)]
    points = tuple(Point(id=name) for name in point_ids)
    (series,) = over_nodes(join(*runs, points=points))
    assert series.repeats == repeats
    assert series.scaled.rate(2) == pytest.approx(rate, rel=0.02)


def test_imported_run_without_nodes_is_left_out() -> None:
    run = scaling_run(1)
    world = replace(run.records[0].world, nodes=0)
    imported = replace(run, records=tuple(replace(r, world=world) for r in run.records))
    assert series_of(imported, scaling_run(2)) == {}
    assert environments(join(imported)) == ()


def test_series_replace_scaling_by_ranks() -> None:
    report = report_of_several(
        join(scaling_run(2, 2), scaling_run(4, 2), scaling_run(4, 2, "cyclic"))
    )
    ids = [section.id for section in report.sections]
    assert "over-nodes" in ids
    assert "scaling" not in ids


def make_points(*environment_names: str) -> tuple[Point, ...]:
    return tuple(Point(id=str(i), environment=name) for i, name in enumerate(environment_names))


def test_environments_are_compared_on_equal_nodes() -> None:
    runs = [scaling_run(nodes, factor=factor) for factor in (1.0, 2.0) for nodes in (2, 4)]
    run_set = join(*runs, points=make_points("plain", "plain", "tuned", "tuned"))
    lines = lines_of(run_set, "environments-table")
    assert lines[0]["case"] == "all_reduce 64K blocking float32"
    assert [line["nodes"] for line in lines[:2]] == ["2", "4"]
    assert lines[-1]["tuned / first, within this launch"].startswith("0.500 [")


def test_problems_name_point_and_host() -> None:
    points = (Point(id="a"), Point(id="b", label="4 nodes x 1"))
    run_set = join(scaling_run(2), failed_node_run(), points=points)
    (line,) = lines_of(run_set, "problems-table")
    assert line["run"] == "run 2: 4 nodes x 1"
    assert line["status"] == "hang"
    assert "rank 2 (n3)" in line["reason"]
