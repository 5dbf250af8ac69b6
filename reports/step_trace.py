"""One traced step as Chrome's trace events: each rank is a process, each stream a thread. Pure.

Communication of one axis may overlap itself, and complete events of a thread must not: it takes as many threads as need
be. Beside the names that viewers show, events bear what HolisticTraceAnalysis reads: a category and a stream.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from bench.results.records import COMPUTE, COPY, PHASE, Interval, RankTimeline, Timeline
from reports.timelines import axis_of, by_stream, lanes, stream_words

Event = dict[str, Any]
_FIRST_COMM = 8
_THREADS = {PHASE: 1, COMPUTE: 2, COPY: 3}
_CATEGORIES = {PHASE: "user_annotation", COMPUTE: "kernel", COPY: "gpu_memcpy"}
# by these beginnings of names, HolisticTraceAnalysis tells communication and copies from arithmetic
_COMM, _COPY = "ncclDevKernel_", "Memcpy "


def step_events(timeline: Timeline, first_pid: int, prefix: str = "") -> Iterator[Event]:
    """Yield a step's events, process by process, names first; times in us since the first rank began."""
    for place, rank in enumerate(timeline.ranks):
        yield from rank_events(rank, first_pid + place, prefix)


def rank_events(rank: RankTimeline, pid: int, prefix: str = "") -> Iterator[Event]:
    """Yield one rank's events: those of a process."""
    yield _named("process_name", pid, name=f"{prefix}rank {rank.rank}")
    yield _named("process_sort_index", pid, sort_index=pid)
    comm = _FIRST_COMM
    for stream, intervals in by_stream(rank).items():
        split = lanes(intervals)
        for number, lane in enumerate(split, start=1):
            tid = _THREADS.get(stream, comm) if number == 1 else comm
            comm += tid >= _FIRST_COMM
            more = f" ({number} of {len(split)})" if len(split) > 1 else ""
            yield from _thread(pid, tid, stream, f"{stream_words(stream)}{more}", lane)


def for_analysis(rank: RankTimeline) -> Event:
    """Return one rank's document as HolisticTraceAnalysis reads it: kernels told apart by their names."""
    events = [_as_kernel(event) for event in rank_events(rank, rank.rank)]
    return {"schemaVersion": 1, "distributedInfo": {"rank": rank.rank}, "traceEvents": events}


def _thread(pid: int, tid: int, stream: str, name: str, lane: Sequence[Interval]) -> Iterator[Event]:
    yield _named("thread_name", pid, tid, name=name)
    yield _named("thread_sort_index", pid, tid, sort_index=tid)
    axis = axis_of(stream)
    # a phase is the host's: with a stream, HolisticTraceAnalysis would take it for a kernel
    args = ({} if stream == PHASE else {"stream": tid}) | ({} if axis is None else {"axis": axis})
    for one in lane:
        # rounded by its ends, not its length, so that neighbours cannot come to overlap
        start, stop = round(one.start_us, 3), round(one.stop_us, 3)
        yield {
            "ph": "X",
            "name": one.name,
            "cat": _CATEGORIES.get(stream, "communication"),
            "pid": pid,
            "tid": tid,
            "ts": start,
            "dur": round(stop - start, 3),
            "args": args,
        }


def _named(what: str, pid: int, tid: int | None = None, **args: Any) -> Event:
    place = {"pid": pid} if tid is None else {"pid": pid, "tid": tid}
    return {"ph": "M", "name": what, **place, "args": args}


def _as_kernel(event: Event) -> Event:
    category = event.get("cat")
    if category == "communication":
        return {**event, "cat": "kernel", "name": f"{_COMM}{event['name']}"}
    return {**event, "name": f"{_COPY}{event['name']}"} if category == "gpu_memcpy" else event
