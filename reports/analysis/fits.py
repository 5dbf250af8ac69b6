"""The latency and bandwidth of each operation: rows that differ in size alone make a curve, and a curve a fit. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.results.fit import METHOD, Fit, Point, fit
from bench.results.runs import Run
from reports import cells
from reports.analysis.summary import Row

LINK, COPY = "link", "copy"
_CEILINGS = {
    LINK: (
        "the declared link",
        "above the link's speed: reduction in the network, caches or too slow a declared link can read so",
    ),
    COPY: (
        "a copy in memory that every rank of the host makes at once",
        "above the copy in memory: caches that hold the data, or memory that ranks share, can read so",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """What cannot be exceeded, one way: the declared speed of a link, or a copy in memory on the same host."""

    name: str
    bytes_per_second: float


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Rows of one operation, mode, dtype and world in the order of size, with the fit that explains their times.

    ``busbw_factor`` is bus bandwidth over algorithm bandwidth, None if unknown.
    """

    rows: tuple[Row, ...]
    fit: Fit
    busbw_factor: float | None
    ceiling: Ceiling | None

    @property
    def efficiency(self) -> float | None:
        """The fitted bus bandwidth of the largest sizes as a share of the ceiling, never clipped."""
        rate = self.fit.segments[-1].bytes_per_second
        if self.busbw_factor is None or rate is None or self.ceiling is None:
            return None
        return self.busbw_factor * rate / self.ceiling.bytes_per_second


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
            params = frozenset((name, value) for name, value in row.case.params.items() if name != "size_bytes")
            groups.setdefault((row.case.name, row.case.target, params, row.world), []).append(row)
    curves = []
    for group in groups.values():
        ordered = sorted(group, key=size_of)
        if found := fit(points_of(ordered)):
            factor = next((known for row in reversed(ordered) if (known := _busbw_factor(row)) is not None), None)
            curves.append(Curve(rows=tuple(ordered), fit=found, busbw_factor=factor, ceiling=ceiling))
    return tuple(curves)


def points_of(rows: Sequence[Row]) -> tuple[Point, ...]:
    """Return sizes and times, merged over launches, of the rows whose time is known and above zero."""
    return tuple(
        Point(size_bytes=size_of(row), seconds=seconds, low=row.metrics["time"].low, high=row.metrics["time"].high)
        for row in rows
        if (seconds := _seconds(row))
    )


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
        what, above = _CEILINGS[ceiling.name]
        notes.append(f"Efficiency: fitted bus bandwidth over {what}, {rate}.")
        if any((curve.efficiency or 0) > 1 for curve in curves):
            notes.append(f"Efficiency over 100 %: {above}.")
    return tuple(notes)


def _busbw_factor(row: Row) -> float | None:
    algbw, busbw = (row.metrics[name].value if name in row.metrics else None for name in ("algbw", "busbw"))
    return busbw / algbw if algbw and busbw is not None else None


def _seconds(row: Row) -> float | None:
    """Return the row's time where it is known and above zero."""
    value = row.metrics["time"].value if "time" in row.metrics else None
    return value or None
