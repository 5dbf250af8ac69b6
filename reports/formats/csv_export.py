"""Exports the metrics of a run as CSV."""

from parbench.reports.frames import build_metrics_frame
from parbench.reports.run_data import RunData


def render_csv(data: RunData) -> bytes:
    """Return the metrics of a run as encoded CSV, a row for each metric of each repetition.

    The columns are those of ``parbench.load``.
    """
    return build_metrics_frame([(data.run, None)]).to_csv(index=False).encode(errors="replace")
