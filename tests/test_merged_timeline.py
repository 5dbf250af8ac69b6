"""One traced step of all ranks is on one clock, and its intervals are those that the breakdown counts."""

from dataclasses import replace

import pytest
from ranks import Ranks
from test_training import small

from bench.timeline import Timeline
from bench.world import World
from workloads.communication import Call, counted
from workloads.merged_timeline import merged_timeline, rank_timeline
from workloads.trace import Trace, trace_step

US = 1000
TRACE = Trace(
    step=(5 * US, 25 * US),
    wall_seconds=20e-6,
    compute=[(4 * US, 10 * US), (15 * US, 20 * US)],
    comm=[(9 * US, 16 * US), (18 * US, 30 * US)],
    copies=[(8 * US, 12 * US)],
    called=[],
    busy=[],
    began_ns=1_000_000,
    phases=[("forward", (5 * US, 14 * US)), ("backward", (14 * US, 25 * US))],
)
CALLS = (
    Call(axis="dp", op="all_reduce", num_bytes=4, ranks=2),
    Call(axis="tp", op="all_gather", num_bytes=4, ranks=2),
)


def shown(late_us: int = 0) -> list[tuple[str, str, float, float]]:
    found = rank_timeline(0, TRACE, ["dp", "tp"], ["all_reduce", "all_gather"], late_us * US)
    return [(one.stream, one.name, one.start_us, one.stop_us) for one in found.intervals]


def test_intervals_are_clipped_to_the_step_and_begin_with_it() -> None:
    assert shown() == [
        ("phase", "forward", 0.0, 9.0),
        ("phase", "backward", 9.0, 20.0),
        ("compute", "compute", 0.0, 5.0),
        ("compute", "compute", 10.0, 15.0),
        ("copy", "copy", 5.0, 7.0),
        ("comm dp", "all_reduce", 4.0, 11.0),
        ("comm tp", "all_gather", 13.0, 20.0),
    ]


def test_a_rank_that_began_later_is_later_in_everything() -> None:
    assert shown(3) == [(stream, name, start + 3, stop + 3) for stream, name, start, stop in shown()]
    late = rank_timeline(1, TRACE, ["dp", "tp"], ["a", "b"], 3 * US)
    assert (late.rank, late.start_us, late.stop_us) == (1, 3.0, 23.0)


def merged(world: World, offsets_ns: tuple[int, ...]) -> Timeline | None:
    """Return the timeline of ranks that began 2 us after one another on clocks that are apart."""
    own = TRACE.began_ns + 2 * US * world.rank + offsets_ns[world.rank]
    apart = replace(world, clock=replace(world.clock, offsets_ns=offsets_ns, uncertainty_ns=500))
    return merged_timeline(apart, replace(TRACE, began_ns=own), ["dp", "tp"], CALLS)


@pytest.mark.parametrize("offsets_ns", [(0, 0), (0, 77_000_000)])
def test_ranks_clocks_are_brought_together(two_ranks: Ranks, offsets_ns: tuple[int, ...]) -> None:
    for found in two_ranks.call("test_merged_timeline:merged", offsets_ns=offsets_ns):
        assert [rank.start_us for rank in found.ranks] == [0.0, 2.0]
        assert found.uncertainty_seconds == 5e-7


def of_a_step(world: World) -> tuple[Timeline | None, float]:
    """Return the timeline of a real step, and the seconds that this rank computes by its trace."""
    step = small(world, "ddp", {})
    step.step()
    step.reset()
    calls = counted(step.step, step.layout.axes)
    for _ in range(2):  # the first time torch's profiler misses some of gloo's events
        step.reset()
        trace = trace_step(step.step, world.device)
    found = merged_timeline(world, trace, ["dp"] * len(trace.comm), calls)
    step.close()
    return found, sum(stop - start for start, stop in trace.compute) / 1e9


def test_a_real_step_has_phases_and_adds_up_to_its_trace(two_ranks: Ranks) -> None:
    for rank, (found, compute_seconds) in enumerate(two_ranks.call("test_merged_timeline:of_a_step")):
        mine = found.ranks[rank]
        streams = {one.stream for one in mine.intervals}
        assert streams == {"phase", "compute", "comm dp"}
        phases = [one.name for one in mine.intervals if one.stream == "phase"]
        assert phases == ["forward", "backward", "update"]
        computed = sum(one.stop_us - one.start_us for one in mine.intervals if one.stream == "compute") / 1e6
        assert computed == pytest.approx(compute_seconds, rel=1e-6)
        assert all(mine.start_us <= one.start_us < one.stop_us <= mine.stop_us for one in mine.intervals)
        assert {one.name for one in mine.intervals if one.stream == "comm dp"} <= {"all_reduce", "communication"}
