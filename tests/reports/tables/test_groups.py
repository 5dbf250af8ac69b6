"""Bandwidth of links and of groups of ranks."""

from typing import Any

from parbench.bench.results.records import Record
from parbench.reports.run_data import RunData
from tests.support.reports.figure_parts import find_texts
from tests.support.reports.nodes_fixtures import sample_node_run
from tests.support.reports.report_rows import (
    assert_cells,
    find_table_of_run,
    matrix_case,
    report_lines,
    run_from_records,
    table_lines,
)
from tests.support.reports.reports_fixtures import (
    collective_case,
    ok_record,
    rate_metric,
    seconds_metric,
)


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
            "within a node": "3.93",
            "multi-node": "0.549",
        },
    )


def test_matrix_is_ordered_by_node_and_distances_are_compared() -> None:
    table = find_table_of_run(RunData(sample_node_run("cyclic")), "pairs-1")
    lines = table_lines(table)
    assert [line["from \\ to"] for line in lines[:3]] == ["0 n1", "4 n1", "1 n2"]
    assert lines[0]["0 n1"] == "-"
    assert lines[0]["4 n1"] == "3.85"
    assert list(table.notes) == [
        "Median bandwidth: within a node 3.84 GB/s (8 pairs), same switch 1.01 GB/s (16 pairs), "
        "other switch 0.512 GB/s (32 pairs).",
    ]


def test_link_figure_has_a_cell_for_each_link() -> None:
    rates = {(0, 1): 2e9, (0, 2): 3e9, (1, 0): 11e9, (1, 2): 13e9, (2, 0): 21e9, (2, 1): 22e9}
    records = []
    for (sender, receiver), rate in rates.items():
        metrics = {"time": seconds_metric(1e-3), "busbw": rate_metric(rate)}
        records.append(ok_record(matrix_case(sender, receiver), metrics=metrics))
    table = find_table_of_run(RunData(run_from_records(*records)), "pairs-1")
    [chart] = table.figures()
    figure = chart.draw()
    assert {"2.00", "3.00", "11.0", "13.0", "21.0", "22.0"} <= set(find_texts(figure))
    shades = [patch.get_alpha() or 1.0 for patch in figure.axes[0].patches]
    assert len(shades) == 6
    # The fastest link is from rank 2 to rank 1: the third row, the second column.
    darkest = figure.axes[0].patches[shades.index(max(shades))]
    column, row = map(int, darkest.get_path().vertices[0])
    assert (row, column) == (2, 1)
