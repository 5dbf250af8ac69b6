"""The latency and bandwidth of each operation: rows that differ in size alone make a curve, and a curve a fit. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from parbench.bench.results.fit import METHOD, CurveFit, CurvePoint, describe_intervals, fit_curve
from parbench.bench.results.formatting import format_quantity
from parbench.bench.results.runs import Run
from parbench.reports.analysis.frame import group_rows
from parbench.reports.analysis.summary import Row

LINK, COPY = "link", "copy"


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """What cannot be exceeded, one way: the declared speed of a link, or a copy in memory on the same host."""

    name: str
    bytes_per_second: float


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Rows of one operation and world in the order of size, their fit, and bus over algorithm bandwidth if known."""

    rows: tuple[Row, ...]
    fit: CurveFit
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
    copies = [
        row
        for row in rows
        if row.kind == "memory" and row.world.nodes == 1 and "algbw" in row.metrics
    ]
    rate = max(copies, key=size_of).value("algbw") if copies else None
    return Ceiling(name=COPY, bytes_per_second=rate) if rate else None


def fit_curves(rows: Sequence[Row], ceiling: Ceiling | None) -> tuple[Curve, ...]:
    known = [row for row in rows if row.is_communication and size_of(row) > 0 and row.value("time")]
    curves = []
    for group in group_rows(
        known, lambda row: row.case, without=["size_bytes"], by=attrgetter("case.target", "world")
    ):
        group.sort(key=size_of)
        rates = [(row.value("algbw"), row.value("busbw")) for row in group]
        factors = [bus / alg for alg, bus in rates if alg and bus is not None]
        if found := fit_curve(points_of(group)):
            factor = factors[-1] if factors else None
            curves.append(Curve(rows=tuple(group), fit=found, busbw_factor=factor, ceiling=ceiling))
    return tuple(curves)


def points_of(rows: Sequence[Row]) -> tuple[CurvePoint, ...]:
    """Return sizes and times, merged over repetitions, of the rows whose time is known and above zero."""
    return tuple(
        CurvePoint(
            size_bytes=size_of(row),
            seconds=seconds,
            low=row.metrics["time"].low,
            high=row.metrics["time"].high,
            repetitions=row.by_repetition("time"),
        )
        for row in rows
        if (seconds := row.value("time"))
    )


def size_of(row: Row) -> int:
    """Return the row's size in bytes, zero where it has none."""
    return row.size_bytes or 0


def fit_notes(curves: Sequence[Curve], ceiling: Ceiling | None) -> tuple[str, ...]:
    if not curves:
        return ()
    notes = [
        f"Fits: {METHOD}; {' or '.join(dict.fromkeys(describe_intervals(one.fit.repetitions) for one in curves))}.",
        "Fits: latency is that of the smallest sizes, bandwidth that of the largest; a knee lies between [low, high].",
    ]
    if ceiling is not None:
        if ceiling.name == LINK:
            what = "the declared link"
            above = "the link's speed: reduction in the network, caches or too slow a declared link can read so"
        else:
            what = "a copy in memory that every rank of the host makes at once"
            above = "the copy in memory: caches that hold the data, or memory that ranks share, can read so"
        rate = format_quantity(ceiling.bytes_per_second, "B/s")
        notes.append(f"Efficiency: fitted bus bandwidth over {what}, {rate}.")
        if any((curve.efficiency or 0) > 1 for curve in curves):
            notes.append(f"Efficiency over 100 %: above {above}.")
    return tuple(notes)
