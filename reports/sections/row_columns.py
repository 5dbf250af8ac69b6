"""The columns that tables of rows share: what a row is, how long it took, and how far to trust it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from bench.results import metrics
from bench.results.metrics import declared
from bench.results.stats import WITHIN_LAUNCH
from reports import cells
from reports.analysis.labels import operation, short_labels
from reports.analysis.summary import Row
from reports.report import Column, known, measurement, number, words

_TEXTS = {"s": cells.duration, "B": cells.num_bytes, "B/s": cells.gigabytes, "": cells.percent}
IDENTITY = ("operation", "mode", "dtype", "size")


def communication_columns(rows: Sequence[Row]) -> tuple[Column[Row], ...]:
    """Return the columns of collectives and point-to-point operations; what tells rows apart is never dropped."""
    alike = {name: len({row.case.params.get(name) for row in rows}) < 2 for name in ("mode", "dtype")}
    return (
        words("operation", lambda row: operation(row.case), "what is done; its parameters where it has any"),
        *case_columns(2 * alike["mode"], 3 * alike["dtype"]),
        headline("time", rows),
        metric_column("algbw", 9),
        metric_column("busbw"),
        *quality_columns(rows),
    )


def case_columns(mode_drop: int = 0, dtype_drop: int = 0) -> tuple[Column[Row], ...]:
    def size(row: Row) -> int | None:
        found = row.case.params.get("size_bytes")
        return found if isinstance(found, int) else None

    return (
        words("mode", lambda row: _param(row, "mode"), "blocking or pipelined", mode_drop),
        words("dtype", lambda row: _param(row, "dtype"), "element type", dtype_drop),
        Column("size", lambda row: cells.size(size(row)), size, "total bytes as nccl-tests counts them, 1024-based"),
    )


def _param(row: Row, name: str) -> str:
    return str(row.case.params.get(name, cells.UNKNOWN))


def step_column(rows: Sequence[Row]) -> Column[Row]:
    """Return the column of names; how a step is called depends on what it must be told apart from."""
    labels = short_labels(rows)
    return words("step", lambda row: labels[row.case.id], "the step, with the parameters in which steps differ")


def metric_column(
    name: str,
    drop: int = 0,
    value: Callable[[Row], float | None] | None = None,
    title: str | None = None,
    rows: Sequence[Row] = (),
) -> Column[Row]:
    """Return the column of a declared metric, of what ``value`` makes of it where that is given."""
    metric = declared(name)
    assert metric is not None, f"metric {name} is not declared"
    own = metric.of(name) or metric
    text: Any = cells.formatted(metric.shown) if metric.shown else _TEXTS.get(metric.unit, cells.significant)
    told = number(title or own.title, value or (lambda row: row.value(name)), text, own.help, drop)
    if own.kind in ("difference", "factor", "excess") and value is None:
        told = measurement(told.title, lambda row: row.metrics.get(name), own.help, rows, shown=text, drop=drop)
    return told if title else replace(told, metric=metric)


def metric_columns(table: str, rows: Sequence[Row]) -> tuple[Column[Row], ...]:
    """Return the columns that metrics are declared to have in a table, those that say something of any row."""
    names = dict.fromkeys(name for row in rows for name in row.metrics)
    found = (
        metric_column(name, metric.tables[table], rows=rows)
        for metric in metrics.METRICS
        if table in metric.tables
        for name in names
        if metric.of(name)
    )
    return known(found, rows)


def headline(name: str, rows: Sequence[Row]) -> Column[Row]:
    metric = metric_column(name)
    return measurement(metric.title, lambda row: row.metrics.get(row.headline), metric.help, rows)


def quality_columns(rows: Sequence[Row]) -> tuple[Column[Row], ...]:
    graded = [row for row in rows if row.grade]
    is_told = bool(graded) and all(row.scatter is None for row in graded)

    def noise(row: Row) -> str:
        within = "" if is_told or row.scatter is not None else f" {WITHIN_LAUNCH}"
        return f"{row.grade}{within}" if row.grade else cells.UNKNOWN

    told = "independent iterations that would tell as much"
    noise_help = f"how far launches scatter, of one launch {WITHIN_LAUNCH}: stable, fair, noisy, very noisy"
    return (
        metric_column("time_p99", 4, lambda row: row.value(f"{row.headline}_p99")),
        *known([metric_column("time_q10", 9, lambda row: row.value(f"{row.headline}_q10"))], rows),
        words("noise within" if is_told else "noise", noise, noise_help, 1),
        number("n", lambda row: row.iterations or None, cells.whole, "iterations of all launches", 7),
        *known([number("n_eff", lambda row: row.effective, cells.whole, told, 9)], rows),
        Column(
            "launches",
            lambda row: f"{row.launches}/{row.planned}",
            lambda row: row.launches,
            "launches that measured the case, of those planned",
            drop=5,
        ),
        words("stop", lambda row: cells.counted(row.stops), "why measuring ended, by launch", 8),
        words("check", _check_word, "whether results equal the reference", 6),
    )


def _check_word(row: Row) -> str:
    if row.check.passed is None:
        return "unchecked"
    if row.check.passed:
        return "ok"
    return "wrong" if row.check.wrong is None else f"{row.check.wrong} wrong"
