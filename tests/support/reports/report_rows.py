"""Short ways from records to a run, its results, its report, and the cells of its tables."""

from collections.abc import Mapping
from typing import Any

from parbench.bench.plan.cases import Case, make_case
from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run
from parbench.bench.results.tables import Table
from parbench.reports.analysis.case_results import CaseResult, merge_records
from parbench.reports.report import Report
from parbench.reports.run_data import RunData
from parbench.reports.run_reports import make_report
from tests.support.reports.reports_fixtures import make_plan, make_run


def run_from_records(
    *records: Record, repetitions: int = 1, environment: dict[str, Any] | None = None
) -> Run:
    cases = {record.case.id: record.case for record in records}.values()
    return make_run(make_plan(cases, repetitions=repetitions), records, environment)


def summarize_rows(*records: Record, repetitions: int = 1) -> tuple[CaseResult, ...]:
    return merge_records(run_from_records(*records, repetitions=repetitions))


def summarize_row(*records: Record, repetitions: int = 1) -> CaseResult:
    (row,) = summarize_rows(*records, repetitions=repetitions)
    return row


def report_of(run: Run) -> Report:
    return make_report(RunData(run))


def load_records(*records: Record) -> RunData:
    return RunData(run_from_records(*records))


def find_table_of_run(data: RunData, table_id: str) -> Table:
    """Return the table of this id in the report on a run."""
    [table] = [
        table
        for section in make_report(data).sections
        for table in section.tables
        if table.id == table_id
    ]
    return table


def table_lines(table: Table) -> list[dict[str, str]]:
    """Return the text of each row by the title of its column."""
    lines = []
    for row in table.rows:
        lines.append({column.title: column.format_cell(row) for column in table.columns})
    return lines


def assert_cells(line: Mapping[str, object], expected: Mapping[str, object]) -> None:
    """Check the text of these columns of a line."""
    assert {title: line.get(title) for title in expected} == expected


def report_lines(table_id: str, *records: Record) -> list[dict[str, str]]:
    """Return the lines of one table of the report on a run of these records."""
    return table_lines(find_table_of_run(load_records(*records), table_id))


def matrix_case(source: int, target: int, size_bytes: int = 1 << 20) -> Case:
    params: dict[str, Any] = {"size_bytes": size_bytes, "dtype": "float32", "mode": "blocking"}
    params |= {"source": source, "target": target}
    return make_case("p2p.matrix", "parbench.bench.operations.p2p:unidirectional", params)
