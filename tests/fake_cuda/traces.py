"""Traces of the stub: one call per line, and questions about them."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PREFIX = "trace."
SYNCHRONIZING = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")
ALLOCATING = ("cudaMalloc", "cudaFree", "cudaHostAlloc")
P2P = ("ncclSend", "ncclRecv")
COLLECTIVES = (
    "ncclAllReduce",
    "ncclReduce",
    "ncclReduceScatter",
    "ncclAllGather",
    "ncclAlltoAll",
    "ncclGather",
    "ncclBroadcast",
)


@dataclass(frozen=True)
class Call:
    """One call: nanoseconds of the host's monotonic clock, thread, function and its fields."""

    time_ns: int
    thread: int
    name: str
    fields: dict[str, str]

    def number(self, field: str) -> int:
        return int(self.fields[field])

    @property
    def is_communication(self) -> bool:
        return self.name in COLLECTIVES or self.name in P2P

    @property
    def waits_for_device(self) -> bool:
        """Return True if the host waits; a copy to memory that is not pinned does so too."""
        return self.name in SYNCHRONIZING or self.fields.get("waits") == "1"


@dataclass(frozen=True)
class Trace:
    """The calls of one process in order of time."""

    process: int
    calls: list[Call]

    def named(self, *names: str) -> list[Call]:
        return [call for call in self.calls if call.name in names]

    @property
    def communicators(self) -> dict[str, tuple[int, int]]:
        """The rank in each communicator, and its number of ranks, by the communicator's name."""
        return {
            call.fields["communicator"]: (call.number("rank"), call.number("ranks"))
            for call in self.named("ncclCommInit")
        }

    @property
    def rank(self) -> int | None:
        """The rank in the first communicator; None for a process without communicators."""
        ranks = [rank for rank, _ in self.communicators.values()]
        return ranks[0] if ranks else None

    def between(self, start: str, end: str) -> list[Call]:
        """Return the calls between two marks."""
        texts = [call.fields["text"] if call.name == "mark" else "" for call in self.calls]
        return self.calls[texts.index(start) + 1 : texts.index(end)]


def parse_call(line: str) -> Call:
    time_ns, thread, name, text = line.split("\t")
    fields = dict(field.split("=", 1) for field in text.split())
    return Call(int(time_ns), int(thread), name, fields)


def read_traces(folder: Path) -> list[Trace]:
    """Return the traces of processes that made communicators, by rank."""
    traces = []
    for path in folder.glob(f"{PREFIX}*"):
        calls = [parse_call(line) for line in path.read_text().splitlines()]
        traces.append(Trace(int(path.name.removeprefix(PREFIX)), calls))
    with_ranks = [trace for trace in traces if trace.rank is not None]
    return sorted(with_ranks, key=lambda trace: (trace.rank or 0, trace.calls[0].time_ns))


@dataclass(frozen=True)
class Region:
    """The calls of a thread between the records of two events whose distance was read."""

    stream: str
    calls: list[Call]

    @property
    def communication(self) -> list[Call]:
        return [call for call in self.calls if call.is_communication]


def timed_regions(calls: Sequence[Call]) -> Iterator[Region]:
    """Yield the timed regions in a trace, with the calls of all threads, as backward has one."""
    recorded: dict[str, int] = {}
    for place, call in enumerate(calls):
        if call.name == "cudaEventRecord":
            recorded[call.fields["event"]] = place
        elif call.name == "cudaEventElapsedTime":
            start, end = recorded[call.fields["start"]], recorded[call.fields["end"]]
            yield Region(calls[start].fields["stream"], list(calls[start + 1 : end]))


def collective_orders(traces: Sequence[Trace]) -> dict[str, list[list[str]]]:
    """Return for each communicator the order of its collectives on each of its ranks."""
    orders: dict[str, list[list[str]]] = defaultdict(list)
    for trace in traces:
        order: dict[str, list[str]] = {name: [] for name in trace.communicators}
        for call in trace.named(*COLLECTIVES):
            order[call.fields["communicator"]].append(f"{call.name} {call.fields['bytes']}")
        for name, calls in order.items():
            orders[name].append(calls)
    return dict(orders)


def left_communicators(trace: Trace) -> set[str]:
    """Return the communicators that a process made and neither destroyed nor aborted."""
    end_calls = trace.named("ncclCommDestroy", "ncclCommAbort")
    return trace.communicators.keys() - {call.fields["communicator"] for call in end_calls}
