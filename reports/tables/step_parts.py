"""The parts of a step: compute, exposed communication on each axis, copies and idle time.

They are measured in a profiled step, to whose wall time they add up together with the residual.
"""

from collections.abc import Iterable, Mapping

from parbench.reports.analysis.case_results import CaseResult

_MAX_DEVIATION = 0.1
"""A profiled step deviates if its time differs by more from that of the uninstrumented steps."""


def get_axis_values(step: CaseResult, metric: str) -> dict[str, float | None]:
    """Return a metric of a step by mesh axis, such as ``bytes_sent``.

    Parts of an axis such as ``cp.forward`` are not axes of their own.
    """
    values = {}
    for name, value in step.metrics.items():
        prefix, _, axis = name.partition(".")
        if prefix == metric and axis and "." not in axis:
            values[axis] = value.value
    return values


def sum_if_known(values: Iterable[float | None]) -> float | None:
    """Return the sum, None if a value is unknown or there are none."""
    addends = list(values)
    known_addends = [value for value in addends if value is not None]
    is_known = bool(addends) and len(known_addends) == len(addends)
    return sum(known_addends) if is_known else None


def find_worst_ratio(ratios: Mapping[str, float | None]) -> tuple[str, float] | None:
    """Return the axis whose ratio differs most from 1, with its ratio. None if all are unknown."""
    known_ratios = [(axis, ratio) for axis, ratio in ratios.items() if ratio is not None]
    return max(known_ratios, key=lambda pair: abs(pair[1] - 1), default=None)


def sum_exposed_communication(step: CaseResult) -> float | None:
    """Return the seconds of exposed communication on all axes."""
    return sum_if_known(get_axis_values(step, "exposed_comm").values())


def sum_memory(step: CaseResult) -> float | None:
    """Return the measured bytes of all components, maximum over ranks."""
    return sum_if_known(get_axis_values(step, "memory").values())


def get_parts(step: CaseResult) -> dict[str, float]:
    """Return the seconds of each known part of the profiled step."""
    exposed = get_axis_values(step, "exposed_comm")
    parts = {
        "compute": step.value("compute"),
        **{f"exposed {axis}": seconds for axis, seconds in exposed.items()},
        "copy": step.value("exposed_copy"),
        "idle": step.value("idle"),
    }
    return {name: seconds for name, seconds in parts.items() if seconds is not None}


def get_profiled_seconds(step: CaseResult) -> float | None:
    """Return the wall time of the profiled step, None if there is none."""
    parts = get_parts(step)
    if "compute" not in parts:
        return None
    return sum(parts.values()) + (step.value("residual") or 0.0) or None


def find_deviating_profile(step: CaseResult) -> float | None:
    """Return the wall time of the profiled step if it deviates from the step time."""
    profiled = get_profiled_seconds(step)
    if not profiled or not step.seconds:
        return None
    return profiled if abs(profiled / step.seconds - 1) > _MAX_DEVIATION else None


def compute_profiled_share(step: CaseResult, seconds: float | None) -> float | None:
    """Return the share of the profiled step that some of its seconds are."""
    profiled = get_profiled_seconds(step)
    return None if seconds is None or not profiled else seconds / profiled


def compute_exposed_share(step: CaseResult) -> float | None:
    """Return the share of the profiled step in which communication is exposed."""
    return compute_profiled_share(step, sum_exposed_communication(step))
