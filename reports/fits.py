"""The latency and bandwidth of each operation: rows that differ in size alone make a curve, and a curve a fit. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.results.fit import COPY, LINK, METHOD, Ceiling, Efficiency, Fit, Point, efficiency, fit
from bench.results.runs import Run
from reports import cells
from reports.summary import Row

_CEILINGS = {LINK: "the declared link", COPY: "a copy in memory that every rank of the host makes at once"}


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Rows of one operation, mode, dtype and world in the order of size, with the fit that explains their times.

    ``busbw_factor`` is bus bandwidth over algorithm bandwidth, None if unknown; the efficiency is that of the fitted
    bus bandwidth against the ceiling.
    """

    rows: tuple[Row, ...]
    fit: Fit
    busbw_factor: float | None
    efficiency: Efficiency


def ceiling_of(run: Run, rows: Sequence[Row]) -> Ceiling | None:
    """Return the declared link, else the copy in memory of the largest size where all ranks share a host, else None."""
    if run.info.plan.link_bytes_per_second is not None:
        return Ceiling(name=LINK, bytes_per_second=run.info.plan.link_bytes_per_second)
    copies = [row for row in rows if row.kind == "memory" and row.world.nodes == 1 and "algbw" in row.metrics]
    rate = max(copies, key=size_of).metrics["algbw"].value if copies else None
    return Ceiling(name=COPY, bytes_per_second=rate) if rate else None


def fit_curves(rows: Sequence[Row], ceiling: Ceiling | None) -> tuple[Curve, ...]:
    """Return the curves that have a fit, in the order of their first rows; too few sizes have none."""
    groups: dict[object, list[Row]] = {}
    for row in rows:
        if row.is_communication and size_of(row) > 0 and _seconds(row) is not None:
            groups.setdefault(_identity(row), []).append(row)
    curves = (_curve(sorted(group, key=size_of), ceiling) for group in groups.values())
    return tuple(curve for curve in curves if curve is not None)


def points_of(rows: Sequence[Row]) -> tuple[Point, ...]:
    """Return sizes and times, merged over launches, of the rows whose time is known and above zero."""
    points = []
    for row in rows:
        seconds = _seconds(row)
        if seconds is not None:
            time = row.metrics["time"]
            points.append(Point(size_bytes=size_of(row), seconds=seconds, low=time.low, high=time.high))
    return tuple(points)


def size_of(row: Row) -> int:
    """Return the row's size in bytes, zero where it has none."""
    size = row.case.params.get("size_bytes")
    return size if isinstance(size, int) else 0


def fit_notes(curves: Sequence[Curve], ceiling: Ceiling | None) -> tuple[str, ...]:
    """Return what a reader of the fits must know, each a sentence; nothing where there are none."""
    if not curves:
        return ()
    notes = [
        f"Fits: {METHOD}.",
        "Fits: latency is that of the smallest sizes, bandwidth that of the largest; a knee lies between [low, high].",
    ]
    if ceiling is not None:
        rate = cells.quantity(ceiling.bytes_per_second, "B/s")
        notes.append(f"Efficiency: fitted bus bandwidth over {_CEILINGS[ceiling.name]}, {rate}.")
    above = dict.fromkeys(curve.efficiency.note for curve in curves if curve.efficiency.note)
    return (*notes, *(f"Efficiency over 100 %: {note}." for note in above))


def _identity(row: Row) -> object:
    """Return what a curve's rows share: all but their size."""
    params = frozenset((name, value) for name, value in row.case.params.items() if name != "size_bytes")
    return row.case.name, row.case.target, params, row.world


def _curve(rows: Sequence[Row], ceiling: Ceiling | None) -> Curve | None:
    found = fit(points_of(rows))
    if found is None:
        return None
    factor = next((known for row in reversed(rows) if (known := _busbw_factor(row)) is not None), None)
    rate = found.segments[-1].bytes_per_second
    busbw = None if factor is None or rate is None else factor * rate
    return Curve(rows=tuple(rows), fit=found, busbw_factor=factor, efficiency=efficiency(busbw, ceiling))


def _busbw_factor(row: Row) -> float | None:
    algbw, busbw = (row.metrics[name].value if name in row.metrics else None for name in ("algbw", "busbw"))
    return busbw / algbw if algbw and busbw is not None else None


def _seconds(row: Row) -> float | None:
    """Return the row's time where it is known and above zero."""
    value = row.metrics["time"].value if "time" in row.metrics else None
    return value or None
