"""Where a training step's time and memory went: its metrics by axis and by component, read together. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.results.details import COMPONENTS, STATE
from reports.summary import Row

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
