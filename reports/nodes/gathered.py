"""Runs gathered from their folders, those of a whole sweep among them, to be held against each other."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.results.runs import load_run
from bench.text import UserError
from reports.nodes.sweep_folder import SWEEP, Point, is_sweep, load_sweep, point_of, runs_of
from reports.several import Several, several
from reports.summary import summarize


def gather(paths: Sequence[Path], *, whole: bool = False) -> Several:
    """Return the runs in these folders, a sweep's in the order of its points.

    ``UserError`` where a folder is neither a run nor a sweep, or where there is no run at all; a run of a sweep that
    cannot be read, or any run unless ``whole``, is told in what is lacking.
    """
    found, lacking = [], []
    for path in paths:
        if is_sweep(path):
            lacking += _points_without_run(path)
    for path, point, must in _folders(paths, whole):
        try:
            run = load_run(path)
        except UserError as error:
            if must:
                raise
            lacking.append(f"A run cannot be read: {error}.")
            continue
        found.append((run, summarize(run), point))
    if not found:
        raise UserError(_nothing(paths, lacking))
    return several([(run, summary) for run, summary, _ in found], [point for *_, point in found], lacking)


def _folders(paths: Sequence[Path], whole: bool) -> Iterator[tuple[Path, Point | None, bool]]:
    """Yield each run's folder with its point, and whether it must be readable."""
    for path in paths:
        if not is_sweep(path):
            yield path, point_of(path), whole
            continue
        for point in load_sweep(path).points:
            yield from ((run, point, False) for run in runs_of(path, point))


def _points_without_run(folder: Path) -> list[str]:
    return [f"Not run: {point.name}." for point in load_sweep(folder).points if not runs_of(folder, point)]


def _nothing(paths: Sequence[Path], lacking: Sequence[str]) -> str:
    sweeps = [path for path in paths if is_sweep(path)]
    if sweeps and not any("cannot be read" in one for one in lacking):
        return f"{sweeps[0] / SWEEP}: none of its {len(lacking)} points has a run yet; a report needs at least one"
    return lacking[0].rstrip(".") if lacking else "no run was named; at least one is needed"
