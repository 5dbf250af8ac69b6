"""The repetitions of a run: how long each took, and the load of its host meanwhile."""

from typing import Any

from parbench.bench.results.runs import Run
from parbench.bench.text import format_duration


def list_repetitions(run: Run) -> list[dict[str, Any]]:
    """Return a row for each repetition of a run (a restart of all ranks), in order.

    ``repetition`` is its number from 1, ``seconds`` its duration summed over its starts,
    ``measuring`` the share of that time that records cover. The load of the host follows where it
    is known: ``cores``, ``one_minute``, ``other_cores``, ``steal_percent`` and ``disturbance``. If
    a repetition was started several times, the load is that of the longest start.
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
    """Return a clause about the repetition in which other processes loaded the host most.

    The clause is empty if no repetition was disturbed. Steal time decides between equal loads.
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
