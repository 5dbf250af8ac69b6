"""A history as the CSV that Apache Otava reads: a row for each run, a column for each series in seconds."""

import csv
import io

from reports.comparing.history import History, Line
from reports.comparing.history_entry import Identity


def render_otava(history: History, branch: str | None) -> str:
    """Return the runs in the order of time, their commits, and the time of every series; unknown is empty.

    Otava's configuration names ``time`` as ``time_column`` and ``commit`` and ``run`` as ``attributes``.
    """
    lines = history.runs(branch)
    series = history.series()
    times = {number: dict(history.times_of_series(number)) for number in series}
    ours = {line.number for line in lines}
    shown = [number for number in series if ours & times[number].keys()]
    names = _names([(number, series[number]) for number in shown])
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["time", "commit", "run", *(names[number] for number in shown)])
    for line in lines:
        writer.writerow([*_head(line), *(_cell(times[number].get(line.number)) for number in shown)])
    return out.getvalue()


def _head(line: Line) -> list[str]:
    return [line.started, line.commit, line.id]


def _names(series: list[tuple[int, Identity]]) -> dict[int, str]:
    """Return a column's name for each series: its label, with the fingerprint where two bear the same one."""
    labels = [one.case.label for _, one in series]
    return {
        number: label if labels.count(label) == 1 else f"{label} #{one.fingerprint}"
        for (number, one), label in zip(series, labels, strict=True)
    }


def _cell(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.9g}"
