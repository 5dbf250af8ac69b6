"""The report of a run, of several runs, or of a plan: what renderers print."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from parbench.bench.results.tables import Column, Document, Section, Table, keep_known_columns
from parbench.reports.analysis.labels import Fact
from parbench.reports.analysis.verdicts import Problem, ReportVerdict
from parbench.reports.figures.chart import Chart
from parbench.reports.figures.plots import list_table_charts
from parbench.reports.findings.finding import Finding
from parbench.reports.run_data import RunData

_STATUS_MESSAGES = {
    "PREDICTED": "every number follows from formulas and declared rates, nothing was measured",
    "PUBLISHED": "the tables are quoted from the sources, nothing was predicted or measured",
    "VALIDATED": "predictions follow from formulas and fits, measurements from the steps of the run",
}

_PROBLEM_COLUMNS = (
    Column("run", help="the run, and the point of a sweep that it measured"),
    Column("case", is_result=True, help="what ran"),
    Column("status", grade_key="status", is_result=True, help="its worst status"),
    Column("repetitions", is_result=True, help="repetitions with it, of those planned"),
    Column("reason", is_result=True, help="the reason, with ranks and their hosts"),
)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that renderers print. A renderer is a function of a report."""

    name: str
    heading: str = ""
    """A phrase for the content of the run, or for the differences of several runs."""
    verdicts: Sequence[ReportVerdict]
    code: int
    """The exit code."""
    runs: Sequence[RunData]
    """The runs whose cases JSON and CSV contain, empty for plans and traces."""
    sections: Sequence[Section]
    emulated: Sequence[str] = ()
    """Sentences about emulations in the runs."""
    claims: Sequence[str] = ()
    """Sentences about the limits of the runs."""
    tiles: Sequence[tuple[str, str]] = ()
    """The numbers to see first, with their titles."""
    setup: str = ""
    """The host, the ranks and the backend of a run. Empty for several runs, plans and traces."""
    figures: Callable[[], Iterable[Chart]] = tuple
    """The figures above the sections."""
    warnings: Sequence[str] = ()
    problems: Sequence[Problem] = ()
    findings: Sequence[Finding] = ()
    comparisons: Sequence[str] = ()
    """Sentences about the effects of settings."""
    not_measured: Sequence[Problem] = ()
    environment: Sequence[Fact] = ()
    footnotes: Sequence[str] = ()

    @property
    def charts(self) -> tuple[Chart, ...]:
        """All figures of the page in order."""
        charts = list(self.figures())
        for section in self.sections:
            for table in section.on_page:
                charts += list_table_charts(table)
        return tuple(charts)

    @property
    def problem_table(self) -> Table:
        """The table of the cases that are wrong, hung or failed."""
        return make_problem_table("problems", "Wrong, hung or failed", {"": self.problems})

    @property
    def not_measured_table(self) -> Table:
        """The table of the cases that were not measured."""
        return make_problem_table("not-measured", "Not measured", {"": self.not_measured})


def make_sections(tables: Mapping[tuple[str, str], Iterable[Table]]) -> list[Section]:
    """Return the sections by their ids and titles. Tables without rows and notes are left out."""
    sections = []
    for (section_id, title), section_tables in tables.items():
        visible_tables = [table for table in section_tables if table.rows or table.notes]
        if visible_tables:
            sections.append(Section(section_id, title, tables=visible_tables))
    return sections


def make_report_of_document(document: Document) -> Report:
    """Return the report of a document without runs, such as a plan.

    A document with a problem has the verdict TOO LARGE.
    """
    message = _STATUS_MESSAGES[document.status]
    verdict = ReportVerdict(document.status, "good", message)
    if document.problem:
        verdict = ReportVerdict("TOO LARGE", "bad", document.problem)
    return Report(
        name=document.name,
        heading=document.heading,
        verdicts=[verdict],
        code=0,
        runs=[],
        sections=document.sections,
        tiles=document.tiles,
    )


def make_problem_table(
    table_id: str, title: str, problems: Mapping[str, Sequence[Problem]]
) -> Table:
    """Return a table of the problems of runs, keyed by the name of the run.

    The name is empty if there is only one run.
    """
    rows = [
        {"run": run or None, **vars(problem)}
        for run, run_problems in problems.items()
        for problem in run_problems
    ]
    columns = keep_known_columns(_PROBLEM_COLUMNS, rows)
    return Table(table_id, title, caption="by run", columns=columns, rows=rows)
