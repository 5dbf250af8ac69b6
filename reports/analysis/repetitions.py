"""The repetitions of a run: how long each took, and the load of its host meanwhile."""

from typing import Any

from parbench.bench.results.runs import Run
from parbench.bench.text import format_duration


def list_repetitions(run: Run) -> list[dict[str, Any]]:
    """Return a row for each repetition of a run (a restart of all ranks), in order.

    A repetition may be started several times, if it was interrupted. A row has these keys:

    - ``repetition``: its number from 1
    - ``seconds``: its duration, summed over its starts
    - ``measuring``: the fraction of this time in which cases were measured, if the time is known
    - ``cores``, ``one_minute``, ``other_cores``, ``steal_percent``, ``disturbance``: the load of
      the host during the longest start, if it is known
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
    """Return the share of a run's duration that went into cases: ``measuring 95 % of 3 min``.

    If the duration is unknown, the phrase has only the time of the cases.
    """
    measuring_seconds = sum(record.seconds for record in run.records)
    seconds = sum(info.seconds for info in run.info.repetitions)
    if not seconds:
        return f"measuring took {format_duration(measuring_seconds)}"
    return f"measuring {100 * measuring_seconds / seconds:.0f} % of {format_duration(seconds)}"


def describe_host_disturbance(run: Run) -> str:
    """Return a clause about the repetition in which other processes used most cores of the host.

    Between equal repetitions, the steal time decides. The clause is empty if none was disturbed.
    """
    repetitions = list_repetitions(run)
    disturbed = [row for row in repetitions if row.get("disturbance")]
    if not disturbed:
        return ""
    worst = max(disturbed, key=lambda row: (row["other_cores"] or 0, row["steal_percent"] or 0))
    text = f"in repetition {worst['repetition']} {worst['disturbance']}"
    if len(disturbed) > 1:
        text += f" ({len(disturbed)} of {len(repetitions)} repetitions are affected)"
    return text
