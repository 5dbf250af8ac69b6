"""Bandwidth of groups of ranks by scope and by group."""

from typing import Any

from parbench.bench.results.records import Record
from parbench.reports.run_data import RunData
from tests.support.nodes_fixtures import sample_node_run
from tests.support.report_rows import (
    assert_cells,
    find_table_of_run,
    report_lines,
    table_lines,
)
from tests.support.reports_fixtures import collective_case, ok_record


def pair_record(number: int, seconds: float, **params: Any) -> Record:
    case = collective_case(group="pairs", group_index=number, **params)
    details = {"group_ranks": [2 * number, 2 * number + 1]}
    return ok_record(case, seconds=seconds, details=details)


def test_groups_are_columns_and_sizes_rows() -> None:
    small, large = report_lines(
        "operation-group",
        pair_record(0, 1e-3),
        pair_record(1, 4e-3),
        pair_record(1, 8e-3, concurrent=True),
        pair_record(0, 1e-3, size_bytes=4096),
        pair_record(2, 1e-3, size_bytes=4096),
    )
    assert_cells(
        small,
        {
            "size": "1K",
            "pairs 0,1": "0.00154",
            "pairs 2,3": "0.000384",
            "pairs 2,3 (concurrent)": "0.000192",
            "slowest": "pairs 2,3",
        },
    )
    assert large["size"] == "4K"
    assert large["pairs 2,3"] == "-"


def test_scopes_are_compared_within_and_between_nodes() -> None:
    table = find_table_of_run(RunData(sample_node_run()), "group-scopes")
    assert_cells(
        table_lines(table)[-1],
        {
            "size": "4M",
            "node, within a node": "3.93",
            "world, multi-node": "0.549",
            "inter-node / within": "0.127",
            "inter-node / within (concurrent)": "0.0636",
        },
    )
