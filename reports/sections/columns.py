"""The columns of the result tables, as data: the terminal and the page show the same ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Generic, TypeVar

from bench.results import metrics
from bench.results.fit import Fit, Segment
from bench.results.metrics import Metric, MetricValue, declared
from reports import cells
from reports.analysis.fits import Curve
from reports.analysis.interference import Pairs, Slowed, loads
from reports.analysis.labels import operation, short_labels
from reports.analysis.summary import Row
from reports.analysis.timelines import Busy, stream_words

T = TypeVar("T")
_TEXTS = {"s": cells.duration, "B": cells.num_bytes, "B/s": cells.gigabytes, "": cells.percent}
_IDENTITY = ("operation", "mode", "dtype", "size")


@dataclass(frozen=True, kw_only=True)
class Column(Generic[T]):
    """A column: its cells as text, what to sort them by (None is unknown and goes last), and when to drop it.

    ``metric`` is the declared one that it shows. A terminal too narrow for all columns drops those with the highest
    ``drop`` first, 0 never.
    """

    title: str
    text: Callable[[T], str]
    sort: Callable[[T], float | str | None]
    help: str
    number: bool = True
    drop: int = 0
    metric: Metric | None = None


def communication_columns(rows: Sequence[Row]) -> tuple[Column[Row], ...]:
    """Return the columns of collectives and point-to-point operations; what tells rows apart is never dropped."""
    alike = {name: len({row.case.params.get(name) for row in rows}) < 2 for name in ("mode", "dtype")}
    return (
        words("operation", lambda row: operation(row.case), "what is done; its parameters where it has any"),
        *mode_columns(lambda row: row, 2 * alike["mode"], 3 * alike["dtype"]),
        size_column(lambda row: row),
        headline("time"),
        metric_column("algbw", 9),
        metric_column("busbw"),
        *quality(),
    )


def fit_columns(curves: Sequence[Curve]) -> tuple[Column[Curve], ...]:
    """Return the columns of fits: those of ranks, lines and efficiency only where they say something."""
    firsts = [curve.rows[0] for curve in curves]
    columns = communication_columns(firsts)
    identity: list[Column[Curve]] = [
        lifted(column, lambda curve: curve.rows[0]) for column in columns if column.title in _IDENTITY[:3]
    ]
    ranks = words("ranks", _ranks, "ranks, and over how many nodes")
    efficient = any(curve.efficiency is not None for curve in curves)
    return (
        *identity,
        *((ranks,) if len({row.world for row in firsts}) > 1 else ()),
        *_fitted(curves),
        *((_efficiency(curves),) if efficient else ()),
        *((_lines(),) if any(curve.fit.knees for curve in curves) else ()),
    )


def slowed_columns(slowed: Sequence[Slowed], prefix: str) -> tuple[Column[Slowed], ...]:
    """Return the columns of rows and what slows them, a column for each load, its title after ``prefix``."""
    bases = [one.base for one in slowed]
    factor_help = "how many times as long it takes, with its 95 % interval"
    identity = [column for column in communication_columns(bases) if column.title in _IDENTITY]
    return (
        *(lifted(column, lambda one: one.base) for column in identity),
        lifted(headline("time"), lambda one: one.base),
        *(measurement(f"{prefix}{load}", partial(_factor, load), factor_help) for load in loads(slowed)),
    )


def pair_columns(pairs: Pairs) -> tuple[Column[int], ...]:
    """Return the columns of a rank-by-rank matrix: the sender, then each receiver with the bus bandwidth to it."""
    return (
        Column(title="from \\ to", text=str, sort=float, help="the rank that sends, and those that receive"),
        *(_receiver(pairs, target) for target in pairs.ranks),
    )


def words(title: str, text: Callable[[T], str], help_text: str, drop: int = 0) -> Column[T]:
    """Return a column of text, sorted as text."""
    return Column(title=title, text=text, sort=text, help=help_text, number=False, drop=drop)


def figure(
    title: str, value: Callable[[T], float | None], text: Callable[[float | None], str], help_text: str, drop: int = 0
) -> Column[T]:
    """Return a column of numbers, sorted as numbers."""
    return Column(title=title, text=lambda item: text(value(item)), sort=value, help=help_text, drop=drop)


def measurement(title: str, metric: Callable[[T], MetricValue | None], help_text: str, drop: int = 0) -> Column[T]:
    """Return a column of numbers with their intervals."""

    def value(item: T) -> float | None:
        found = metric(item)
        return found.value if found else None

    return Column(title=title, text=lambda item: cells.measured(metric(item)), sort=value, help=help_text, drop=drop)


def mode_columns(row_of: Callable[[T], Row], mode_drop: int = 0, dtype_drop: int = 0) -> tuple[Column[T], ...]:
    """Return the columns of an operation's mode and element type."""
    return (
        words("mode", lambda item: _param(row_of(item), "mode"), "blocking or pipelined", drop=mode_drop),
        words("dtype", lambda item: _param(row_of(item), "dtype"), "element type", drop=dtype_drop),
    )


def size_column(row_of: Callable[[T], Row]) -> Column[T]:
    """Return the column of an operation's size."""

    def size(item: T) -> int | None:
        found = row_of(item).case.params.get("size_bytes")
        return found if isinstance(found, int) else None

    help_text = "total bytes as nccl-tests counts them, 1024-based"
    return Column(title="size", text=lambda item: cells.size(size(item)), sort=size, help=help_text)


def known(columns: Sequence[Column[T]], rows: Sequence[T]) -> tuple[Column[T], ...]:
    """Return the columns that say something of any row."""
    return tuple(column for column in columns if any(column.sort(row) is not None for row in rows))


def metric_column(
    name: str, drop: int = 0, value: Callable[[Row], float | None] | None = None, title: str | None = None
) -> Column[Row]:
    """Return the column of a declared metric, of what ``value`` makes of it where that is given."""
    metric = declared(name)
    assert metric is not None, f"metric {name} is not declared"
    own = metric.of(name) or metric
    value = value or (lambda row: row.value(name))
    text = cells.formatted(metric.shown) if metric.shown else _TEXTS.get(metric.unit, cells.significant)
    told = figure(title or own.title, value, text, own.help, drop)
    return told if title else replace(told, metric=metric)


def metric_columns(table: str, rows: Sequence[Row]) -> tuple[Column[Row], ...]:
    """Return the columns that metrics are declared to have in a table, those that say something of any row."""
    names = dict.fromkeys(name for row in rows for name in row.metrics)
    found = [
        metric_column(name, metric.tables[table])
        for metric in metrics.METRICS
        if table in metric.tables
        for name in names
        if metric.of(name)
    ]
    return known(found, rows)


def headline(name: str) -> Column[Row]:
    """Return the column of how long a row took, with its interval."""
    metric = metric_column(name)
    return measurement(metric.title, lambda row: row.metrics.get(row.headline), metric.help)


def lifted(column: Column[Row], row_of: Callable[[T], Row]) -> Column[T]:
    """Return a column of rows as one of what has such a row."""
    return Column(
        title=column.title,
        text=lambda item: column.text(row_of(item)),
        sort=lambda item: column.sort(row_of(item)),
        help=column.help,
        number=column.number,
        drop=column.drop,
        metric=column.metric,
    )


def quality() -> tuple[Column[Row], ...]:
    """Return the columns that say how far a row is to be trusted."""
    noise_help = "the worst launch's scatter: stable, fair, noisy, very noisy"
    return (
        metric_column("time_p99", 4, lambda row: row.value(f"{row.headline}_p99")),
        words("noise", lambda row: row.grade or cells.UNKNOWN, noise_help, drop=1),
        figure("n", lambda row: row.iterations or None, cells.whole, "iterations of all launches", 7),
        Column(
            title="launches",
            text=lambda row: f"{row.launches}/{row.planned}",
            sort=lambda row: row.launches,
            help="launches that measured the case, of those planned",
            drop=5,
        ),
        words("stop", lambda row: cells.counted(row.stops), "why measuring ended, by launch", drop=8),
        words("check", check_word, "whether results equal the reference", drop=6),
    )


def _receiver(pairs: Pairs, target: int) -> Column[int]:
    help_text = f"bus bandwidth to rank {target} in 1e9 B/s"
    return figure(str(target), lambda source: pairs.rate(source, target), cells.gigabytes, help_text)


def _factor(load: str, one: Slowed) -> MetricValue | None:
    return one.factors.get(load)


def check_word(row: Row) -> str:
    """Say in a word whether the row's results were right."""
    if row.check.passed is None:
        return "unchecked"
    if row.check.passed:
        return "ok"
    return "wrong" if row.check.wrong is None else f"{row.check.wrong} wrong"


def _param(row: Row, name: str) -> str:
    return str(row.case.params.get(name, cells.UNKNOWN))


def _fitted(curves: Sequence[Curve]) -> tuple[Column[Curve], ...]:
    """Return the columns of what a fit found and how well it explains the times; those without news go early."""
    knee_drop = 1 if any(curve.fit.knees for curve in curves) else 8
    off_drop = 3 if any(curve.fit.off_curve for curve in curves) else 7
    half_help = "the size at which half the bandwidth is reached: latency times bandwidth, by the line of the largest"
    off_help = "sizes whose times the fit does not explain"
    return (
        measurement(
            "latency",
            lambda curve: _latency(curve.fit.segments[0]),
            "the time of an empty message, by the line of the smallest sizes, with its 95 % interval",
        ),
        _fitted_bandwidth("algbw", lambda curve: 1.0),
        _fitted_bandwidth("busbw", lambda curve: curve.busbw_factor),
        figure("n_1/2", lambda curve: curve.fit.half_bandwidth_bytes, cells.num_bytes, half_help, 5),
        Column(
            title="knee",
            text=lambda curve: _knees(curve.fit),
            sort=lambda curve: curve.fit.knees[0] if curve.fit.knees else None,
            help="the size at which another line begins, as where a protocol switches, and the sizes it lies between",
            drop=knee_drop,
        ),
        words("off the curve", lambda curve: _off_curve(curve.fit), off_help, off_drop),
        figure("residual", lambda curve: curve.fit.residual, cells.percent, "median distance of times from the fit", 4),
    )


def _fitted_bandwidth(name: str, factor: Callable[[Curve], float | None]) -> Column[Curve]:
    def scaled(curve: Curve, bytes_per_second: float | None) -> float | None:
        times = factor(curve)
        return None if bytes_per_second is None or times is None else bytes_per_second * times

    def text(curve: Curve) -> str:
        last = curve.fit.segments[-1]
        value, low, high = (
            cells.gigabytes(scaled(curve, bound))
            for bound in (last.bytes_per_second, last.bytes_per_second_low, last.bytes_per_second_high)
        )
        return value if value == cells.UNKNOWN else f"{value} [{low}, {high}]"

    return Column(
        title=f"{name} GB/s",
        text=text,
        sort=lambda curve: scaled(curve, curve.fit.segments[-1].bytes_per_second),
        help=f"{name} of an endless message, by the line of the largest sizes, with its 95 % interval, in 1e9 B/s",
        drop=0 if name == "busbw" else 9,
    )


def _efficiency(curves: Sequence[Curve]) -> Column[Curve]:
    return Column(
        title=f"of {next(curve.ceiling.name for curve in curves if curve.ceiling)}",
        text=lambda curve: (
            cells.percent(curve.efficiency) + (" (above: see note)" if (curve.efficiency or 0) > 1 else "")
        ),
        sort=lambda curve: curve.efficiency,
        help="fitted busbw over the declared link's speed, or over a copy in memory on the same host",
        drop=2,
    )


def _lines() -> Column[Curve]:
    def text(curve: Curve) -> str:
        return "; ".join(
            f"{cells.size(segment.first_bytes)} to {cells.size(segment.last_bytes)}: "
            f"{cells.duration(segment.latency_seconds)} + size / {cells.quantity(segment.bytes_per_second, 'B/s')}"
            for segment in curve.fit.segments
        )

    return words("lines", text, "each line of the fit, and the sizes it explains", drop=10)


def _latency(segment: Segment) -> MetricValue:
    return MetricValue(
        value=segment.latency_seconds, unit="s", better="lower", low=segment.latency_low, high=segment.latency_high
    )


def _knees(found: Fit) -> str:
    gaps = pairwise(found.segments)
    return (
        ", ".join(
            f"{cells.quantity(knee, 'B')} [{cells.size(before.last_bytes)}, {cells.size(after.first_bytes)}]"
            for knee, (before, after) in zip(found.knees, gaps, strict=True)
        )
        or cells.UNKNOWN
    )


def _off_curve(found: Fit) -> str:
    return ", ".join(f"{cells.size(size)} {100 * error:+.0f} %" for size, error in found.off_curve) or cells.UNKNOWN


def _ranks(curve: Curve) -> str:
    world = curve.rows[0].world
    return f"{world.size} on {world.nodes} node{'s' * (world.nodes != 1)}"


def busy_columns(steps: Sequence[Row], lines: Sequence[Busy]) -> tuple[Column[Busy], ...]:
    """Return the columns: step, rank, wall time, each phase's and each stream's; ``steps`` are all, for their names."""
    labels = short_labels(steps)
    phases = dict.fromkeys(phase for one in lines for phase in one.by_phase)
    streams = dict.fromkeys(stream for one in lines for stream in one.by_stream)
    return (
        words(
            "step", lambda one: labels[one.traced.row.case.id], "the step, with the parameters in which steps differ"
        ),
        figure("rank", lambda one: one.rank, cells.whole, "the rank", 0),
        figure("wall", lambda one: one.wall_seconds, cells.duration, "the traced step on this rank, from start to end"),
        *(_phase(phase) for phase in phases),
        *(_stream(stream) for stream in streams),
    )


def _phase(name: str) -> Column[Busy]:
    return figure(name, lambda one: one.by_phase.get(name), cells.duration, f"time in the step's own {name}")


def _stream(name: str) -> Column[Busy]:
    title = stream_words(name)
    help_text = f"time in which {title} was under way, overlaps counted once"
    return figure(title, lambda one: one.by_stream.get(name), cells.duration, help_text)
