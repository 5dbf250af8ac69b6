"""The times of series over the runs of a history: as text, as a figure, and as CSV."""

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from parbench.bench.results.formatting import UNKNOWN, format_seconds
from parbench.bench.text import UserError, pluralize
from parbench.reports.compare.environment import SeriesIdentity
from parbench.reports.compare.pool import describe_world
from parbench.reports.figures.changes import HistorySeries, chart_history
from parbench.reports.history.database import History, StoredRun
from parbench.reports.history.levels import LevelRule, find_levels

if TYPE_CHECKING:
    from pandas import DataFrame

MAX_DIFFERENCES = 3
"""The number of environment values in the label of a series."""


def find_trends(
    history: History, pattern: str, runs: Sequence[StoredRun], rule: LevelRule
) -> list[HistorySeries]:
    """Return the times of each matching case over runs, and the levels of its newest runs.

    Times are keyed by the index in ``runs``. A level is successive runs that differ only by noise.
    A case that was measured in several environments has several results. Raises ``UserError`` if no
    case matches.

    Args:
        history: the open history.
        pattern: a glob for labels or names of cases.
        runs: the runs whose times are used, oldest first.
        rule: the number of newest runs in which levels are searched for.
    """
    identities = history.list_series()
    labels = label_series(identities)
    times = read_time_table(history, runs)
    trends = []
    for series in identities:
        names = (series.case.label, series.case.name)
        is_matching = any(fnmatchcase(name, pattern) for name in names)
        if not is_matching or series.fingerprint not in times:
            continue
        seconds = times[series.fingerprint].dropna()
        newest = seconds[-rule.window :]
        levels = [
            (newest.index[level.start], newest.index[level.stop - 1], math.exp(level.log))
            for level in find_levels(np.log(newest.to_numpy()))
        ]
        label = labels[series.fingerprint]
        by_place = dict(zip(seconds.index.tolist(), seconds.tolist(), strict=True))
        trends.append(HistorySeries(label=label, seconds_by_place=by_place, levels=levels))
    if not trends:
        hint = "write the name of a case or a glob, such as '*all_reduce*'"
        raise UserError(f"no series of the history matches {pattern!r}: {hint}")
    return trends


def read_time_table(history: History, runs: Sequence[StoredRun]) -> "DataFrame":
    """Return the times of all cases in seconds: a row per run, a column per fingerprint.

    A fingerprint identifies a case in one environment. Rows are in the order of ``runs`` and are
    numbered from 0. A time is NaN where a run did not measure a case. A case without any time has
    no column.
    """
    import pandas as pd

    numbers = [run.number for run in runs]
    times = pd.DataFrame(history.read_times(), columns=["run", "fingerprint", "seconds"])
    table = times[times["run"].isin(numbers)].pivot(
        index="run", columns="fingerprint", values="seconds"
    )
    return table.reindex(numbers).reset_index(drop=True)


def build_export_table(history: History, branch: str | None) -> "DataFrame":
    """Return the times of all cases in seconds: a row per run, a column per label of a case.

    The first columns are the start (``time``), ``commit`` and ``id`` of the run. ``branch`` selects
    the runs, None for all branches.
    """
    runs = history.list_runs(branch)
    table = read_time_table(history, runs)
    table = table.rename(columns=label_series(history.list_series()))
    table.insert(0, "time", [run.started for run in runs])
    table.insert(1, "commit", [run.commit for run in runs])
    table.insert(2, "id", [run.id for run in runs])
    return table


def label_series(identities: Sequence[SeriesIdentity]) -> dict[str, str]:
    """Return a distinct label for each case in one environment, keyed by its fingerprint.

    The label contains the case and the ranks. If labels differ only in their environments, they
    also contain the values that differ.
    """
    groups: dict[str, list[SeriesIdentity]] = {}
    for series in identities:
        label = f"{series.case.label} on {describe_world(series.world)}"
        groups.setdefault(label, []).append(series)
    labels = {}
    for label, group in groups.items():
        environments = [series.environment for series in group]
        paths = sorted({path for environment in environments for path in environment})
        differing = [path for path in paths if _differs(path, environments)]
        for series in group:
            values = [f"{path} {series.environment.get(path, UNKNOWN)}" for path in differing]
            if len(values) > MAX_DIFFERENCES:
                values = [*values[:MAX_DIFFERENCES], f"series {series.fingerprint[:8]}"]
            labels[series.fingerprint] = f"{label} ({', '.join(values)})" if values else label
    return labels


def _differs(path: str, environments: Sequence[dict[str, str]]) -> bool:
    """Return True if environments do not all have the same value at a path.

    ``path`` is a key such as ``versions.torch``.
    """
    return len({environment.get(path, UNKNOWN) for environment in environments}) > 1


def render_trends(trends: Sequence[HistorySeries], runs: Sequence[StoredRun]) -> str:
    """Return the levels of each case as text: time, first run and number of runs.

    A level is successive runs that differ only by noise. ``runs`` are the runs to which the indices
    in ``trends`` refer.
    """
    lines = []
    for trend in trends:
        seconds = trend.seconds_by_place.values()
        limits = f"{format_seconds(min(seconds))} to {format_seconds(max(seconds))}"
        lines += [trend.label, f"    {pluralize(len(seconds), 'run')}, {limits}"]
        for first, last, level in trend.levels:
            num_runs = sum(first <= place <= last for place in trend.seconds_by_place)
            number = pluralize(num_runs, "run")
            lines.append(f"    {format_seconds(level)} since {runs[first].id} ({number})")
    return "\n".join(lines) + "\n"


def draw_trends(trends: Sequence[HistorySeries], runs: Sequence[StoredRun], file: Path) -> None:
    """Draw the times of each case over the runs to a file, with the levels of its newest runs.

    A level is successive runs that differ only by noise. ``runs`` are the runs to which the indices
    in ``trends`` refer.
    """
    from parbench.reports.figures.svg import save_chart

    names = [f"{run.started[:10]}\n{run.started[11:19]} {run.commit[:8]}" for run in runs]
    save_chart(chart_history(names, trends), file)
