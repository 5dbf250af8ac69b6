"""The folders that commands accept: a run, a folder of runs, or a sweep (runs of many settings)."""

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from parbench.bench.command_line import resolve_latest
from parbench.bench.files import convert_read_errors, decode_json
from parbench.bench.results.runs import Run, list_runs, load_run
from parbench.bench.text import UserError

SWEEP_FILE = "sweep.json"
RUNS_FOLDER = "runs"


class MeasuredPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A point of a sweep (one combination of settings), with the fields that reports read."""

    id: str
    """The name of the folder with the runs of the point."""
    label: str = ""
    """The nodes, the ranks per node and the settings of the point, as text. It may be empty."""
    distribution: str = ""
    """The distribution of ranks over nodes, such as ``block``, empty if it was not set."""
    environment: str = ""
    """The environment variables that differ between points, such as ``NAME=VALUE, NAME=VALUE``.

    Empty if no variable differs.
    """

    @property
    def name(self) -> str:
        """The label of the point, or its id without a label."""
        return self.label or self.id


class MeasuredSweep(msgspec.Struct, frozen=True, kw_only=True):
    """The points of a sweep in the order in which they run."""

    points: tuple[MeasuredPoint, ...] = ()
    """The combinations of settings that the sweep measures."""


LoadedRuns = list[tuple[Run, MeasuredPoint | None]]
"""(run, sweep point that it measured) for each run. The point is None outside a sweep.

A point is one combination of settings.
"""


def load_runs(folders: Sequence[Path]) -> tuple[LoadedRuns, list[str]]:
    """Return the runs in folders, each with its sweep point, and sentences about missing runs.

    A folder is a run or a sweep. Of a sweep, the newest run of each point (combination of settings)
    is loaded, in the order of points. There is a sentence for each point without a run, and for
    each run that cannot be read. Raises ``UserError`` if no run can be read.
    """
    points: dict[Path, MeasuredPoint | None] = {}
    missing = []
    for folder in folders:
        if not is_sweep(folder):
            points[folder] = None
            continue
        for point in _load_points(folder):
            run_folders = list_runs(folder / RUNS_FOLDER / point.id)
            if run_folders:
                points[run_folders[-1]] = point
            else:
                missing.append(f"Point {point.name} has no run.")
    runs: LoadedRuns = []
    for run_folder, measured_point in points.items():
        try:
            runs.append((load_run(run_folder), measured_point))
        except UserError as error:
            missing.append(f"A run cannot be read: {error}.")
    if not runs:
        reason = missing[0].rstrip(".") if missing else "name at least one folder"
        raise UserError(f"the folders contain no run to report: {reason}")
    return runs, missing


def load_named_runs(paths: Iterable[str | Path]) -> list[tuple[Run, str | None]]:
    """Load runs from folders, each with the name of its sweep point, None outside sweeps.

    A folder may be a run, a folder of runs, or a sweep. Missing runs cause a Python warning.
    """
    runs, missing = load_runs(expand_folders(map(Path, paths)))
    for sentence in missing:
        warnings.warn(sentence, stacklevel=3)
    return [(run, point.name if point else None) for run, point in runs]


def expand_folders(paths: Iterable[Path]) -> list[Path]:
    """Return ``paths`` with each folder of runs replaced by its runs, without duplicates.

    Runs and sweeps stay as they are. ``latest`` stands for the newest run (``resolve_latest``).
    """
    folders: dict[Path, None] = {}
    for path in map(resolve_latest, paths):
        is_run_or_sweep = (path / "run.json").exists() or is_sweep(path)
        runs = [] if is_run_or_sweep else list_runs(path)
        folders.update(dict.fromkeys(runs or [path]))
    return list(folders)


def is_sweep(path: Path) -> bool:
    """Return True if the folder ``path`` contains ``sweep.json``, which every sweep has."""
    return (path / SWEEP_FILE).is_file()


def _load_points(folder: Path) -> tuple[MeasuredPoint, ...]:
    """Return the points (combinations of settings) of the sweep in a folder.

    Raises ``UserError`` if ``sweep.json`` cannot be read.
    """
    with convert_read_errors(folder / SWEEP_FILE):
        return decode_json((folder / SWEEP_FILE).read_bytes(), MeasuredSweep).points
