"""The report on a comparison of the runs BASE and NEW, with tables, and its figure."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from parbench.bench.results.formatting import UNKNOWN
from parbench.bench.results.limits import read_limits
from parbench.bench.results.runs import Run
from parbench.bench.results.tables import Column, Row, SortedText, Table
from parbench.bench.text import UserError
from parbench.reports.compare.compare import RunComparison, compare
from parbench.reports.compare.junit import render_junit
from parbench.reports.compare.pool import describe_world
from parbench.reports.compare.rendering import VerdictReport, render
from parbench.reports.compare.rule import Rule
from parbench.reports.compare.thresholds import find_thresholds
from parbench.reports.compare.verdicts import Verdict, format_verdicts, rank_verdict
from parbench.reports.compare.wording import (
    explain_comparison,
    format_effect,
    summarize_comparison,
)
from parbench.reports.figures.primitives import IntervalRow
from parbench.reports.limits import check_limits
from parbench.reports.run_data import RunData

HUES = {Verdict.SLOWER: "red", Verdict.FASTER: "green", Verdict.NO_CHANGE: "grey"}
"""The color of a series in the figure by its verdict. Other verdicts are blue."""
COUNT_COLUMNS = (
    Column("case"),
    Column("verdict", is_result=True),
    Column(
        "change",
        is_result=True,
        help="Calls and bytes of one rank and step, as a mean over ranks. Memory is the maximum.",
    ),
)
"""The columns of the table of changed counts."""
TIME_COLUMNS = (
    Column("case"),
    Column("world", "ranks"),
    Column("verdict", is_result=True),
    Column(
        "change",
        kind="percent",
        is_result=True,
        help="Change of the time with its 95 % confidence interval. + is slower.",
    ),
    Column(
        "p_value",
        "p",
        kind="number",
        number_format="{:.2g}",
        help="Two-sided p-value for a change of at most the threshold.",
    ),
    Column("min_effect", "threshold", kind="percent", help="Smaller changes are ignored."),
    Column(
        "detectable",
        kind="percent",
        help="Minimum detectable effect at 80 % power, after correction for all series.",
    ),
    Column("base_seconds", "BASE", kind="s"),
    Column("new_seconds", "NEW", kind="s"),
    Column("reason", is_result=True),
)
"""The columns of the table of times, with one row per series."""
ENVIRONMENT_COLUMNS = (
    Column("path", "value"),
    Column("base", "BASE", is_result=True),
    Column("new", "NEW", is_result=True),
    Column(
        "blocks",
        "blocks comparison",
        is_result=True,
        help="Times are not compared if a difference blocks.",
    ),
)
"""The columns of the table of differences between environments."""


def compare_runs(
    base_run: Run,
    new_run: Run,
    *,
    min_effect: str | None = None,
    across: Sequence[str] = (),
    form: str = "tables",
    fail_on_undecided: bool = False,
    limits: Path | None = None,
    figure: Path | None = None,
) -> tuple[str, int]:
    """Compare the runs BASE and NEW, and return the report as text and the exit code.

    The arguments are the options of ``parbench compare``.

    Args:
        base_run: the run BASE.
        new_run: the run NEW.
        min_effect: a percentage or a file of thresholds. None stands for the default file.
        across: globs for the names of counts and environment values whose differences are
            intentional.
        form: ``tables``, ``markdown``, ``json`` or ``junit``.
        fail_on_undecided: True if verdicts such as UNDECIDED cause exit code 3.
        limits: a file of limits that the metrics of NEW must meet, None for no limits.
        figure: the file to which the changes of times are drawn, None for no figure.

    Raises ``UserError`` if both runs are the same or have no series in common.
    """
    if base_run.path.resolve() == new_run.path.resolve():
        raise UserError(f"BASE and NEW are the same run, {base_run.path}. Name two runs")
    new = RunData(new_run)
    fraction, thresholds = find_thresholds(min_effect)
    comparison = compare(RunData(base_run), new, Rule(min_effect=fraction), across, thresholds)
    if limits is not None:
        results = check_limits(new, read_limits(limits, new.plan.cases))
        comparison = replace(comparison, limits=results)
    code = comparison.get_exit_code(fail_on_undecided=fail_on_undecided)
    if figure is not None:
        draw_effects(comparison, figure)
    return render_comparison(comparison, form, code), code


def render_comparison(comparison: RunComparison, form: str, code: int) -> str:
    """Return the report on a comparison as text.

    ``form`` is ``tables``, ``markdown``, ``json`` or ``junit``. ``code`` is the exit code of the
    command, which the JSON contains.
    """
    if form == "junit":
        return render_junit(comparison)
    return render(build_report(comparison, code), form)


def build_report(comparison: RunComparison, code: int = 0) -> VerdictReport:
    """Return the report on a comparison, with tables of counts, times and environments.

    Tables without rows are left out. ``code`` is the exit code of the command, which the JSON
    contains.
    """
    tables = (
        Table(
            id="counts",
            title="Changed counts",
            columns=COUNT_COLUMNS,
            rows=_build_count_rows(comparison),
        ),
        Table(id="times", title="Times", columns=TIME_COLUMNS, rows=_build_time_rows(comparison)),
        Table(
            id="environment",
            title="Environment differences",
            columns=ENVIRONMENT_COLUMNS,
            rows=[
                {
                    "path": change.path,
                    "base": change.base,
                    "new": change.new,
                    "blocks": "yes" if change.is_blocking else "no",
                }
                for change in comparison.environment_changes
            ],
        ),
    )
    return VerdictReport(
        title=f"Verdict: {format_verdicts(comparison.verdicts)}",
        summary=summarize_comparison(comparison),
        tables=[table for table in tables if table.rows],
        explanations=explain_comparison(comparison),
        content={
            "exit_code": code,
            "verdicts": comparison.verdicts,
            "rule": comparison.rule,
            "base": comparison.base.run.info.id,
            "new": comparison.new.run.info.id,
            "series": comparison.series,
            "limits": comparison.limits,
            "environment": comparison.environment_changes,
        },
    )


def _build_count_rows(comparison: RunComparison) -> list[Row]:
    """Return a row for each changed count of calls, bytes or memory, keyed by column.

    The worst verdict comes first, and intended changes last.
    """
    return [
        {
            "case": series.label,
            "verdict": f"{change.verdict} (intended)" if change.is_intended else change.verdict,
            "change": change.message,
        }
        for series, change in comparison.count_changes
    ]


def _build_time_rows(comparison: RunComparison) -> list[Row]:
    """Return a row for each case, keyed by column, the worst verdict first.

    Cases with the same verdict are in the order of the plan.
    """
    rows: list[Row] = []
    for series in comparison.series:
        effect = series.effect
        row: dict[str, Any] = {
            "case": series.label,
            "world": describe_world(series.world),
            "verdict": series.verdict,
            "base_seconds": series.times.base_seconds,
            "new_seconds": series.times.new_seconds,
            "reason": series.reason or UNKNOWN,
        }
        if effect:
            row["change"] = SortedText(format_effect(effect), effect.change)
            row["p_value"] = effect.p_value
            row["min_effect"] = series.times.min_effect
            row["detectable"] = effect.detectable
        rows.append(row)
    return sorted(rows, key=lambda row: rank_verdict(row["verdict"]))


def draw_effects(comparison: RunComparison, file: Path) -> None:
    """Draw the change of the time of each case with its 95 % interval to a file.

    Raises ``UserError`` if no case has an interval.
    """
    from parbench.reports.figures.changes import chart_effects
    from parbench.reports.figures.svg import save_chart

    rows = []
    for series in comparison.series:
        effect = series.effect
        if effect and effect.low is not None and effect.high is not None:
            rows.append(
                IntervalRow(
                    label=f"{series.label}: {series.verdict}",
                    interval=(effect.change, effect.low, effect.high),
                    hue=HUES.get(series.verdict, "blue"),
                )
            )
    chart = chart_effects(rows, comparison.rule.min_effect)
    if chart is None:
        raise UserError("no figure: no series has three repetitions in both runs")
    save_chart(chart, file)
