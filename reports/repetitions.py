"""The repetitions of a run: how long each took, and the load of its host meanwhile."""

from dataclasses import dataclass

from parbench.bench.machine.host_load import HostLoad
from parbench.bench.results.runs import Run
from parbench.bench.text import format_duration


@dataclass(frozen=True, kw_only=True)
class RepetitionSummary:
    """A repetition, its duration, and the load of its host."""

    number: int
    """Counts from 1."""
    seconds: float
    measuring_seconds: float
    """The part in which cases were prepared, warmed up, timed and checked."""
    load: HostLoad | None


def summarize_repetitions(run: Run) -> list[RepetitionSummary]:
    """Return the repetitions in order. Of several starts of one, the longest gives the load."""
    summaries = []
    for repetition in sorted({info.repetition for info in run.info.repetitions}):
        starts = [info for info in run.info.repetitions if info.repetition == repetition]
        records = [record for record in run.records if record.repetition == repetition]
        summaries.append(
            RepetitionSummary(
                number=repetition + 1,
                seconds=sum(info.seconds for info in starts),
                measuring_seconds=sum(record.seconds for record in records),
                load=max(starts, key=lambda info: info.seconds).load,
            )
        )
    return summaries


def describe_measuring_time(run: Run) -> str:
    """Return a phrase about the share of the run that was measuring: ``measuring 95 % of 3 min``."""
    measuring_seconds = sum(record.seconds for record in run.records)
    seconds = sum(info.seconds for info in run.info.repetitions)
    if not seconds:
        return f"measuring took {format_duration(measuring_seconds)}"
    return f"measuring {100 * measuring_seconds / seconds:.0f} % of {format_duration(seconds)}"


def describe_host_disturbance(run: Run) -> str:
    """Return a clause about the repetition with the most other load, empty if there is none."""
    repetitions = summarize_repetitions(run)
    disturbed = [
        repetition for repetition in repetitions if repetition.load and repetition.load.disturbance
    ]
    if not disturbed:
        return ""
    worst = max(disturbed, key=_get_other_load)
    assert worst.load is not None
    text = f"in repetition {worst.number} {worst.load.disturbance}"
    if len(disturbed) > 1:
        text += f" ({len(disturbed)} of {len(repetitions)} repetitions are affected)"
    return text


def _get_other_load(repetition: RepetitionSummary) -> tuple[float, float]:
    load = repetition.load
    assert load is not None
    return load.other_cores or 0.0, load.steal_percent or 0.0
