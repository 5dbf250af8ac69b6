"""What a sweep is expected to take: seconds of a point, of a job, and node-hours of all."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.text import format_duration
from slurm.points import Mode, Point

START_SECONDS = 10.0
"""What a run takes beside its budget: parbench and srun start, the last case ends. Launches are in the budget."""

_JOB_SECONDS = 60.0
_MARGIN = 1.25
_MINUTE = 60


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a sweep takes if every point uses up its budget: ``seconds`` from the first job's start to the last's end.

    Jobs of their own count as if one ran after the other. ``node_seconds`` is what Slurm charges for the work: nodes
    held times seconds.
    """

    points: int
    jobs: int
    seconds: float
    node_seconds: float

    @property
    def text(self) -> str:
        """The estimate in one line, such as ``12 points in 1 job, about 14 min, 0.6 node-hours``."""
        jobs = f" in {self.jobs} {'job' if self.jobs == 1 else 'jobs'}"
        points = f"{self.points} {'point' if self.points == 1 else 'points'}"
        return f"{points}{jobs}, about {about(self.seconds)}, {self.node_seconds / 3600:.2g} node-hours"


def point_seconds(budget_seconds: float) -> float:
    """Return what a point takes at most, but for a case that hangs."""
    return START_SECONDS + budget_seconds


def job_seconds(points: Iterable[Point], *, at_once: bool) -> int:
    """Return the time to ask for, in whole minutes, for points measured one after the other, or each in its own job."""
    seconds = [point.seconds for point in points]
    work = max(seconds) if at_once else sum(seconds)
    return math.ceil((_JOB_SECONDS + _MARGIN * work) / _MINUTE) * _MINUTE


def estimate(points: Sequence[Point], mode: Mode) -> Estimate:
    """Return what all points take: one allocation holds the largest number of nodes for all its time."""
    seconds = sum(point.seconds for point in points)
    if mode == "one":
        held = max(point.nodes for point in points) * seconds
    else:
        held = sum(point.nodes * point.seconds for point in points)
    jobs = {"one": 1, "array": len({point.nodes for point in points}), "each": len(points)}[mode]
    return Estimate(points=len(points), jobs=jobs, seconds=seconds, node_seconds=held)


def about(seconds: float) -> str:
    """Return a duration as a guess deserves: seconds below two minutes, minutes below three hours, else hours."""
    if seconds < 120:
        return format_duration(seconds)
    return f"{seconds / 60:.0f} min" if seconds < 3 * 3600 else f"{seconds / 3600:.1f} h"


def table(points: Sequence[Point]) -> list[str]:
    """Return one line for each point, its id and label, the expected time and node-hours."""
    rows = [("point", "label", "time", "node-hours")]
    for point in points:
        hours = point.nodes * point.seconds / 3600
        rows.append((point.id, point.label, about(point.seconds), f"{hours:.2g}"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return [
        f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:>{widths[3]}}" for row in rows
    ]
