"""Steps as trace events: no overlap on a thread, sums that are the row's numbers, what other tools read."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from traced import rank_timeline, timeline, traced_record

from bench.timeline import Interval, RankTimeline, Timeline
from reports.step_trace import Event, for_analysis, step_events


def events(one: Timeline | None = None, first: int = 0, prefix: str = "") -> list[Event]:
    return list(step_events(one or timeline(), first, prefix))


def complete(every: Iterable[Event]) -> list[Event]:
    return [event for event in every if event["ph"] == "X"]


def threads(every: Iterable[Event]) -> dict[tuple[int, int], list[Event]]:
    found: dict[tuple[int, int], list[Event]] = {}
    for event in complete(every):
        found.setdefault((event["pid"], event["tid"]), []).append(event)
    return found


def names(every: Iterable[Event], what: str) -> dict[tuple[int, Any], str]:
    return {(one["pid"], one.get("tid")): one["args"]["name"] for one in every if one["name"] == what}


def assert_no_overlap(every: list[Event]) -> None:
    for told in threads(every).values():
        for before, after in pairwise(told):
            assert round(before["ts"] + before["dur"], 3) <= after["ts"]


def test_ranks_are_processes_and_streams_threads() -> None:
    every = events(first=4, prefix="ddp: ")
    assert names(every, "process_name") == {(4, None): "ddp: rank 0", (5, None): "ddp: rank 1"}
    assert {name for (pid, _), name in names(every, "thread_name").items() if pid == 4} == {
        "phases",
        "compute",
        "copies",
        "comm dp (1 of 2)",
        "comm dp (2 of 2)",
    }


def test_events_of_a_thread_do_not_overlap() -> None:
    assert_no_overlap(events())
    assert len(threads(events())) == 2 * 5


def test_rounding_makes_nothing_overlap() -> None:
    told = [Interval("compute", "compute", i / 3, (i + 1) / 3) for i in range(3000)]
    one = RankTimeline(rank=0, start_us=0.0, stop_us=1000.0, intervals=tuple(told))
    assert_no_overlap(events(Timeline(clock="c", uncertainty_seconds=0.0, ranks=(one,))))


def test_many_axes_never_share_a_thread() -> None:
    told = [Interval(f"comm axis{i % 3}", "x", float(i), i + 2.5) for i in range(30)]
    one = RankTimeline(rank=0, start_us=0.0, stop_us=40.0, intervals=tuple(told))
    every = events(Timeline(clock="c", uncertainty_seconds=0.0, ranks=(one,)))
    assert_no_overlap(every)
    for told_of in threads(every).values():
        assert len({event["args"]["axis"] for event in told_of}) == 1
    assert len(complete(every)) == 30


@pytest.mark.parametrize(("stream", "metric"), [(2, "compute"), (3, "exposed_copy")])
def test_a_streams_events_add_up_to_the_rows_number(stream: int, metric: str) -> None:
    value = traced_record().metrics[metric].value
    for pid in (0, 1):
        told = [event["dur"] for event in complete(events()) if (event["pid"], event["tid"]) == (pid, stream)]
        assert value is not None
        assert sum(told) == pytest.approx(value * 1e6)


def test_what_a_stream_exposes_is_the_rows_number() -> None:
    comm = [event for event in complete(events()) if event["pid"] == 0 and "axis" in event["args"]]
    computing = [event for event in complete(events()) if event["pid"] == 0 and event["cat"] == "kernel"]
    covered = {us for one in comm for us in range(round(one["ts"]), round(one["ts"] + one["dur"]))}
    hidden = {us for one in computing for us in range(round(one["ts"]), round(one["ts"] + one["dur"]))}
    value = traced_record().metrics["exposed_comm.dp"].value
    assert value is not None
    assert len(covered - hidden) == pytest.approx(value * 1e6, abs=1)


def test_phases_are_named_in_the_fields_terms() -> None:
    told = [event for event in complete(events()) if event["pid"] == 1 and event["tid"] == 1]
    assert [(one["name"], one["ts"], one["dur"]) for one in told] == [
        ("forward", 100.0, 3000.0),
        ("backward", 3100.0, 5500.0),
        ("update", 8600.0, 1500.0),
    ]
    assert all(one["cat"] == "user_annotation" and one["args"] == {} for one in told)


def test_names_come_before_what_they_name() -> None:
    named: set[tuple[int, Any]] = set()
    for event in events():
        if event["ph"] == "M":
            named.add((event["pid"], event.get("tid")))
        else:
            assert {(event["pid"], None), (event["pid"], event["tid"])} <= named


def test_for_analysis_kernels_are_told_apart_by_their_names() -> None:
    document = for_analysis(rank_timeline(3))
    assert document["distributedInfo"] == {"rank": 3}
    told = {(one["cat"], one["name"]) for one in complete(document["traceEvents"])}
    assert told == {
        ("user_annotation", "forward"),
        ("user_annotation", "backward"),
        ("user_annotation", "update"),
        ("kernel", "compute"),
        ("kernel", "ncclDevKernel_all_reduce"),
        ("gpu_memcpy", "Memcpy copy"),
    }
    streams = {one["args"]["stream"] for one in complete(document["traceEvents"]) if "stream" in one["args"]}
    assert len(streams) == 4
