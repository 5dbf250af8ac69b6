"""One step of all ranks as intervals on one clock: what a trace file holds. Pure.

Files lie in a run's ``traces/``, one for a case and launch: JSON, compressed.
"""

import gzip
from collections.abc import Iterable

import msgspec

COMPUTE, COPY, PHASE = "compute", "copy", "phase"
COMM = "comm"
"""Communication's streams are named ``comm AXIS``."""
MOST_INTERVALS = 200_000


class Interval(msgspec.Struct, frozen=True, array_like=True):
    """What a stream of a rank was doing, in microseconds since the first rank began."""

    stream: str
    name: str
    start_us: float
    stop_us: float


class RankTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's step, from ``start_us`` to ``stop_us``; of its streams only communication's may overlap themselves."""

    rank: int
    start_us: float
    stop_us: float
    intervals: tuple[Interval, ...]


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """The same step of every rank; ``clock`` says how their clocks were brought together, and how well."""

    clock: str
    uncertainty_seconds: float
    ranks: tuple[RankTimeline, ...]

    @property
    def num_intervals(self) -> int:
        """Intervals of all ranks."""
        return sum(len(rank.intervals) for rank in self.ranks)


def encode_timeline(timeline: Timeline) -> bytes:
    """Return the file's content; the same timeline is the same bytes."""
    return gzip.compress(msgspec.json.encode(timeline), mtime=0)


def decode_timeline(content: bytes) -> Timeline:
    """Return the timeline of a file; ``ValueError`` if it is none."""
    try:
        return msgspec.json.decode(gzip.decompress(content), type=Timeline)
    except (OSError, EOFError, msgspec.MsgspecError) as error:
        raise ValueError(str(error)) from error


def streams_of(intervals: Iterable[Interval]) -> tuple[str, ...]:
    """Return the streams in the order in which they are shown: phases, compute, copies, then communication."""
    found = dict.fromkeys(interval.stream for interval in intervals)
    order = {PHASE: 0, COMPUTE: 1, COPY: 2}
    return tuple(sorted(found, key=lambda stream: order.get(stream, 3)))
