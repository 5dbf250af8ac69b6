"""The times of series over the runs of a history: as text, as a figure, and as CSV."""

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from parbench.bench.results.formatting import format_seconds
from parbench.bench.text import UserError, pluralize
from parbench.reports.compare.environment import SeriesIdentity
from parbench.reports.compare.pool import describe_world
from parbench.reports.figures.changes import HistorySeries, chart_history
from parbench.reports.history.changes import MIN_RUNS, ChangeTester, Level
from parbench.reports.history.check import MAX_RUNS
from parbench.reports.history.database import History

if TYPE_CHECKING:
    from pandas import DataFrame


def build_time_table(history: History, branch: str | None) -> "DataFrame":
    """Return the times of all cases in seconds: a row per run, a column per label of a case.

    The first columns are the start (``time``), ``commit`` and ``id`` of the run. ``branch`` selects
    the runs, None for all branches. A time is NaN where a run did not measure a case. A case
    without any time has no column. Raises ``UserError`` if there is no run.
    """
    import pandas as pd

    runs = history.list_runs(branch)
    if not runs:
        branches = sorted({run.branch for run in history.list_runs()})
        problem = "the history has no run" + (f" of branch {branch!r}" if branches else "")
        hint = f"its branches are {', '.join(branches)}" if branches else "parbench history add RUN"
        raise UserError(problem, hint=hint)
    frame = pd.DataFrame(
        {
            "time": [run.started for run in runs],
            "commit": [run.commit for run in runs],
            "id": [run.id for run in runs],
        }
    )
    times = pd.DataFrame(history.read_times(), columns=["id", "fingerprint", "seconds"])
    by_series = times.pivot(index="id", columns="fingerprint", values="seconds")
    by_series = by_series.reindex(frame["id"]).dropna(axis="columns", how="all")
    return frame.join(by_series.rename(columns=label_series(history.list_series())), on="id")


def find_trends(times: "DataFrame", pattern: str) -> list[HistorySeries]:
    """Return the times of each matching case over runs, and the levels of its newest runs.

    Times are keyed by the index of the run in ``times``. A level is successive runs that differ
    only by noise. Raises ``UserError`` if no case matches.

    Args:
        times: the table that ``build_time_table`` returns.
        pattern: a glob for a part of the label of a case.
    """
    trends = []
    for label in times.columns[3:]:
        if not fnmatchcase(label, f"*{pattern}*"):
            continue
        seconds = times[label].dropna()
        newest = seconds[-MAX_RUNS:]
        logs = np.log(newest.to_numpy())
        levels = [Level(0, len(logs), float(np.median(logs)))]
        if len(logs) >= MIN_RUNS:
            levels = ChangeTester([logs]).find_levels(logs)
        shown_levels = [
            (newest.index[level.start], newest.index[level.stop - 1], math.exp(level.log))
            for level in levels
        ]
        by_place = dict(zip(seconds.index.tolist(), seconds.tolist(), strict=True))
        trends.append(HistorySeries(label=label, seconds_by_place=by_place, levels=shown_levels))
    if not trends:
        hint = "write the name of a case, such as all_reduce"
        raise UserError(f"no series of the history matches {pattern!r}", hint=hint)
    return trends


def label_series(identities: Sequence[SeriesIdentity]) -> dict[str, str]:
    """Return a distinct label for each case in one environment, keyed by its fingerprint (hash).

    The label contains the case and the ranks. If labels differ only in their environments, they
    also contain the values that not all of these environments have.
    """
    groups: dict[str, list[SeriesIdentity]] = {}
    for series in identities:
        label = f"{series.case.label} on {describe_world(series.world)}"
        groups.setdefault(label, []).append(series)
    labels = {}
    for label, group in groups.items():
        common = set.intersection(*(set(series.environment.items()) for series in group))
        for series in group:
            values = sorted(set(series.environment.items()) - common)
            suffix = ", ".join(f"{path} {value}" for path, value in values)
            labels[series.fingerprint] = f"{label} ({suffix})" if suffix else label
    return labels


def render_trends(trends: Sequence[HistorySeries], times: "DataFrame") -> str:
    """Return the levels of each case as text: time, first run and number of runs.

    A level is successive runs that differ only by noise. ``times`` is the frame of
    ``build_time_table``, to whose rows the indices in ``trends`` refer.
    """
    lines = []
    for trend in trends:
        seconds = trend.seconds_by_place.values()
        limits = f"{format_seconds(min(seconds))} to {format_seconds(max(seconds))}"
        lines += [trend.label, f"    {pluralize(len(seconds), 'run')}, {limits}"]
        for first, last, level in trend.levels:
            num_runs = sum(first <= place <= last for place in trend.seconds_by_place)
            number = pluralize(num_runs, "run")
            lines.append(f"    {format_seconds(level)} since {times['id'][first]} ({number})")
    return "\n".join(lines) + "\n"


def draw_trends(trends: Sequence[HistorySeries], times: "DataFrame", file: Path) -> None:
    """Draw the times of each case over the runs to a file, with the levels of its newest runs.

    A level is successive runs that differ only by noise. ``times`` is the frame of
    ``build_time_table``, to whose rows the indices in ``trends`` refer.
    """
    from parbench.reports.figures.svg import save_chart

    starts = zip(times["time"], times["commit"], strict=True)
    names = [f"{time[:10]}\n{time[11:19]} {commit[:8]}" for time, commit in starts]
    save_chart(chart_history(names, trends), file)
