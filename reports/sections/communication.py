"""The report on collectives and point-to-point: bandwidth, latency, fits, loads, groups of ranks and kinds of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

from parbench.bench.results.fit import CurveFit, describe_intervals
from parbench.bench.results.formatting import (
    UNKNOWN,
    format_bytes,
    format_case_size,
    format_gigabytes,
    format_number,
    format_percent,
    format_quantity,
    format_seconds,
)
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.stats import WITHIN_REPETITION
from parbench.bench.text import pluralize
from parbench.reports.analysis.analysis import Analysis
from parbench.reports.analysis.contrasts import (
    ACROSS,
    OF_GROUP,
    OVER,
    Grouped,
    Kind,
    Kinds,
    Slowdown,
    contrasts,
    largest,
    over_sizes,
    ratio_words,
    series_of_kinds,
)
from parbench.reports.analysis.fits import Curve, fit_notes
from parbench.reports.analysis.labels import operation
from parbench.reports.analysis.summary import Alike, Row
from parbench.reports.figures.chart import Chart, list_charts
from parbench.reports.figures.lines import (
    chart_bandwidth_and_time,
    chart_efficiency,
    chart_groups,
    chart_latency,
)
from parbench.reports.report import Column, Section, Table, known, measurement, number, words
from parbench.reports.sections.row_columns import (
    IDENTITY,
    case_columns,
    communication_columns,
    headline,
)
from parbench.reports.topology import WITHIN_NODE

PLOTTED = "plotted data"
_MAX_OPERATIONS = 6


def communication_section(found: Analysis) -> Section | None:
    """Return the operations, on the page a table for each mode and type, elsewhere over sizes, and their fits."""
    rows = found.communication
    if not rows:
        return None
    series_over = over_sizes(rows)
    shown = {row.case.id for one in series_over for row in one.rows.values()}
    others = tuple(row for row in rows if row.case.id not in shown)
    alone = Table(
        id="communication",
        title=f"Collectives and point-to-point{', of one size' if series_over else ''}",
        caption=PLOTTED,
        columns=communication_columns(others),
        rows=others,
        where="terminal",
    )
    series: dict[str, list[Row]] = {}
    for row in rows:
        told = (str(row.case.params[name]) for name in ("mode", "dtype") if name in row.case.params)
        series.setdefault(", ".join(told) or "without mode or type", []).append(row)
    parts = [
        Table(
            id=f"communication-{i}",
            title=title,
            caption=PLOTTED,
            columns=communication_columns(of),
            rows=tuple(of),
            figures=partial(_charts, found, i, title, of),
            where="page",
        )
        for i, (title, of) in enumerate(series.items(), start=1)
    ]
    fitted = ("fit", "knee", "off the curve") if found.curves else ()
    return Section(
        id="communication",
        title="Communication",
        tables=(*_over_sizes(series_over), alone, *parts, *_fits(found)),
        terms=("busbw", "blocking, pipelined", *fitted),
    )


def _over_sizes(found: Sequence[Alike[int]]) -> Iterator[Table[Alike[int]]]:
    """Yield time and bus bandwidth with a column for each size, a line for each operation."""
    if not found:
        return
    sizes = sorted({size for one in found for size in one.rows})
    are_alone = all(row.repetitions < 2 for one in found for row in one.rows.values())

    def time(size: int) -> Column[Alike[int]]:
        def metric(one: Alike[int]) -> MetricValue | None:
            return one.rows[size].metrics.get(one.rows[size].headline) if size in one.rows else None

        def grade(one: Alike[int]) -> str:
            return (one.rows[size].noise or "") if size in one.rows else ""

        column = measurement(format_case_size(size), metric, "median with its 95 % interval", found)
        return replace(
            column, title=format_case_size(size) if are_alone else column.title, mark=grade
        )

    def rate(size: int) -> Column[Alike[int]]:
        def busbw(one: Alike[int]) -> float | None:
            return one.rows[size].value("busbw") if size in one.rows else None

        return number(
            format_case_size(size),
            busbw,
            format_gigabytes,
            "bus bandwidth in 1e9 B/s, nccl-tests' convention",
        )

    names = _series_columns([one.first for one in found])
    told: list[Column[Alike[int]]] = [column.of(lambda one: one.first) for column in names]
    table: Table[Alike[int]] = Table(
        id="time-over-size",
        title=f"Collectives and point-to-point: time over size{f', {WITHIN_REPETITION}' if are_alone else ''}",
        caption=PLOTTED,
        columns=(*told, *map(time, sizes)),
        rows=tuple(found),
        where="terminal",
    )
    yield table
    note = "Each size's p99, noise, iterations and check: report.html, or parbench report --format csv."
    rates, title = (
        known(map(rate, sizes), found),
        "Collectives and point-to-point: bus bandwidth over size, GB/s",
    )
    yield replace(table, id="busbw-over-size", title=title, columns=(*told, *rates), notes=(note,))


def _charts(found: Analysis, number: int, title: str, rows: Sequence[Row]) -> Iterator[Chart]:
    curves = [curve for curve in found.curves if curve.rows[0] in rows]
    yield from chart_bandwidth_and_time(number, title, rows, curves, found.ceiling)
    yield from list_charts(chart_latency(number, title, rows))


def _fits(found: Analysis) -> Iterator[Table[Curve]]:
    if found.curves:
        yield Table(
            id="fits",
            title="Fits: latency and bandwidth",
            caption="what explains their times, and how well",
            columns=_fit_columns(found.curves),
            rows=found.curves,
            notes=fit_notes(found.curves, found.ceiling),
            figures=lambda: list_charts(chart_efficiency(found.communication, found.ceiling)),
        )


def _fit_columns(curves: Sequence[Curve]) -> tuple[Column[Curve], ...]:
    """Return the columns of fits: those of ranks, lines and efficiency only where they say something."""
    firsts = [curve.rows[0] for curve in curves]
    columns: list[Column[Curve]] = [
        column.of(lambda curve: curve.rows[0]) for column in _series_columns(firsts)
    ]
    half_help = "the size at which half the bandwidth is reached: latency times bandwidth, by the line of the largest"
    columns += [
        measurement(
            "latency",
            _latency,
            "the time of an empty message, by the line of the smallest sizes, with its 95 % interval",
            curves,
        ),
        _fitted_bandwidth("algbw", lambda curve: 1.0, curves),
        _fitted_bandwidth("busbw", lambda curve: curve.busbw_factor, curves),
        number("n_1/2", lambda curve: curve.fit.half_bandwidth_bytes, format_bytes, half_help),
        Column(
            "knee",
            lambda curve: _knees(curve.fit),
            lambda curve: curve.fit.breakpoints[0] if curve.fit.breakpoints else None,
            "the size at which another line begins, as where a protocol switches, and the sizes it lies between",
        ),
        words("off the curve", _off_curve, "outliers from the fit"),
        number(
            "residual",
            lambda curve: curve.fit.residual,
            format_percent,
            "median distance of times from the fit",
        ),
    ]
    if ceiling := next((curve.ceiling for curve in curves if curve.efficiency is not None), None):
        columns.append(
            Column(
                f"of {ceiling.name}",
                lambda one: (
                    format_percent(one.efficiency)
                    + " (above: see note)" * ((one.efficiency or 0) > 1)
                ),
                lambda one: one.efficiency,
                "fitted busbw over the declared link's speed, or over a copy in memory on the same host",
            )
        )
    if any(one.fit.breakpoints for one in curves):
        columns.append(words("lines", _lines, "each line of the fit, and the sizes it explains"))
    return tuple(columns)


def _series_columns(firsts: Sequence[Row]) -> list[Column[Row]]:
    def ranks(row: Row) -> str:
        return f"{row.world.size} on {pluralize(row.world.nodes, 'node')}"

    columns = [column for column in communication_columns(firsts) if column.title in IDENTITY[:3]]
    if len({row.world for row in firsts}) > 1:
        columns.append(words("ranks", ranks, "ranks, and over how many nodes"))
    return columns


def _latency(curve: Curve) -> MetricValue:
    line = curve.fit.segments[0]
    told = describe_intervals(curve.fit.repetitions)
    low, high = (
        (None, None) if curve.fit.repetitions == 2 else (line.latency_low, line.latency_high)
    )
    return MetricValue(
        value=line.latency_seconds,
        unit="s",
        low=low,
        high=high,
        method=told,
        is_within_repetition=curve.fit.repetitions < 2,
    )


def _fitted_bandwidth(
    name: str, factor_of: Callable[[Curve], float | None], curves: Sequence[Curve]
) -> Column[Curve]:
    is_mixed = len({curve.fit.repetitions > 1 for curve in curves}) > 1

    def scaled(curve: Curve, bytes_per_second: float | None) -> float | None:
        factor = factor_of(curve)
        return None if bytes_per_second is None or factor is None else bytes_per_second * factor

    def text(curve: Curve) -> str:
        last = curve.fit.segments[-1]
        bounds = (last.bytes_per_second, last.bytes_per_second_low, last.bytes_per_second_high)
        value, low, high = (format_gigabytes(scaled(curve, bound)) for bound in bounds)
        if value == UNKNOWN or curve.fit.repetitions == 2:
            return value
        return (
            f"{value} (one repetition)"
            if is_mixed and curve.fit.repetitions < 2
            else f"{value} [{low}, {high}]"
        )

    return Column(
        f"{name} GB/s",
        text,
        lambda curve: scaled(curve, curve.fit.segments[-1].bytes_per_second),
        f"{name} of an endless message, by the line of the largest sizes, with its 95 % interval, in 1e9 B/s",
    )


def _knees(fit: CurveFit) -> str:
    told = (
        f"{format_quantity(knee, 'B')} [{format_case_size(before.last_bytes)}, {format_case_size(after.first_bytes)}]"
        for knee, (before, after) in zip(fit.breakpoints, pairwise(fit.segments), strict=True)
    )
    return ", ".join(told) or UNKNOWN


def _off_curve(curve: Curve) -> str:
    return (
        ", ".join(
            f"{format_case_size(size)} {100 * error:+.0f} %" for size, error in curve.fit.outliers
        )
        or UNKNOWN
    )


def _lines(curve: Curve) -> str:
    return "; ".join(
        f"{format_case_size(line.first_bytes)} to {format_case_size(line.last_bytes)}: "
        f"{format_seconds(line.latency_seconds)} + size / {format_quantity(line.bytes_per_second, 'B/s')}"
        for line in curve.fit.segments
    )


def contrast_section(found: Analysis) -> Section | None:
    tables = tuple(
        Table(
            id=f"contrast-{i}",
            title=title,
            caption="1 is as fast as undisturbed",
            columns=_slowed_columns(slowed, prefix),
            rows=slowed,
        )
        for i, (title, prefix, slowed) in enumerate(contrasts(found.shown), start=1)
    )
    if not tables:
        return None
    return Section(
        id="contrasts", title="Beside each other", tables=tables, terms=("factor, beside",)
    )


def _slowed_columns(slowed: Sequence[Slowdown], prefix: str) -> tuple[Column[Slowdown], ...]:
    identity = [
        one for one in communication_columns([one.base for one in slowed]) if one.title in IDENTITY
    ]
    factor_help = "how many times as long it takes, with its 95 % interval"

    def factor(load: str) -> Callable[[Slowdown], MetricValue | None]:
        return lambda one: one.factors.get(load)

    loads = dict.fromkeys(load for one in slowed for load in one.factors)
    return (
        *(
            column.of(lambda one: one.base)
            for column in (*identity, headline("time", [one.base for one in slowed]))
        ),
        *(measurement(f"{prefix}{load}", factor(load), factor_help, slowed) for load in loads),
    )


def group_section(found: Analysis) -> Section | None:
    """Return operations against the groups that ran them, within and across nodes first."""
    tables: list[Table[Kinds] | Table[Grouped]] = []
    if found.kinds:
        tables.append(
            Table(
                id="group-kinds",
                title="Within and across nodes: bus bandwidth in GB/s",
                caption="by kind of group, the median of its groups",
                columns=kind_columns(found.kinds),
                rows=found.kinds,
                notes=tuple(ratio_words(one) for one in largest(found.kinds)),
                figures=partial(_draw_kinds, found.kinds),
            )
        )
    if found.groups:
        tables.append(
            Table(
                id="operation-group",
                title="Operation x group: bus bandwidth in GB/s",
                caption="of each group of ranks, alone and, where measured, all together",
                columns=_group_columns(found.groups),
                rows=found.groups,
            )
        )
    return (
        Section(id="groups", title="Groups", tables=tuple(tables), terms=("busbw",))
        if tables
        else None
    )


def kind_columns(found: Sequence[Kinds]) -> tuple[Column[Kinds], ...]:
    def rate(kind: Kind) -> Column[Kinds]:
        told = f"bus bandwidth in 1e9 B/s, the median of the groups: {kind.label}"
        return number(kind.label, lambda one: one.rate(kind), format_gigabytes, told)

    names = dict.fromkeys(kind for one in found for kind in one.rows)
    ordered = sorted(
        names, key=lambda kind: (kind.together, (WITHIN_NODE, ACROSS, OVER).index(kind.reach))
    )
    columns: tuple[Column[Kinds], ...] = (
        words("operation", lambda one: one.name, "what is done"),
        *(column.of(lambda one: one.first) for column in case_columns()),
        *map(rate, ordered),
        number(
            "across / within",
            lambda one: one.ratio(),
            format_number,
            "bus bandwidth across nodes over within",
        ),
    )
    if all(one.ratio(together=True) is None for one in found):
        return columns
    told = "the same while all groups of the kind ran at once and shared what links there are"
    return (
        *columns,
        number(
            "across / within, together",
            lambda one: one.ratio(together=True),
            format_number,
            told,
        ),
    )


def _draw_kinds(found: Sequence[Kinds]) -> Iterator[Chart]:
    series = list(series_of_kinds(found).items())[:_MAX_OPERATIONS]
    for index, (names, rows) in enumerate(series, start=1):
        title = ", ".join(name for name in names if name != UNKNOWN)
        yield from list_charts(chart_groups(index, title, rows))


def _group_columns(found: Sequence[Grouped]) -> tuple[Column[Grouped], ...]:
    def rate(name: str) -> Column[Grouped]:
        told = f"bus bandwidth of {name} in 1e9 B/s"
        return number(
            name,
            lambda one: one.rows[name].value("busbw") if name in one.rows else None,
            format_gigabytes,
            told,
        )

    return (
        words("operation", lambda one: operation(one.first.case, OF_GROUP), "what is done"),
        *(column.of(lambda one: one.first) for column in case_columns()),
        *map(rate, dict.fromkeys(name for one in found for name in one.rows)),
        words(
            "slowest alone",
            lambda one: one.slowest or UNKNOWN,
            "the group with the least bus bandwidth",
        ),
    )
