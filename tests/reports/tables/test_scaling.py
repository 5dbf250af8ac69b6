"""Scaling of cases over nodes and ranks."""

import pytest
from msgspec.structs import replace

from parbench.bench.plan.cases import Case
from parbench.bench.results.runs import Run
from parbench.reports.run_set import RunSet
from parbench.reports.sweeps import MeasuredPoint
from parbench.reports.tables.scaling import list_scaling_tables
from tests.support.reports.nodes_fixtures import (
    group_record,
    make_hosts,
    make_node_run,
    scaling_run,
)
from tests.support.reports.report_rows import assert_cells, run_from_records, table_lines
from tests.support.reports.reports_fixtures import WORLD, collective_case, ok_record, step_case

SIZE = 1 << 22


def node_lines(*runs: Run, points: tuple[MeasuredPoint, ...] = ()) -> dict[str, dict[str, str]]:
    """Return the lines of the table of nodes by their cases."""
    pairs = list(zip(runs, points or [None] * len(runs), strict=True))
    (table,) = list_scaling_tables(RunSet(pairs))
    return {line["case"]: line for line in table_lines(table)}


def rate_run(nodes: int, rate: float) -> Run:
    hosts = make_hosts(nodes, 1)
    return make_node_run([group_record(hosts, SIZE, rate)], hosts)


def test_table_has_rates_and_efficiency() -> None:
    lines = node_lines(*(scaling_run(nodes, 2) for nodes in (1, 2, 4)))
    small, large, step = lines
    assert small == "all_reduce 64K blocking float32, 2 per node, block"
    assert_cells(
        lines[large],
        {
            "1 node": "3.93 GB/s",
            "2 nodes": "0.499 GB/s",
            "efficiency 2 nodes": "12.7 %",
        },
    )
    assert_cells(lines[step], {"4 nodes": "20.0 ms", "efficiency 4 nodes": "50.0 %"})


def test_distributions_are_series_from_one_base() -> None:
    runs = [scaling_run(1, 2)]
    runs += [scaling_run(4, 2, distribution) for distribution in ("block", "cyclic")]
    lines = node_lines(*runs)
    block = lines["all_reduce 4M blocking float32, 2 per node, block"]
    cyclic = lines["all_reduce 4M blocking float32, 2 per node, cyclic"]
    assert block["1 node"] == cyclic["1 node"] == "3.93 GB/s"
    assert (block["4 nodes"], cyclic["4 nodes"]) == ("0.250 GB/s", "0.125 GB/s")


@pytest.mark.parametrize("rates", [(1e9, 3e9, 2e9), (1e9, 3e9)])
def test_repeats_use_the_median(rates: tuple[float, ...]) -> None:
    runs = [rate_run(1, 4e9), *(rate_run(2, value) for value in rates)]
    (line,) = node_lines(*runs).values()
    assert line["2 nodes"] == "1.98 GB/s"


def run_on(ranks: int, case: Case, seconds: float) -> Run:
    world = replace(WORLD, size=ranks)
    return run_from_records(ok_record(case, seconds=seconds, world=world))


@pytest.mark.parametrize(
    ("case", "seconds", "efficiency"),
    [
        (step_case(), 1e-3, "25.0 %"),
        (step_case(), 0.25e-3, "100 %"),
        (collective_case(), 2e-3, "50.0 %"),
    ],
)
def test_efficiency_of_ranks_expects_rate_or_busbw(
    case: Case, seconds: float, efficiency: str
) -> None:
    runs = [run_on(2, case, 1e-3), run_on(8, case, seconds)]
    (table,) = list_scaling_tables(RunSet([(run, None) for run in runs]))
    (line,) = table_lines(table)
    assert line["efficiency 8 ranks"] == efficiency
