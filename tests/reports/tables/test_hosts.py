"""Tables of nodes, arrivals and repetitions."""

from msgspec.structs import replace

from parbench.bench.machine.host_load import HostLoad
from parbench.bench.results.runs import RepetitionInfo
from parbench.reports.run_data import RunData
from tests.support.reports.late import find_stragglers, late_record
from tests.support.reports.nodes_fixtures import (
    sample_node_run,
)
from tests.support.reports.report_rows import (
    assert_cells,
    find_table_of_run,
    report_lines,
    run_from_records,
    table_lines,
)
from tests.support.reports.reports_fixtures import collective_case, ok_record, step_case


def test_node_table_has_ranks_and_switches() -> None:
    table = find_table_of_run(RunData(sample_node_run("cyclic")), "nodes-table")
    assert table_lines(table)[1] == {
        "host": "n2",
        "ranks": "1,5",
        "switches": "spine.leaf1",
    }
    assert "ranks: cyclic" in table.notes[0]


def test_arrivals_show_the_late_rank_and_the_clock() -> None:
    record = replace(late_record(), arrival=find_stragglers(3))
    step = replace(record, case=step_case())  # its skew and transfer are those of an iteration
    other = ok_record(collective_case("broadcast"))
    (line,) = report_lines("arrivals-table", record, step, other)
    assert_cells(
        line,
        {
            "late rank": "3",
            "late share": "80.0 %",
            "skew": "50.0 us",
        },
    )


def test_repetition_table_has_load() -> None:
    run = run_from_records(replace(ok_record(collective_case()), seconds=1.5))
    load = HostLoad(cores=2, other_cores=1.6, steal_percent=25.0)
    repetition = RepetitionInfo(repetition=0, seconds=3.0, load=load)
    run = replace(run, info=replace(run.info, repetitions=(repetition,)))
    (line,) = table_lines(find_table_of_run(RunData(run), "repetitions"))
    assert_cells(
        line,
        {
            "other load": "1.60",
            "steal %": "25.0",
        },
    )
