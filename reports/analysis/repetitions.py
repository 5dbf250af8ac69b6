"""The repetitions of a run: how long each took, and the load of its host meanwhile."""

from typing import Any

from parbench.bench.results.runs import Run
from parbench.bench.text import format_duration


def list_repetitions(run: Run) -> list[dict[str, Any]]:
    """Return a row for each repetition: its duration, and the load of its host where it is known.

    Of several starts of a repetition, the longest gives the load.
    """
    rows = []
    for repetition in sorted({info.repetition for info in run.info.repetitions}):
        starts = [info for info in run.info.repetitions if info.repetition == repetition]
        records = [record for record in run.records if record.repetition == repetition]
        seconds = sum(info.seconds for info in starts)
        measuring_seconds = sum(record.seconds for record in records)
        row: dict[str, Any] = {"repetition": repetition + 1, "seconds": seconds}
        if seconds:
            row["measuring"] = measuring_seconds / seconds
        load = max(starts, key=lambda info: info.seconds).load
        if load:
            row |= {
                "cores": load.cores,
                "one_minute": load.one_minute,
                "other_cores": load.other_cores,
                "steal_percent": load.steal_percent,
                "disturbance": load.disturbance,
            }
        rows.append(row)
    return rows


def describe_measuring_time(run: Run) -> str:
    """Return a phrase about the share that was measuring: ``measuring 95 % of 3 min``."""
    measuring_seconds = sum(record.seconds for record in run.records)
    seconds = sum(info.seconds for info in run.info.repetitions)
    if not seconds:
        return f"measuring took {format_duration(measuring_seconds)}"
    return f"measuring {100 * measuring_seconds / seconds:.0f} % of {format_duration(seconds)}"


def describe_host_disturbance(run: Run) -> str:
    """Return a clause about the repetition with the most other load, empty if there is none."""
    repetitions = list_repetitions(run)
    disturbed = [row for row in repetitions if row.get("disturbance")]
    if not disturbed:
        return ""
    worst = max(disturbed, key=lambda row: (row["other_cores"] or 0, row["steal_percent"] or 0))
    text = f"in repetition {worst['repetition']} {worst['disturbance']}"
    if len(disturbed) > 1:
        text += f" ({len(disturbed)} of {len(repetitions)} repetitions are affected)"
    return text
