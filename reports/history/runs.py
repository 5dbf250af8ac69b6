"""Adds runs to a history, and finds the runs that a text such as ``main~1`` selects."""

import hashlib
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from parbench.bench.files import convert_read_errors
from parbench.bench.results.runs import Run, list_runs, load_run, require_complete
from parbench.bench.text import UserError, pluralize
from parbench.reports.compare.environment import collect_points
from parbench.reports.compare.pool import pool_runs
from parbench.reports.history.database import (
    RESERVED_BRANCH,
    AddResult,
    RunEntry,
    StoredRun,
    open_history,
)
from parbench.reports.sweeps import expand_folders

_SELECTOR = re.compile(r"(?P<branch>[^~:\s]+)(?:~(?P<back>\d{1,9})|:(?P<count>\d{1,9}))?")
"""``BRANCH``, ``BRANCH~N`` or ``BRANCH:N``."""
_SELECTOR_HELP = (
    "write a branch, BRANCH~1 for the run before its newest, BRANCH:10 for its newest ten runs, "
    "last:10 for the newest ten runs of all branches, or the id of a run"
)


def read_entry(path: Path, branch: str, commit: str = "") -> RunEntry:
    """Return the run in a folder as an entry that can be added to a history.

    Raises ``UserError`` if a line of its records cannot be read.

    Args:
        path: the folder.
        branch: the branch of the measured code.
        commit: the commit of the measured code, empty if unknown.
    """
    run = require_complete(load_run(path))
    with convert_read_errors(path):
        records = (path / "records.jsonl").read_bytes()
    complete_lines = records[: records.rfind(b"\n") + 1]
    return RunEntry(
        info=run.info,
        path=path.resolve(),
        digest=hashlib.sha256(complete_lines).hexdigest(),
        branch=branch,
        commit=commit,
        points=collect_points(run),
    )


def add_folders(
    file: Path,
    paths: Sequence[Path],
    *,
    branch: str,
    commit: str,
    explicit: Collection[str] = (),
) -> Iterator[tuple[str, AddResult]]:
    """Add all runs of these folders to a history, and yield the id of each run and the outcome.

    The outcome is ``added``, ``updated`` or ``unchanged``.

    Args:
        file: the file of the history, which is created if it does not exist.
        paths: folders of runs, or folders that contain such folders.
        branch: the branch of the runs.
        commit: the commit of the measured code, empty if unknown.
        explicit: the options that the user gave: ``branch``, ``commit`` or both. Only these also
            change runs that the history contains.
    """
    folders: dict[Path, None] = {}
    for path in paths:
        folders |= dict.fromkeys(_list_run_folders(path))
    with open_history(file, create=True) as history:
        for folder in folders:
            entry = read_entry(folder, branch, commit)
            yield entry.info.id, history.add(entry, explicit)


def _list_run_folders(path: Path) -> list[Path]:
    """Return the folder of a run itself, or the folders of the runs in a folder.

    Raises ``UserError`` if there is no run.
    """
    with convert_read_errors(path):
        folders = [path] if (path / "run.json").exists() else list_runs(path)
    if folders:
        return folders
    if not path.exists():
        raise UserError(f"the folder {path} does not exist")
    raise UserError(
        f"{path} does not contain a run", hint="name a run's folder, or a folder of runs"
    )


def find_run(text: str, history: Path | None = None, *, excluded: str = "") -> Run:
    """Load the run that a text names: a folder, a folder of runs, or runs of the history.

    Several runs are pooled into one, which has the repetitions of all of them.

    Args:
        text: a path, the id of a run, a branch, or a selector such as ``main~1`` or ``last:10``.
        history: the file of the history, None to accept only paths.
        excluded: the id of a run that is left out of several runs.
    """
    is_path = Path(text).exists()
    if history is not None and not is_path and (_is_selector(text) or history.exists()):
        with open_history(history) as opened:
            selected = select_runs(opened.list_runs(), text, excluded=excluded)
            return pool_runs([opened.load_run(run) for run in selected], text)
    runs = [require_complete(load_run(path)) for path in expand_folders([Path(text)])]
    others = [run for run in runs if run.info.id != excluded]
    return pool_runs(others or runs, text)


def _is_selector(text: str) -> bool:
    """Return True for ``BRANCH~N`` and ``BRANCH:N``, False for a branch by itself and for paths."""
    match = _SELECTOR.fullmatch(text)
    return match is not None and match.lastgroup != "branch" and "/" not in text


def select_runs(
    runs: Sequence[StoredRun], text: str, *, excluded: str = ""
) -> tuple[StoredRun, ...]:
    """Return the runs of the history that a text selects. Raises ``UserError`` if it selects none.

    Args:
        runs: the runs of the history, oldest first.
        text: the id of a run, ``BRANCH`` (its newest run), ``BRANCH~N`` (N runs before its newest),
            or ``BRANCH:N`` (its newest N runs). The branch ``last`` stands for all branches.
        excluded: the id of a run that ``BRANCH:N`` does not count. Empty for none.
    """
    with_id = tuple(run for run in runs if run.id == text)
    if with_id:
        return with_id
    match = _SELECTOR.fullmatch(text)
    if match is None:
        raise UserError(f"{text!r} does not select a run of the history: {_SELECTOR_HELP}")
    on_branch = [run for run in runs if match["branch"] in (run.branch, RESERVED_BRANCH)]
    if not on_branch:
        branches = ", ".join(sorted({run.branch for run in runs})) or "none"
        problem = f"{text!r} does not select a run of the history, whose branches are: {branches}"
        raise UserError(f"{problem}; {_SELECTOR_HELP}")
    if match["count"] is not None:
        others = [run for run in on_branch if run.id != excluded]
        count = int(match["count"])
        if not count or not others:
            hint = "select at least 1 run other than the one it is compared with"
            raise UserError(f"{text!r} selects no other run: {hint}")
        return tuple(others[-count:])
    back = int(match["back"] or 0)
    if back >= len(on_branch):
        number = pluralize(len(on_branch), "run")
        raise UserError(f"{text!r} goes back {back} runs, but the history has {number}")
    return (on_branch[-1 - back],)
