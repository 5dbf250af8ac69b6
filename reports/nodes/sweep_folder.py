"""A sweep's folder: ``sweep.json`` with its points, and ``runs/<point>/<run>`` with what was measured of them."""

from pathlib import Path

import msgspec

from bench.text import reading

SWEEP, RUNS = "sweep.json", "runs"


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """What a report needs of a sweep's point; ``environment`` is empty where the sweep compares none."""

    id: str
    label: str = ""
    placement: str = ""
    environment: str = ""

    @property
    def name(self) -> str:
        """Its label, or its id where it has none."""
        return self.label or self.id


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """What a report needs of a sweep: its points in the order in which they run."""

    name: str = ""
    points: tuple[Point, ...] = ()


def is_sweep(path: Path) -> bool:
    """Say whether a folder is a sweep's."""
    return (path / SWEEP).is_file()


def load_sweep(folder: Path) -> Sweep:
    """Return the sweep of a folder; ``UserError`` if its file is not what parbench wrote."""
    file = folder / SWEEP
    with reading(file):
        return msgspec.json.decode(file.read_bytes(), type=Sweep)


def runs_of(folder: Path, point: Point) -> tuple[Path, ...]:
    """Return the runs of a point, the oldest first: their names begin with the time."""
    return tuple(sorted(file.parent for file in (folder / RUNS / point.id).glob("*/run.json")))


def point_of(run: Path) -> Point | None:
    """Return the point that a run measured, told by where it lies; None outside a sweep's folder."""
    place = run.resolve()
    folder = place.parents[2] if len(place.parents) > 2 else place
    if place.parent.parent.name != RUNS or not is_sweep(folder):
        return None
    return next((point for point in load_sweep(folder).points if point.id == place.parent.name), None)
