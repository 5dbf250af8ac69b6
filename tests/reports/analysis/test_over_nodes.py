"""Cases of several runs over numbers of nodes, in placements and environments."""

import pytest

from parbench.bench.results.runs import Run
from parbench.reports.analysis.over_nodes import over_nodes
from parbench.reports.analysis.several import Point, RunSet, several
from parbench.reports.analysis.summary import summarize
from parbench.reports.sections.several import report_of_several
from tests.support.nodes_fixtures import (
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
            "ranks a node": "2",
            "distribution": "block",
            "1 node": "3.93 GB/s",
            "2 nodes": "0.499 GB/s",
            "efficiency 2 nodes": "12.7 %",
        },
    )
    assert_cells(
        step,
        {
            "4 nodes": "20.0 ms",
            "efficiency 4 nodes": "50.0 %",
        },
    )


def test_placements_are_series_from_one_base() -> None:
    runs = [scaling_run(1, 2)]
    runs += [scaling_run(4, 2, distribution) for distribution in ("block", "cyclic")]
    series_by_label = {series.label: series.scaled for series in over_nodes(join(*runs))}
    block = series_by_label["all_reduce 4M blocking float32, block"]
    cyclic = series_by_label["all_reduce 4M blocking float32, cyclic"]
    assert block.rows[1] is cyclic.rows[1]
    block_rate, cyclic_rate = block.rate(4), cyclic.rate(4)
    assert block_rate
    assert cyclic_rate == pytest.approx(block_rate / 2, rel=0.02)


@pytest.mark.parametrize(
    ("rates", "point_ids", "repeats", "rate"),
    [
        pytest.param((1e9, 3e9, 2e9), "abcd", 3, 2e9, id="median"),
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


def test_environments_are_compared_on_equal_nodes() -> None:
    points = []
    runs = []
    for environment, factor in (("plain", 1.0), ("tuned", 2.0)):
        for nodes in (2, 4):
            points.append(Point(id=f"{environment} {nodes}", environment=environment))
            runs.append(scaling_run(nodes, factor=factor))
    run_set = join(*runs, points=tuple(points))
    lines = lines_of(run_set, "environments-table")
    assert [line["nodes"] for line in lines[:2]] == ["2", "4"]
    assert lines[-1]["tuned / first, within this repetition"].startswith("0.500 [")
