"""The report of a run, of several runs, or of a plan, from which renderers make text and pages."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from parbench.bench.results.tables import Column, Document, Section, Table
from parbench.reports.analysis.labels import Fact
from parbench.reports.analysis.verdicts import Problem, ReportVerdict
from parbench.reports.figures.chart import Chart
from parbench.reports.figures.plots import list_table_charts
from parbench.reports.findings.finding import Finding
from parbench.reports.run_data import RunData

_STATUS_MESSAGES = {
    "PREDICTED": "numbers follow from formulas and rates of the hardware, no step was measured",
    "PUBLISHED": "the tables are quoted from the sources, nothing was predicted or measured",
    "COMPARED": "predictions follow from formulas and fits, measurements from the steps of the run",
}
"""The message of the verdict on a document that no run measured, keyed by ``Document.status``."""

_PROBLEM_COLUMNS = (
    Column("run", help="the run, and the point of a sweep that it measured"),
    Column("case", is_result=True, help="what ran"),
    Column("status", grade_key="status", is_result=True, help="its worst status"),
    Column("repetitions", is_result=True, help="repetitions with it, of those planned"),
    Column("reason", is_result=True, help="the reason, with ranks and their hosts"),
)


@dataclass(frozen=True, kw_only=True)
class Report:
    """The content of a report. Renderers print it as text, HTML, Markdown, JSON or CSV."""

    name: str
    """The id of the run, or the title of another report."""
    heading: str = ""
    """A line about what ran and where, or about the differences of several runs."""
    verdicts: Sequence[ReportVerdict]
    """The verdicts on the correctness, completeness and noise of a run, or one on several runs."""
    code: int
    """The exit code of the command that prints the report."""
    runs: Sequence[RunData]
    """The runs whose cases JSON and CSV contain, empty for plans and traces."""
    sections: Sequence[Section]
    """The sections with their tables, in order."""
    emulated: Sequence[str] = ()
    """Sentences about nodes or links of the runs that are not real."""
    tiles: Sequence[tuple[str, str]] = ()
    """The main numbers as pairs of text: the number, and the name of the quantity."""
    figures: Callable[[], Iterable[Chart]] = tuple
    """Returns the charts above the sections."""
    problems: Sequence[Problem] = ()
    """The cases that failed, hung or were wrong."""
    findings: Sequence[Finding] = ()
    """The problems that cost enough time to be reported, with commands that measure them again."""
    comparisons: Sequence[str] = ()
    """Sentences about the effects of parameters on the time of cases of the run."""
    not_measured: Sequence[Problem] = ()
    """The cases that were skipped or have no record."""
    environment: Sequence[Fact] = ()
    """Pairs of the dotted name and the text of each fact of the environment."""
    footnotes: Sequence[str] = ()
    """Sentences about units, methods and limits, below all tables."""

    @property
    def charts(self) -> tuple[Chart, ...]:
        """All charts of the page: the charts above the sections, then the charts of tables."""
        charts = list(self.figures())
        for section in self.sections:
            for table in section.tables:
                charts += list_table_charts(table)
        return tuple(charts)

    @property
    def problem_table(self) -> Table:
        """The table of the cases that failed, hung or were wrong."""
        return make_problem_table("problems", "Wrong, hung or failed", {"": self.problems})

    @property
    def not_measured_table(self) -> Table:
        """The table of the cases that were skipped or have no record."""
        return make_problem_table("not-measured", "Not measured", {"": self.not_measured})


def make_sections(tables: Mapping[tuple[str, str], Iterable[Table]]) -> list[Section]:
    """Return the sections of a report, without tables that have neither rows nor notes.

    ``tables`` are keyed by the id and the title of a section. A section without tables is left out.
    """
    sections = []
    for (section_id, title), section_tables in tables.items():
        visible_tables = [table for table in section_tables if table.rows or table.notes]
        if visible_tables:
            sections.append(Section(section_id, title, tables=visible_tables))
    return sections


def make_report_of_document(document: Document) -> Report:
    """Build the report of a document that no run measured, such as a plan of a training step.

    The verdict of the report states the origin of the numbers (PREDICTED, PUBLISHED or COMPARED),
    or TOO LARGE if the planned step is impossible.
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
    """Return the table of failed or unmeasured cases of one or several runs.

    ``table_id`` is the id of the table on the page. ``problems`` has the cases of each run, keyed
    by the name of the run, which is empty for a single run.
    """
    rows = [
        {"run": run or None, **vars(problem)}
        for run, run_problems in problems.items()
        for problem in run_problems
    ]
    return Table(table_id, title, caption="by run", columns=_PROBLEM_COLUMNS, rows=rows)
