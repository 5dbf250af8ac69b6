"""A step of all ranks as it lies in a file."""

import gzip
import json

import pytest

from bench.timeline import Interval, RankTimeline, Timeline, decode_timeline, encode_timeline, streams_of

TIMELINE = Timeline(
    clock="one host, one monotonic clock",
    uncertainty_seconds=0.0,
    ranks=tuple(
        RankTimeline(
            rank=rank,
            start_us=0.5 * rank,
            stop_us=10.0,
            intervals=(Interval("comm dp", "all_reduce", 2.0, 4.25), Interval("compute", "compute", 1.0, 3.0)),
        )
        for rank in range(2)
    ),
)


def test_what_is_written_is_read_back() -> None:
    assert decode_timeline(encode_timeline(TIMELINE)) == TIMELINE


def test_the_same_timeline_is_the_same_bytes_and_plain_json() -> None:
    content = encode_timeline(TIMELINE)
    assert content == encode_timeline(TIMELINE)
    [first, _] = json.loads(gzip.decompress(content))["ranks"]
    assert first["intervals"] == [["comm dp", "all_reduce", 2.0, 4.25], ["compute", "compute", 1.0, 3.0]]


def test_intervals_of_all_ranks_are_counted() -> None:
    assert TIMELINE.num_intervals == 4


@pytest.mark.parametrize("content", [b"", b"{}", gzip.compress(b"{}"), gzip.compress(b'{"ranks": 3'), b"\x1f\x8b\x08"])
def test_what_is_no_timeline_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        decode_timeline(content)


def test_streams_stand_in_the_order_in_which_they_are_shown() -> None:
    names = ("comm tp", "copy", "compute", "comm dp", "phase", "compute")
    intervals = [Interval(name, "x", 0.0, 1.0) for name in names]
    assert streams_of(intervals) == ("phase", "compute", "copy", "comm tp", "comm dp")
