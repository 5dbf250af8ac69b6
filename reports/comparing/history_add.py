"""Runs on their way into a history: folders found, read and added one by one."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.text import UserError, reading
from reports.comparing.history import Added, open_history
from reports.comparing.history_entry import About, read_entry


def find_folders(path: Path) -> list[Path]:
    """Return a run's folder itself, or the runs' folders in it; ``UserError`` if there is none."""
    if (path / "run.json").exists():
        return [path]
    with reading(path):
        found = sorted(file.parent for file in path.glob("*/run.json"))
    if not found:
        raise UserError(f"{path} is no run and holds none: name runs' folders, or a folder of such folders")
    return found


def add_folders(
    file: Path, paths: Sequence[Path], *, branch: str, commit: str, meant: frozenset[str] = frozenset()
) -> Iterator[tuple[str, Added]]:
    """Add runs to the history in a file and yield each run's id and what became of it.

    ``meant`` names those of ``branch`` and ``commit`` to which runs are moved that the history has elsewhere.
    Each is kept whole before the next is read, so that what was yielded is never lost.
    """
    folders = {folder: path for path in paths for folder in find_folders(path)}
    with open_history(file, create=True) as history:
        for folder in folders:
            entry = read_entry(folder, About(branch=branch, commit=commit), meant)
            yield entry.run.id, history.add(entry)
        for parent in dict.fromkeys(paths):
            history.import_annotations(parent)
