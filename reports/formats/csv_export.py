"""Exports the metrics of a run as CSV."""

from parbench.reports.frames import build_metrics_frame
from parbench.reports.run_data import RunData
from parbench.reports.sweeps import find_point


def render_csv(data: RunData) -> bytes:
    """Return the metrics of a run as encoded CSV, a row for each metric of each repetition.

    The columns are those of ``parbench.load``.
    """
    point = find_point(data.run.path)
    frame = build_metrics_frame([(data.run, point.name if point else None)])
    return frame.to_csv(index=False).encode(errors="replace")
