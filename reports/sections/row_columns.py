"""The columns that tables of rows share: what a row is, how long it took, and its quality."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from parbench.bench.results import metrics
from parbench.bench.results.formatting import (
    UNKNOWN,
    format_bytes,
    format_case_size,
    format_count,
    format_gigabytes,
    format_number,
    format_percent,
    format_seconds,
    format_word_counts,
    make_formatter,
)
from parbench.bench.results.metrics import find_metric
from parbench.bench.results.stats import WITHIN_REPETITION
from parbench.reports.analysis.labels import operation, short_labels
from parbench.reports.analysis.summary import Row
from parbench.reports.report import Column, known, measurement, number, words

_TEXTS = {"s": format_seconds, "B": format_bytes, "B/s": format_gigabytes, "": format_percent}
IDENTITY = ("operation", "mode", "dtype", "size")


def communication_columns(rows: Sequence[Row]) -> tuple[Column[Row], ...]:
    return (
        words(
            "operation",
            lambda row: operation(row.case),
            "what is done; its parameters where it has any",
        ),
        *case_columns(),
        headline("time", rows),
        metric_column("algbw"),
        metric_column("busbw"),
        *quality_columns(rows),
    )


def size_columns(rows: Sequence[Row]) -> tuple[Column[Row], ...]:
    """Return the columns of one operation over its sizes."""
    [*_, size] = case_columns()
    variation: Column[Row] = number(
        "variation", lambda row: row.variation, format_percent, "how far the repetitions differ"
    )
    repetitions: Column[Row] = Column(
        "repetitions",
        lambda row: f"{row.repetitions}/{row.planned}",
        lambda row: row.repetitions,
        "repetitions that measured the case, of those planned",
    )
    return (
        size,
        headline("time", rows),
        metric_column("algbw"),
        metric_column("busbw"),
        *known([replace(variation, is_result=True)], rows),
        repetitions,
    )


def case_columns() -> tuple[Column[Row], ...]:
    size_help = "total bytes as nccl-tests counts them, 1024-based"
    return (
        words("mode", lambda row: _param(row, "mode"), "blocking or pipelined"),
        words("dtype", lambda row: _param(row, "dtype"), "element type"),
        Column(
            "size",
            lambda row: format_case_size(row.size_bytes),
            lambda row: row.size_bytes,
            size_help,
        ),
    )


def _param(row: Row, name: str) -> str:
    return str(row.case.params.get(name, UNKNOWN))


def step_column(rows: Sequence[Row]) -> Column[Row]:
    """Return the column of names; how a step is called depends on what it must be told apart from."""
    labels = short_labels(rows)
    return words(
        "step",
        lambda row: labels[row.case.id],
        "the step, with the parameters in which steps differ",
    )


def metric_column(
    name: str,
    value: Callable[[Row], float | None] | None = None,
    title: str | None = None,
    rows: Sequence[Row] = (),
) -> Column[Row]:
    """Return the column of a declared metric, of what ``value`` makes of it where that is given."""
    metric = find_metric(name)
    assert metric is not None, f"metric {name} is not declared"
    own = metric.specialize(name) or metric
    text: Any = (
        make_formatter(metric.number_format)
        if metric.number_format
        else _TEXTS.get(metric.unit, format_number)
    )
    told = number(title or own.title, value or (lambda row: row.value(name)), text, own.help)
    if own.kind in ("difference", "factor", "excess") and value is None:
        told = measurement(
            told.title, lambda row: row.metrics.get(name), own.help, rows, shown=text
        )
    return replace(told, metric=None if title else metric, is_result=True)


def metric_columns(table: str, rows: Sequence[Row]) -> tuple[Column[Row], ...]:
    """Return the columns that metrics are declared to have in a table, those that say something of any row."""
    names = dict.fromkeys(name for row in rows for name in row.metrics)
    found = (
        metric_column(name, rows=rows)
        for metric in metrics.METRICS
        if table in metric.tables
        for name in names
        if metric.specialize(name)
    )
    return known(found, rows)


def headline(name: str, rows: Sequence[Row]) -> Column[Row]:
    metric = metric_column(name)
    return measurement(metric.title, lambda row: row.metrics.get(row.headline), metric.help, rows)


def quality_columns(rows: Sequence[Row]) -> tuple[Column[Row], ...]:
    graded = [row for row in rows if row.noise]
    is_told = bool(graded) and all(row.variation is None for row in graded)

    def noise(row: Row) -> str:
        within = "" if is_told or row.variation is not None else f" {WITHIN_REPETITION}"
        return f"{row.noise}{within}" if row.noise else UNKNOWN

    noise_title = f"noise{' (one repetition)' * is_told}"
    told = "independent iterations that would tell as much"
    noise_help = f"how far repetitions scatter, of one repetition {WITHIN_REPETITION}: stable, fair, noisy, very noisy"
    return (
        metric_column("time_p99", lambda row: row.value(f"{row.headline}_p99")),
        *known([metric_column("time_q10", lambda row: row.value(f"{row.headline}_q10"))], rows),
        replace(words(noise_title, noise, noise_help), mark=lambda row: row.noise or ""),
        number(
            "n", lambda row: row.iterations or None, format_count, "iterations of all repetitions"
        ),
        *known([number("n_eff", lambda row: row.num_effective, format_count, told)], rows),
        Column(
            "repetitions",
            lambda row: f"{row.repetitions}/{row.planned}",
            lambda row: row.repetitions,
            "repetitions that measured the case, of those planned",
        ),
        words(
            "stop", lambda row: format_word_counts(row.stops), "why measuring ended, by repetition"
        ),
        words("check", _check_word, "whether results equal the reference"),
    )


def _check_word(row: Row) -> str:
    if row.check.passed is None:
        return "unchecked"
    if row.check.passed:
        return "ok"
    return "wrong" if row.check.wrong is None else f"{row.check.wrong} wrong"
