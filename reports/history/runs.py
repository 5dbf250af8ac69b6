"""Adds runs to a history, and finds the runs that a text such as ``main~1`` selects."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from parbench.bench.results.runs import Run, load_run
from parbench.bench.text import UserError
from parbench.reports.compare.environment import collect_points
from parbench.reports.compare.pool import pool_runs
from parbench.reports.history.database import HistoryRun, open_history
from parbench.reports.sweeps import expand_folders

_SELECTOR = re.compile(r"(?P<branch>[^~:\s]+)(?:~(?P<back>\d{1,9})|:(?P<count>[1-9]\d{0,8}))?")
"""``BRANCH``, ``BRANCH~N`` or ``BRANCH:N``."""
ALL_BRANCHES = "last"
"""The name that stands for all branches in selectors such as ``last:10``."""
_SELECTOR_HELP = (
    "write a branch, BRANCH~1 for the run before its newest, BRANCH:10 for its newest ten runs, "
    "last:10 for the newest ten runs of all branches, or the id of a run"
)


def make_history_run(
    run: Run, branch: str, commit: str = "", *, is_candidate: bool = False
) -> HistoryRun:
    """Return a run with the origin of its code, to add it to a history or to compare it with one.

    Args:
        run: the run.
        branch: the branch of the measured code.
        commit: the commit of the measured code, empty if unknown.
        is_candidate: True if the run is only compared with the history, and not added.
    """
    info, path = run.info, str(run.path.resolve())
    preset = info.plan.preset
    return HistoryRun(info.id, info.started, preset, branch, commit, path, is_candidate)


def add_folders(
    file: Path, paths: Sequence[Path], *, branch: str, commit: str
) -> Iterator[tuple[str, str]]:
    """Add all runs of some folders to a history, and yield the id of each run and the outcome.

    The outcome is ``added``, or ``updated`` for a run that was added before. Raises ``UserError``
    and adds nothing if a run cannot be read.

    Args:
        file: the file of the history, which is created if it does not exist.
        paths: folders of runs, or folders that contain such folders.
        branch: the branch of the runs.
        commit: the commit of the measured code, empty if unknown.
    """
    runs = map(load_run, expand_folders(paths))
    results = [(make_history_run(run, branch, commit), collect_points(run)) for run in runs]
    with open_history(file, create=True) as history:
        for history_run, points in results:
            yield history_run.id, history.add(history_run, points)


def find_run(text: str, history: Path | None = None, *, excluded: str = "") -> Run:
    """Load the run that a text names: a folder, a folder of runs, or runs of the history.

    Several runs are pooled into one, which has the repetitions of all of them.

    Args:
        text: a path, the id of a run, a branch, or a selector such as ``main~1`` or ``last:10``.
        history: the file of the history, None to accept only paths.
        excluded: the id of a run that is left out if ``text`` names several runs.
    """
    if history is not None and history.exists() and not Path(text).exists():
        with open_history(history) as opened:
            folders = [Path(run.path) for run in select_runs(opened.list_runs(), text)]
    else:
        folders = expand_folders([Path(text)])
    runs = [load_run(folder) for folder in folders]
    others = [run for run in runs if run.info.id != excluded]
    return pool_runs(others or runs, text)


def select_runs(runs: Sequence[HistoryRun], text: str) -> Sequence[HistoryRun]:
    """Return the runs of the history that a text selects. Raises ``UserError`` if it selects none.

    Args:
        runs: the runs of the history, oldest first.
        text: the id of a run, ``BRANCH`` (its newest run), ``BRANCH~N`` (N runs before its newest),
            or ``BRANCH:N`` (its newest N runs). The branch ``last`` stands for all branches.
    """
    selected = [run for run in runs if run.id == text]
    match = _SELECTOR.fullmatch(text)
    if match and not selected:
        selected = [run for run in runs if match["branch"] in (run.branch, ALL_BRANCHES)]
        count = int(match["count"] or 1)
        end = max(0, len(selected) - int(match["back"] or 0))
        selected = selected[max(0, end - count) : end]
    if not selected:
        branches = ", ".join(sorted({run.branch for run in runs})) or "none"
        problem = f"{text!r} selects no run of the history, whose branches are: {branches}"
        raise UserError(problem, hint=_SELECTOR_HELP if runs else "parbench history add RUN")
    return selected
