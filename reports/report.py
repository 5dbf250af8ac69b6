"""What a report is: sections of tables, each table with its columns, rows, notes and figures.

A run, or several, is analysed once into a `Report`. A renderer is a function of that alone: terminal, Markdown, page
and JSON are four, and another would be a file beside them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from parbench.bench.plan.catalogue import describe_busbw_factors
from parbench.bench.results import tables
from parbench.bench.results.formatting import (
    UNKNOWN,
    format_difference,
    format_measurement,
    format_quantity,
)
from parbench.bench.results.metrics import Metric, MetricValue
from parbench.bench.results.stats import WITHIN_REPETITION
from parbench.reports.figures.chart import Chart
from parbench.reports.figures.plots import list_table_charts
from parbench.reports.findings.finding import Finding
from parbench.reports.labels import Fact
from parbench.reports.overview import Overview
from parbench.reports.run_data import RunData
from parbench.reports.verdicts import Problem, Verdict

T = TypeVar("T")
U = TypeVar("U")
Where = Literal["everywhere", "page", "terminal"]
"""``page`` is Markdown too."""


@dataclass(frozen=True)
class Column(Generic[T]):
    """A column: its cells as text, and what to sort them by (None is unknown and goes last).

    ``metric`` is the declared one that it shows; ``is_result`` says that it shows what was found, whose being alike
    is no setting; ``mark`` is a grade or status that colours the cell, by default its text.
    """

    title: str
    text: Callable[[T], str]
    sort: Callable[[T], float | str | None]
    help: str
    number: bool = True
    metric: Metric | None = None
    is_result: bool = False
    mark: Callable[[T], str] | None = None

    @property
    def is_number(self) -> bool:
        return self.number

    def format_cell(self, item: T) -> str:
        return self.text(item)

    def sort_key(self, item: T) -> float | str | None:
        return self.sort(item)

    def of(self, item_of: Callable[[U], T]) -> "Column[U]":
        return Column(
            self.title,
            lambda item: self.text(item_of(item)),
            lambda item: self.sort(item_of(item)),
            self.help,
            number=self.number,
            metric=self.metric,
            is_result=self.is_result,
        )


def words(title: str, text: Callable[[T], str], help_text: str) -> Column[T]:
    return Column(title, text, text, help_text, number=False)


def number(
    title: str,
    value: Callable[[T], float | None],
    text: Callable[[float | None], str],
    help_text: str,
) -> Column[T]:
    return Column(title, lambda item: text(value(item)), value, help_text)


def measurement(
    title: str,
    metric: Callable[[T], MetricValue | None],
    help_text: str,
    items: Iterable[T] = (),
    *,
    shown: Callable[[float | None], str] | None = None,
) -> Column[T]:
    """Return a column of values with their intervals, of differences and factors as ``shown``.

    The title says it where those of all items are within a repetition; beside intervals between repetitions they are
    left out.
    """
    intervals = [found for item in items if (found := metric(item)) and found.low is not None]
    is_told = bool(intervals) and all(found.is_within_repetition for found in intervals)

    def value(item: T) -> float | None:
        found = metric(item)
        return found.value if found else None

    def text(item: T) -> str:
        found = metric(item)
        if found and found.is_within_repetition and intervals and not is_told:
            return f"{shown(found.value) if shown else format_quantity(found.value, found.unit)} (one repetition)"
        whole = format_difference(found, shown) if shown else format_measurement(found)
        return (
            f"{whole} {WITHIN_REPETITION}"
            if found and found.is_within_repetition and not is_told
            else whole
        )

    return Column(
        f"{title}, {WITHIN_REPETITION}" if is_told else title,
        text,
        value,
        help_text,
        is_result=True,
    )


def known(columns: Iterable[Column[T]], rows: Iterable[T]) -> tuple[Column[T], ...]:
    rows = list(rows)
    return tuple(
        column for column in columns if any(column.sort_key(row) is not None for row in rows)
    )


def hoisted(columns: Sequence[Column[T]], rows: Sequence[T]) -> tuple[str, tuple[Column[T], ...]]:
    """Return what all rows have alike as a sentence, empty if nothing, and the columns left to a table.

    The first column stays, for it names rows, and so do results: that they are alike is chance.
    """
    kept, alike = list(columns[:1]), []
    for column in columns[1:]:
        texts = {column.format_cell(row) for row in rows}
        if len(rows) < 2 or len(texts) > 1 or column.is_result:
            kept.append(column)
        elif (text := texts.pop()) != UNKNOWN:
            alike.append(f"{column.title} {text}")
    return f"All rows: {'; '.join(alike)}." if alike else "", tuple(kept)


@dataclass(frozen=True, kw_only=True)
class Table(Generic[T]):
    """A table and the figures of the same numbers, drawn when a renderer asks for them; ``id`` is its anchor."""

    id: str
    title: str
    caption: str
    columns: tuple[Column[T], ...]
    rows: tuple[T, ...]
    notes: tuple[str, ...] = ()
    figures: Callable[[], Iterable[Chart]] = tuple
    where: Where = "everywhere"

    @property
    def constant(self) -> str:
        return hoisted(self.columns, self.rows)[0]

    @property
    def varying(self) -> tuple[Column[T], ...]:
        return hoisted(self.columns, self.rows)[1]


@dataclass(frozen=True, kw_only=True)
class Term:
    """A word of the field with what it means here, its formula in it."""

    name: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """Tables that belong together under one heading, the terms that their columns use, and sentences of their own."""

    id: str
    title: str
    tables: tuple[Table[Any], ...]
    terms: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def on_page(self) -> tuple[Table[Any], ...]:
        return tuple(table for table in self.tables if table.where != "terminal")


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that is said of a run or of several: what renderers print.

    ``runs`` are what CSV and JSON hold; ``heading`` says what was run, of several in what they differ. ``tiles`` are
    the numbers to see first where no run's front page has them. ``emulated`` and ``claims`` are what the runs cannot
    show. From ``overview`` on, it is what only one run has; ``figures`` are the first screen's.
    """

    name: str
    verdicts: tuple[Verdict, ...]
    code: int
    runs: tuple[RunData, ...]
    sections: tuple[Section | tables.Section, ...]
    emulated: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    heading: str = ""
    tiles: tuple[tuple[str, str], ...] = ()
    overview: Overview | None = None
    figures: Callable[[], Iterable[Chart]] = tuple
    warnings: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    findings: tuple[Finding, ...] = ()
    comparisons: tuple[str, ...] = ()
    not_measured: tuple[Problem, ...] = ()
    environment: tuple[Fact, ...] = ()
    footnotes: tuple[str, ...] = ()

    @property
    def charts(self) -> tuple[Chart, ...]:
        """All figures of the page in order."""
        on_page = (table for section in self.sections for table in section.on_page)
        of_tables = (chart for table in on_page for chart in list_table_charts(table))
        return (*self.figures(), *of_tables)


def report_of_document(document: tables.Document) -> Report:
    """Return the report of a plan, which has no runs."""
    if document.problem:
        verdict = Verdict(word="TOO LARGE", level="bad", message=document.problem)
    elif document.is_prediction:
        message = "every number follows from formulas and declared rates, nothing was measured"
        verdict = Verdict(word="PREDICTED", level="good", message=message)
    else:
        message = "the tables are quoted from the sources, nothing was predicted or measured"
        verdict = Verdict(word="PUBLISHED", level="good", message=message)
    return Report(
        name=document.name,
        verdicts=(verdict,),
        code=0,
        runs=(),
        sections=tuple(document.sections),
        heading=document.heading,
        tiles=tuple(document.tiles),
    )


PROBLEM_COLUMNS: tuple[Column[Problem], ...] = (
    words("case", lambda one: one.case, "what ran"),
    words("status", lambda one: one.status, "what became of it"),
    words("repetitions", lambda one: one.repetitions, "in how many repetitions, of those planned"),
    words("reason", lambda one: one.reason, "why, with the ranks and their hosts"),
)


def list_terms(section: Section | tables.Section) -> tuple[Term, ...]:
    """Return the terms of a section, then the formulas of the metrics that its columns show."""
    metrics = {}
    for table in section.on_page:
        for column in table.columns:
            metric = column.metric
            if metric and metric.formula and metric.name not in section.terms:
                metrics[metric.name] = metric
    return (*terms(section.terms), *map(_term_of, metrics.values()))


def terms(names: Iterable[str]) -> tuple[Term, ...]:
    return tuple(Term(name=name, text=_TERMS[name]) for name in dict.fromkeys(names))


def _term_of(metric: Metric) -> Term:
    name = (
        metric.title
        if metric.name.replace("_", " ") == metric.title
        else f"{metric.title} ({metric.name})"
    )
    return Term(name=name, text=f"{metric.help[0].upper()}{metric.help[1:]} ({metric.formula}).")


_TERMS = {
    "sample": "One iteration's duration on the slowest rank: an operation is done when its last rank is.",
    "repetition": (
        "One start of all ranks with new process groups. What differs between repetitions is not seen within one, so "
        "intervals over several repetitions are the ones to compare by."
    ),
    "interval": (
        "[low, high] covers the true median in 95 % of such runs if repetitions are alike. Of one repetition it is "
        "within this repetition: it says how well this repetition knows its own median, and nothing of how far "
        "another would be off."
    ),
    "n_eff": (
        "Iterations one after another resemble each other, so that they tell less than their number: n_eff independent "
        "ones would know the median as well, by how visits differ. Unknown of what was visited once."
    ),
    "noise": (
        "How far a repetition usually is off: the standard deviation of the logarithms of the repetitions' medians, "
        "without the bias of few. Stable below 5 %, fair below 15 %, noisy below 40 %, else very noisy. Of one "
        "repetition it is within this repetition: the interquartile range of its iterations over their median."
    ),
    "blocking, pipelined": (
        "One operation at a time from a barrier (how long does one take?), or many back to back (how much goes "
        "through?). They are different series."
    ),
    "busbw": (
        "Bus bandwidth: algbw x nccl-tests' factor for what the links carry on n ranks: "
        f"{describe_busbw_factors()}. So it can be "
        "held against a link's speed. The factor assumes point-to-point links: reduction in the network can read "
        "higher."
    ),
    "fit": (
        "The line of time over size that explains an operation: latency + size / bandwidth. More than one line where "
        "the times ask for it. n_1/2 = latency x bandwidth is the size that takes twice the latency, and so reaches "
        "half the bandwidth."
    ),
    "breakpoint": (
        "The size at which another line begins, as where a protocol switches: where the lines cross if they do so "
        "between two measured sizes, else the geometric middle of those two."
    ),
    "outliers": (
        "Sizes further than 20 % and four times the usual scatter from the fit. They are shown, and hardly weigh in it."
    ),
    "slow-down": "Time under load over time without load, paired by repetition. 1 is as fast.",
    "late": (
        "A rank's lateness = its arrival - the first's. Late names the rank that most often arrives last and its share "
        "of iterations; unknown where the clock's uncertainty exceeds the skew."
    ),
    "parts of a step": (
        "compute + exposed communication + copy + idle + residual = wall time of a traced step; the rest of "
        "communication is hidden behind computation."
    ),
    "idle: schedule, imbalance, p2p, rest": "Differences of simulations that add up to the measured idle time.",
    "phases": (
        "Forward, backward and update as the step itself names them, on the host's clock; communication lasts from its "
        "issue to its end, so it may begin before its peers have come."
    ),
    "F, B, I, W": (
        "Forward; the whole backward; its input gradient and its weight gradient, where a schedule parts them. A "
        "microbatch is in flight on a rank from its forward until the end of its backward."
    ),
    "parallel efficiency": (
        "Speed-up relative to the smallest number of ranks or nodes, divided by the ideal speed-up. The speed-up is "
        "the ratio of rates: tokens per second of a step, bus bandwidth of communication. Ideally the rate of a step "
        "grows as the number, and bus bandwidth stays constant."
    ),
    "ratio": (
        "Time relative to the first run. Its 95 % interval is that of Welch's t-test on the logarithms of the "
        "repetitions, which needs three of each run. parbench compare reports which changes are significant."
    ),
}
