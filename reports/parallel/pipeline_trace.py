"""A pipeline step as Chrome's trace events: what ran, why ranks idled, and what was predicted. Pure.

Each rank is a process whose first thread holds its actions and whose second says why it idles; what was predicted
stands in processes of its own. The step's first action begins at 0 us.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from bench.machine.world_spec import FUNCTIONAL_ONLY
from bench.results.details import Idle, Ran
from reports.parallel.pipeline import Pipeline

_ACTIONS, _CAUSES = (1, "pipeline"), (2, "idle causes")
Event = dict[str, Any]


def why_not(one: Pipeline) -> str:
    """Return why a pipeline's ranks cannot be drawn on one axis of time, empty if they can."""
    if one.facts.measured is None:
        functional = next((f": {note}" for note in one.row.notes if note.startswith(FUNCTIONAL_ONLY)), "")
        return f"the record has no measured timeline{functional}"
    if not one.facts.clock:
        return "the record names no clock that its ranks share, and ranks on different clocks must not be merged"
    return ""


def pipeline_clock(one: Pipeline) -> Event:
    """Return what is known of the clock that the ranks share."""
    return {
        "method": one.facts.clock,
        "uncertainty_seconds": one.facts.clock_uncertainty_seconds,
        "launch": one.launch + 1,
    }


def pipeline_events(one: Pipeline, first: int, start: str = "") -> Iterator[Event]:
    """Yield a case's events from process ``first`` on: each process's names, then what it did, in order of time."""
    ranks = one.facts.ranks
    for rank in range(ranks):
        idle = [gap for gap in one.facts.idle or () if gap.rank == rank]
        yield from _process(first + rank, f"{start}rank {rank}")
        yield from _thread(first + rank, _ACTIONS, one.facts.measured[rank] if one.facts.measured else (), _of_action)
        yield from _thread(first + rank, _CAUSES, idle, _of_idle)
    for rank, ran in enumerate(one.facts.predicted or ()):
        yield from _process(first + ranks + rank, f"{start}rank {rank} (predicted)")
        yield from _thread(first + ranks + rank, _ACTIONS, ran, _of_action)


def _process(pid: int, name: str) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}


def _thread(
    pid: int, thread: tuple[int, str], told: Sequence[Ran] | Sequence[Idle], more: Callable[[Any], Event]
) -> Iterator[Event]:
    """Yield a thread's name and its complete events; a thread without any has no name either."""
    tid, name = thread
    if told:
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
    for one in told:
        yield {"ph": "X", "pid": pid, "tid": tid, "ts": one.start_us, "dur": one.stop_us - one.start_us, **more(one)}


def _of_action(ran: Ran) -> Event:
    return {"name": ran.name, "cat": ran.action.kind, "args": asdict(ran.action)}


def _of_idle(idle: Idle) -> Event:
    return {"name": idle.cause, "cat": "idle", "args": {"cause": idle.cause}}
