"""Where a training step's time and memory went: its metrics by axis and by component, read together. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.results.details import COMPONENTS, STATE, Calls, Communication, read
from bench.text import format_size
from reports.analysis.fits import Curve, size_of
from reports.analysis.summary import Row, num_ranks

SOURCES = ("memory_formula", "memory_counted", "memory")


@dataclass(frozen=True, kw_only=True)
class MemoryLine:
    """A component of a step's memory: bytes by formula, counted tensor by tensor, and measured; None is unknown."""

    row: Row
    component: str

    def num_bytes(self, source: str) -> float | None:
        """Return what one of ``SOURCES`` says of the component."""
        return self.row.value(f"{source}.{self.component}")


def by_axis(row: Row, name: str) -> dict[str, float | None]:
    """Return the values of a metric that exists once for each axis of the mesh."""
    prefix = f"{name}."
    return {key.removeprefix(prefix): metric.value for key, metric in row.metrics.items() if key.startswith(prefix)}


def exposed_seconds(row: Row) -> float | None:
    """Return the communication that no computation hides, over all axes; None if that of any axis is unknown."""
    return _sum(list(by_axis(row, "exposed_comm").values()))


def parts(row: Row) -> dict[str, float]:
    """Return the parts of the traced step that are known, in seconds: what the identity adds up to the wall time."""
    found = {
        "compute": row.value("compute"),
        **{f"exposed {axis}": seconds for axis, seconds in by_axis(row, "exposed_comm").items()},
        "copy": row.value("exposed_copy"),
        "idle": row.value("idle"),
        "non-pipeline": row.value("non_pipeline_time"),
    }
    return {name: seconds for name, seconds in found.items() if seconds is not None}


def residual_fraction(row: Row) -> float | None:
    """Return what compute + exposed + copy + idle leave of the traced wall time, over that time; None if unknown."""
    residual, known = row.value("residual"), parts(row)
    wall = sum(known.values()) + (residual or 0.0)
    return None if residual is None or not known or not wall else residual / wall


def worst_ratio(row: Row) -> tuple[str, float] | None:
    """Return the axis whose bytes sent are furthest from those expected, and their ratio; None if all are unknown."""
    known = [(axis, ratio) for axis, ratio in by_axis(row, "bytes_ratio").items() if ratio is not None]
    return max(known, key=lambda one: abs(one[1] - 1), default=None)


def state_bytes(row: Row) -> float | None:
    """Return the measured bytes of parameters, gradients and optimizer; None if any is unknown."""
    return _sum([row.value(f"memory.{component}") for component in STATE])


def broken_down(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return the rows that know where their time went: what they compute, and the rest beside it."""
    return tuple(row for row in rows if "compute" in parts(row))


def memory_lines(rows: Sequence[Row]) -> tuple[MemoryLine, ...]:
    """Return a line for each component of each row of which any source knows something."""
    lines = (MemoryLine(row=row, component=component) for row in rows for component in _components(row))
    return tuple(line for line in lines if any(line.num_bytes(source) is not None for source in SOURCES))


def _components(row: Row) -> tuple[str, ...]:
    """Return the usual components, then those that this row alone speaks of."""
    return tuple(dict.fromkeys((*COMPONENTS, *(name for source in SOURCES for name in by_axis(row, source)))))


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


# other parameters, such as a load beside it or another reduction, make it another operation
_PLAIN = {"size_bytes", "dtype", "mode", "group", "group_index", "concurrent"}


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Seconds of one step's communication by axis; an axis with an operation that has no curve is not in it.

    ``missing`` names those operations, ``extrapolated`` the calls whose size lies beyond those measured.
    """

    seconds_by_axis: Mapping[str, float]
    missing: tuple[str, ...] = ()
    extrapolated: tuple[str, ...] = ()

    @property
    def seconds(self) -> float | None:
        """The sum over all axes, None if any is unknown."""
        return None if self.missing else sum(self.seconds_by_axis.values())

    @property
    def notes(self) -> tuple[str, ...]:
        """What the prediction cannot claim."""
        lacking = (f"predicted comm: no blocking float32 curve for {', '.join(self.missing)}",) if self.missing else ()
        return (*lacking, *(f"predicted comm is extrapolated: {words}" for words in self.extrapolated))


def predict_comm(row: Row, curves: Sequence[Curve]) -> Prediction | None:
    """Return the time of the step's calls by the run's curves; None if its calls are unknown or launches disagree."""
    calls = calls_of(row)
    if calls is None:
        return None
    found = [(call, _slowest(call, _curves_for(call, row, curves))) for call in calls]
    unknown = {call.axis for call, curve in found if curve is None}
    seconds: dict[str, float] = {}
    for call, curve in found:
        if curve is not None and call.axis not in unknown:
            seconds[call.axis] = seconds.get(call.axis, 0.0) + call.count * curve.fit.predict(call.num_bytes)
    beyond = (_beyond(call, curve) for call, curve in found if curve is not None)
    return Prediction(
        seconds_by_axis=seconds,
        missing=tuple(dict.fromkeys(call.words for call, curve in found if curve is None)),
        extrapolated=tuple(dict.fromkeys(words for words in beyond if words)),
    )


def calls_of(row: Row) -> tuple[Calls, ...] | None:
    """Return the calls of one step, None if the records hold none, or not the same."""
    found = [told for record in row.records if (told := read(record, Communication)) is not None]
    if not found or isinstance(found[0], str):
        return None
    calls = found[0].comm_calls
    return calls if all(isinstance(one, Communication) and one.comm_calls == calls for one in found) else None


def _curves_for(call: Calls, row: Row, curves: Sequence[Curve]) -> list[Curve]:
    """Return the curves of the call's operation on as many ranks: of whole worlds if there are any, else of groups.

    Of groups, those that all communicate at once come first: so do the groups of a mesh's axis.
    """
    alike = [curve for curve in curves if _is_alike(call, row, curve)]
    worlds = [curve for curve in alike if "group" not in curve.rows[0].case.params]
    together = [curve for curve in alike if curve.rows[0].case.params.get("concurrent")]
    return worlds or together or alike


def _is_alike(call: Calls, row: Row, curve: Curve) -> bool:
    first = curve.rows[0]
    params = first.case.params
    return (
        first.case.name.partition(".")[2] == call.op
        and params.get("mode") == "blocking"
        and params.get("dtype") == "float32"
        and params.keys() <= _PLAIN
        and (first.world.backend, first.world.device) == (row.world.backend, row.world.device)
        and num_ranks(first) == call.ranks
    )


def _slowest(call: Calls, curves: Sequence[Curve]) -> Curve | None:
    """Return the curve of the slowest group: which ranks an axis joins is not known, and a step waits for the last."""
    return max(curves, key=lambda curve: curve.fit.predict(call.num_bytes), default=None)


def _beyond(call: Calls, curve: Curve) -> str:
    low, high = size_of(curve.rows[0]), size_of(curve.rows[-1])
    if low <= call.num_bytes <= high:
        return ""
    measured = f"{format_size(low)} to {format_size(high)} were measured"
    return f"{call.words}, {format_size(call.num_bytes)} a call, {measured}"
