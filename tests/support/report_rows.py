"""Short ways from records to what reports make of them: a run, its rows, its findings, the cells of a row."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from parbench.bench.plan.cases import Case, make_case
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run
from parbench.reports.analysis.analysis import Analysis, analyse
from parbench.reports.analysis.summary import Row, summarize
from parbench.reports.report import Column, Section, Table
from parbench.reports.sections.one_run import SECTIONS
from tests.support.reports_fixtures import make_plan, make_run

T = TypeVar("T")


def run_from_records(
    *records: Record, launches: int = 1, environment: dict[str, Any] | None = None
) -> Run:
    cases = {record.case.id: record.case for record in records}.values()
    return make_run(make_plan(cases, launches=launches), records, environment)


def summarize_rows(*records: Record, launches: int = 1) -> tuple[Row, ...]:
    return summarize(run_from_records(*records, launches=launches)).rows


def summarize_row(*records: Record, launches: int = 1) -> Row:
    (row,) = summarize_rows(*records, launches=launches)
    return row


def analyze_run(run: Run) -> Analysis:
    return analyse(run, summarize(run))


def analyze_records(*records: Record) -> Analysis:
    return analyze_run(run_from_records(*records))


def make_sections(found: Analysis) -> tuple[Section, ...]:
    return tuple(section for make in SECTIONS if (section := make(found)))


def analysis_tables(found: Analysis) -> list[Table[Any]]:
    return [table for section in make_sections(found) for table in section.tables]


def find_analysis_table(found: Analysis, table_id: str, where: str | None = None) -> Table[Any]:
    (table,) = [
        one for one in analysis_tables(found) if one.id == table_id and where in (None, one.where)
    ]
    return table


def column_texts(columns: Sequence[Column[T]], row: T) -> dict[str, str]:
    return {column.title: column.text(row) for column in columns}


def row_text(columns: Sequence[Column[T]], row: T) -> str:
    return " | ".join(f"{title}: {text}" for title, text in column_texts(columns, row).items())


def require(found: T | None) -> T:
    assert found is not None
    return found


def cell_texts(table: Table[Any]) -> list[list[str]]:
    return [[column.text(row) for column in table.columns] for row in table.rows]


def find_table(make_sections: Iterable[Section], table_id: str) -> Table[Any]:
    (found,) = [
        table for section in make_sections for table in section.tables if table.id == table_id
    ]
    return found


def matrix_case(source: int, target: int, size_bytes: int = 1 << 20) -> Case:
    params: dict[str, Any] = {"size_bytes": size_bytes, "dtype": "float32", "mode": "blocking"}
    return make_case(
        "p2p.matrix",
        "parbench.bench.operations.p2p:unidirectional",
        {**params, "source": source, "target": target},
    )


def replace_metrics(record: Record, **metrics: MetricValue | None) -> Record:
    """Return the record with these metrics in place of its own, those that are None left out; ``__`` is a dot."""
    changed = record.metrics | {name.replace("__", "."): metric for name, metric in metrics.items()}
    return msgspec.structs.replace(
        record, metrics={name: one for name, one in changed.items() if one is not None}
    )
