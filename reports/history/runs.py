"""Runs that a history takes in, and those that a word means: a folder, ``main~1``, ``last:10``."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from parbench.bench.files import convert_read_errors
from parbench.bench.results.runs import Run, list_runs, load_run, require_complete
from parbench.bench.text import UserError
from parbench.reports.analysis.several import unfolded
from parbench.reports.compare.pool import pool_runs
from parbench.reports.history.database import Added, Line, open_history
from parbench.reports.history.entries import About, read_entry

_SELECTOR = re.compile(r"(?P<name>[^~:\s]+)(?:~(?P<back>\d{1,9})|:(?P<count>\d{1,9}))?")


def add_folders(
    file: Path,
    paths: Sequence[Path],
    *,
    branch: str,
    commit: str,
    meant: frozenset[str] = frozenset(),
) -> Iterator[tuple[str, Added]]:
    """Yield each run's id and what became of it, kept before the next is read; ``meant`` names what moves it."""
    folders: dict[Path, None] = {}
    for path in paths:
        with convert_read_errors(path):
            found = [path] if (path / "run.json").exists() else list_runs(path)
        if not found:
            told = (
                f"{path} is no run and holds none: name runs' folders, or a folder of such folders"
            )
            raise UserError(told if path.exists() else f"no such folder: {path}")
        folders |= dict.fromkeys(found)
    with open_history(file, create=True) as history:
        for folder in folders:
            entry = read_entry(folder, About(branch=branch, commit=commit), meant)
            yield entry.run.id, history.add(entry)


def find_run(word: str, history: Path | None = None, *, without: str = "") -> Run:
    """Return the run of a folder; those in a folder, or of the history, as one, but for that of the id ``without``."""
    if history is not None and not Path(word).exists() and (means_run(word) or history.exists()):
        return select_run(history, word, without=without)
    runs = [require_complete(load_run(path)) for path in unfolded([Path(word)])]
    return pool_runs([run for run in runs if run.info.id != without] or runs, word)


def means_run(word: str) -> bool:
    return (
        (found := _SELECTOR.fullmatch(word)) is not None
        and found.lastgroup != "name"
        and "/" not in word
    )


def select_run(path: Path, word: str, *, without: str = "") -> Run:
    """Return the run that a word means in a file's history; several, but that of the id ``without``, become one."""
    with open_history(path) as history:
        lines = select_lines(history.runs(), word, without=without)
        return pool_runs([history.run(line) for line in lines], word)


def select_lines(lines: Sequence[Line], word: str, *, without: str = "") -> tuple[Line, ...]:
    """Return what a word means among runs in the order of time; ``UserError`` if it means none."""
    if named := tuple(line for line in lines if line.id == word):
        return named
    newest = (
        "BRANCH~1 for the run before its newest, BRANCH:10 or last:10 for the newest ten as one"
    )
    allowed = f"a branch, {newest}, or an id"
    if (found := _SELECTOR.fullmatch(word)) is None:
        raise UserError(f"{word!r} names no run of the history: write {allowed}")
    own = [line for line in lines if found["name"] in (line.branch, "last")]
    if not own:
        known = ", ".join(sorted({line.branch for line in lines})) or "no run at all"
        raise UserError(f"{word!r} names no run of the history, which has {known}: write {allowed}")
    if found["count"] is not None:
        count, others = int(found["count"]), [line for line in own if line.id != without]
        if not (count and others):
            raise UserError(
                f"{word!r} means no run beside the one it is compared with: at least 1 is needed"
            )
        return tuple(others[-count:])
    back = int(found["back"] or 0)
    if back >= len(own):
        raise UserError(
            f"{word!r} goes back {back} runs, and the history has {len(own)} of {found['name']!r}"
        )
    return (own[-1 - back],)
