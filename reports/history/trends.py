"""Series over runs: their levels as text, a trend figure, and CSV."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from parbench.bench.results.formatting import format_seconds
from parbench.bench.text import UserError, pluralize
from parbench.reports.compare.environment import SeriesIdentity
from parbench.reports.compare.pool import describe_world
from parbench.reports.history.database import History, StoredRun
from parbench.reports.history.levels import Level, LevelRule, find_levels

if TYPE_CHECKING:
    from pandas import DataFrame

MAX_DIFFERENCES = 3


@dataclass(frozen=True, kw_only=True)
class Trend:
    """The times of a series by run, and the levels of the newest runs."""

    series: SeriesIdentity
    label: str
    """Distinguishes the series from all others, also from those of the same case."""
    times: tuple[tuple[StoredRun, float], ...]
    levels: tuple[Level, ...]


def find_trends(
    history: History, pattern: str, runs: Sequence[StoredRun], rule: LevelRule
) -> list[Trend]:
    """Return the series whose label or name matches a glob, ``UserError`` if there is none."""
    identities = {
        series.fingerprint: series
        for series in history.list_series()
        if fnmatchcase(series.case.label, pattern) or fnmatchcase(series.case.name, pattern)
    }
    labels = label_series(identities.values())
    trends = []
    for fingerprint, series in identities.items():
        points = history.read_series(fingerprint, runs)
        times = tuple((run, point.seconds) for run, point in points if point.seconds)
        if times:
            levels = find_newest_levels([seconds for _, seconds in times], rule)
            trends.append(
                Trend(series=series, label=labels[fingerprint], times=times, levels=levels)
            )
    if not trends:
        hint = "write the name of a case or a glob, such as '*all_reduce*'"
        raise UserError(f"no series of the history matches {pattern!r}: {hint}")
    return trends


def find_newest_levels(seconds: Sequence[float], rule: LevelRule) -> tuple[Level, ...]:
    """Return the levels of the newest runs. Their places count from the first run of all."""
    first = max(0, len(seconds) - rule.window)
    return tuple(
        replace(level, start=first + level.start, stop=first + level.stop)
        for level in find_levels(np.log(seconds[first:]), rule)
    )


def label_series(identities: Iterable[SeriesIdentity]) -> dict[str, str]:
    """Return a distinct label for each series by fingerprint.

    Series of one case get the world or the values of the environment in which they differ.
    """
    groups: dict[str, list[SeriesIdentity]] = {}
    for series in identities:
        label = f"{series.case.label} on {describe_world(series.world)}"
        groups.setdefault(label, []).append(series)
    labels = {}
    for label, group in groups.items():
        values = [series.environment for series in group]
        paths = {path for environment in values for path in environment}
        differing = [
            path
            for path in sorted(paths)
            if len({environment.get(path, "-") for environment in values}) > 1
        ]
        for series in group:
            shown = [f"{path} {series.environment.get(path, '-')}" for path in differing]
            if len(shown) > MAX_DIFFERENCES:
                shown = [*shown[:MAX_DIFFERENCES], f"series {series.fingerprint[:8]}"]
            labels[series.fingerprint] = f"{label} ({', '.join(shown)})" if shown else label
    return labels


def render_trends(trends: Sequence[Trend]) -> str:
    """Return each series with its levels: the time, the number of runs and the first run."""
    lines = []
    for trend in trends:
        seconds = [value for _, value in trend.times]
        limits = f"{format_seconds(min(seconds))} to {format_seconds(max(seconds))}"
        lines += [trend.label, f"    {pluralize(len(seconds), 'run')}, {limits}"]
        for level in trend.levels:
            first_run = trend.times[level.start][0].id
            number = pluralize(level.num_runs, "run")
            lines.append(f"    {format_seconds(math.exp(level.log))} since {first_run} ({number})")
    return "\n".join(lines) + "\n"


def draw_trends(trends: Sequence[Trend], runs: Sequence[StoredRun], file: Path) -> None:
    """Draw the times of each series over the runs, with the levels of its newest runs."""
    from parbench.reports.figures.changes import HistorySeries, chart_history
    from parbench.reports.figures.svg import save_chart

    places = {run.number: place for place, run in enumerate(runs)}
    series = []
    for trend in trends:
        numbers = [places[run.number] for run, _ in trend.times]
        levels = [
            (numbers[level.start], numbers[level.stop - 1], math.exp(level.log))
            for level in trend.levels
        ]
        seconds = [value for _, value in trend.times]
        series.append(
            HistorySeries(
                label=trend.label,
                seconds_by_place=dict(zip(numbers, seconds, strict=True)),
                levels=levels,
            )
        )
    names = [run.commit[:8] or run.started[:10] for run in runs]
    save_chart(chart_history(names, series), file)


def build_time_table(history: History, branch: str | None) -> "DataFrame":
    """Return the seconds of all series, a row per run and a column per series."""
    import pandas as pd

    runs = history.list_runs(branch)
    labels = label_series(history.list_series())
    times = pd.DataFrame(history.read_times(branch), columns=["run", "fingerprint", "seconds"])
    times["label"] = times["fingerprint"].map(labels)
    table = times.pivot(index="run", columns="label", values="seconds")
    table = table.reindex([run.number for run in runs])
    table.insert(0, "time", [run.started for run in runs])
    table.insert(1, "commit", [run.commit for run in runs])
    table.insert(2, "id", [run.id for run in runs])
    return table
