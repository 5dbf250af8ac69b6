"""The folders of runs that commands accept: a run, a folder of runs, or a sweep."""

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from parbench.bench.files import convert_read_errors, decode_json, read_file
from parbench.bench.results.runs import Run, list_runs, load_run
from parbench.bench.text import UserError

SWEEP_FILE = "sweep.json"
RUNS_FOLDER = "runs"


class MeasuredPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a sweep's point that reports read."""

    id: str
    label: str = ""
    distribution: str = ""
    environment: str = ""
    """The name of its variables, empty if the sweep does not compare environments."""

    @property
    def name(self) -> str:
        """The label of the point, or its id without a label."""
        return self.label or self.id


class MeasuredSweep(msgspec.Struct, frozen=True, kw_only=True):
    """The points of a sweep in the order in which they run."""

    points: tuple[MeasuredPoint, ...] = ()


LoadedRuns = list[tuple[Run, MeasuredPoint | None]]
"""Runs, each with the point of a sweep that it measured."""


def load_runs(folders: Sequence[Path], *, is_strict: bool = True) -> tuple[LoadedRuns, list[str]]:
    """Load the runs in these folders. The runs of a sweep are in the order of its points.

    The second result is a sentence for each point without a run, and for each run that cannot be
    read.

    Raises ``UserError`` if there is no run, or, unless ``is_strict`` is false, if a folder outside
    sweeps cannot be read.
    """
    candidates: list[tuple[Path, MeasuredPoint | None, bool]] = []
    missing = []
    for folder in folders:
        if not is_sweep(folder):
            candidates.append((folder, find_point(folder), is_strict))
            continue
        for point in load_sweep(folder).points:
            run_folders = list_point_runs(folder, point)
            candidates += [(run_folder, point, False) for run_folder in run_folders]
            if not run_folders:
                missing.append(f"Point {point.name} has no run.")
    runs: LoadedRuns = []
    for folder, candidate_point, is_required in candidates:
        try:
            runs.append((load_run(folder), candidate_point))
        except UserError as error:
            if is_required:
                raise
            missing.append(f"A run cannot be read: {error}.")
    if not runs:
        reason = missing[0].rstrip(".") if missing else "name at least one folder"
        raise UserError(f"the folders contain no run to report: {reason}")
    return runs, missing


def load_named_runs(paths: Iterable[str | Path]) -> list[tuple[Run, str | None]]:
    """Load runs with the names of their points, and warn about missing runs of sweeps."""
    runs, missing = load_runs(expand_folders(map(Path, paths)))
    for sentence in missing:
        warnings.warn(sentence, stacklevel=3)
    return [(run, point.name if point else None) for run, point in runs]


def expand_folders(paths: Iterable[Path]) -> list[Path]:
    """Return the folders of runs and sweeps in ``paths``, each once.

    A folder that contains runs is replaced by its runs.
    """
    folders: dict[Path, None] = {}
    for path in paths:
        is_run_or_sweep = (path / "run.json").exists() or is_sweep(path)
        runs = [] if is_run_or_sweep else list_runs(path)
        folders.update(dict.fromkeys(runs or [path]))
    return list(folders)


def is_sweep(path: Path) -> bool:
    """Return True if a folder is the folder of a sweep."""
    return (path / SWEEP_FILE).is_file()


def load_sweep(folder: Path) -> MeasuredSweep:
    """Read the sweep in a folder. Raises ``UserError`` if its file cannot be read."""
    with convert_read_errors(folder / SWEEP_FILE):
        return decode_json(read_file(folder / SWEEP_FILE), MeasuredSweep)


def list_point_runs(folder: Path, point: MeasuredPoint) -> list[Path]:
    """Return the runs of a point, the oldest first."""
    return list_runs(folder / RUNS_FOLDER / point.id)


def find_point(run: Path) -> MeasuredPoint | None:
    """Return the sweep point that a run measured, None outside a sweep."""
    point_folder = run.resolve().parent
    sweep_folder = point_folder.parent.parent
    if point_folder.parent.name != RUNS_FOLDER or not is_sweep(sweep_folder):
        return None
    points = load_sweep(sweep_folder).points
    return next((point for point in points if point.id == point_folder.name), None)
