"""Tables of nodes, rates from rank to rank, arrivals and repetitions."""

from msgspec.structs import replace

from parbench.bench.machine.host_load import HostLoad
from parbench.bench.results.runs import LaunchInfo
from tests.support.late import late_record, make_arrival
from tests.support.nodes_fixtures import (
    make_hosts,
    make_node_run,
    pair_records,
    sample_node_run,
)
from tests.support.report_rows import (
    analyze_run,
    assert_cells,
    find_analysis_table,
    report_lines,
    run_from_records,
    table_lines,
)
from tests.support.reports_fixtures import collective_case, ok_record


def test_node_table_has_ranks_switches_and_placement() -> None:
    table = find_analysis_table(analyze_run(sample_node_run("cyclic")), "nodes-table")
    assert table_lines(table)[1] == {
        "host": "n2",
        "ranks": "1,5",
        "ranks a node": "2",
        "switches": "spine.leaf1",
        "cores": "1",
    }
    assert "8 ranks on 4 nodes: cyclic" in table.notes[0]
    assert "17" in table.notes[1]


def test_node_table_notes_unrequested_placement() -> None:
    hosts = make_hosts(2, 2, "cyclic")
    run = make_node_run([ok_record(collective_case())], hosts, distribution="block")
    table = find_analysis_table(analyze_run(run), "nodes-table")
    assert "cyclic; block was asked for" in table.notes[0]


def test_pair_matrix_is_ordered_by_node() -> None:
    hosts = make_hosts(4, 2, "cyclic")
    run = make_node_run(pair_records(hosts), hosts)
    table = find_analysis_table(analyze_run(run), "pairs-1-matrix")
    first = table_lines(table)[0]
    assert list(first)[:4] == ["from \\ to", "0 n1", "4 n1", "1 n2"]
    assert_cells(
        first,
        {
            "from \\ to": "0 n1",
            "0 n1": "-",
            "4 n1": "3.85",
            "1 n2": "0.991",
        },
    )


def test_pair_medians_start_with_the_nearest() -> None:
    hosts = make_hosts(4, 2)
    run = make_node_run(pair_records(hosts), hosts)
    medians, ratios = find_analysis_table(analyze_run(run), "pairs-1-matrix").notes
    within_node, within_switch, across = medians.split(", ")
    assert "within a node 3.84 GB/s (8 pairs)" in within_node
    assert "same switch" in within_switch
    assert "other switch" in across
    assert "other switch runs at 0.134 of within a node" in ratios


def test_arrivals_show_the_late_rank_and_the_clock() -> None:
    record = replace(late_record(), arrival=replace(make_arrival(3), last_out_rank=None))
    (line,) = report_lines("arrivals-table", record, ok_record(collective_case("broadcast")))
    assert_cells(
        line,
        {
            "late rank": "3",
            "in": "80.0 %",
            "last out": "-",
            "skew": "50.0 us",
        },
    )


def test_launch_table_has_load_and_share() -> None:
    run = run_from_records(replace(ok_record(collective_case()), seconds=1.5))
    load = HostLoad(cores=2, one_minute=0.5, other_cores=1.6, steal_percent=25.0)
    launch = LaunchInfo(launch=0, seconds=3.0, load=load)
    run = replace(run, info=replace(run.info, launches=(launch,)))
    (line,) = table_lines(find_analysis_table(analyze_run(run), "launches"))
    assert_cells(
        line,
        {
            "measuring": "50.0 %",
            "others": "1.60",
            "steal": "25.0 %",
        },
    )
