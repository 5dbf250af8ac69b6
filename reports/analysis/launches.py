"""Where a run's time went, and what else its host did in each launch."""

from dataclasses import dataclass

from bench.machine.host_load import HostLoad
from bench.results.runs import Run
from bench.text import format_duration


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A launch by its number from 1: its time (s), that of its measurements, and its host's load if known."""

    number: int
    seconds: float
    measuring_seconds: float
    load: HostLoad | None


def launches_of(run: Run) -> tuple[Launch, ...]:
    """Return the launches in order, each with the load in which it measured longest; nothing of older runs."""
    found = []
    for number in sorted({one.launch for one in run.info.launches}):
        parts = [one for one in run.info.launches if one.launch == number]
        found.append(
            Launch(
                number=number + 1,
                seconds=sum(one.seconds for one in parts),
                measuring_seconds=sum(record.seconds for record in run.records if record.launch == number),
                load=max(parts, key=lambda one: one.seconds).load,
            )
        )
    return tuple(found)


def measuring_words(run: Run) -> str:
    took, whole = sum(record.seconds for record in run.records), sum(one.seconds for one in run.info.launches)
    share = f"{100 * took / whole:.0f} % of {format_duration(whole)}" if whole else f"took {format_duration(took)}"
    return f"measuring {share}"


def disturbed_words(run: Run) -> str:
    """Name the launch beside which its host did most else, and in how many it did much; empty if in none."""
    launches = launches_of(run)
    disturbed = [(one, one.load) for one in launches if one.load and one.load.disturbance]
    if not disturbed:
        return ""
    worst, load = max(disturbed, key=lambda pair: (pair[1].other_cores or 0.0, pair[1].steal_percent or 0.0))
    more = f" (much in {len(disturbed)} of {len(launches)})" if len(disturbed) > 1 else ""
    return f"in launch {worst.number} {load.disturbance}{more}"
