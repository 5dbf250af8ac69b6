"""The schedules that could have been taken, with the times of the one that was."""

from dataclasses import replace

import pytest

from workloads.pipeline_parallel.bubbles import bubble_fraction
from workloads.pipeline_parallel.schedule_comparison import Setting, Shares, compare, mean_latency, shares_of
from workloads.pipeline_parallel.schedules import NAMES, make_schedule
from workloads.pipeline_parallel.simulate import simulate

EQUAL = Shares(f=1.0, i=1.0, w=1.0, assumed_halves=False)
SETTING = Setting(ranks=4, microbatches=8, layers=8, layer_bytes=100.0, latency_seconds=0.0, outside_seconds=0.5)


def test_every_schedule_has_a_line_the_fastest_first_and_latency_makes_all_slower() -> None:
    told = compare(EQUAL, SETTING)
    assert {line.schedule for line in told} == set(NAMES)
    seconds = {line.schedule: line.step_seconds or 0.0 for line in told}
    assert list(seconds.values()) == sorted(seconds.values())
    assert not any(line.measured for line in told)
    for line in compare(EQUAL, replace(SETTING, latency_seconds=0.1)):
        assert (line.step_seconds or 0.0) > seconds[line.schedule]


def test_a_line_is_the_simulation_and_the_time_around_it() -> None:
    lines = {line.schedule: line for line in compare(EQUAL, SETTING)}
    line = lines["1f1b"]
    timeline = simulate(make_schedule("1f1b", ranks=4, microbatches=8), lambda a: 2.0 if a.kind == "B" else 1.0)
    assert line.step_seconds == pytest.approx(timeline.makespan + 0.5)
    assert line.bubble_fraction == pytest.approx(bubble_fraction(timeline)) == pytest.approx(3 / 11)
    assert (line.in_flight, line.activation_bytes) == (4.0, 4 * 2 * 100.0)
    # chunks take their part of the time and hold their part of the layers
    line = lines["interleaved"]
    assert line.chunks == 2
    assert line.bubble_fraction == pytest.approx(3 / 19)
    assert line.activation_bytes == pytest.approx((line.in_flight or 0.0) * 2 * 100.0)
    # layers without a closed form have no bytes in any line
    told = compare(EQUAL, replace(SETTING, layer_bytes=None))
    assert [line.activation_bytes for line in told] == [None] * len(NAMES)


def test_what_cannot_run_says_why_and_stands_last() -> None:
    told = compare(EQUAL, replace(SETTING, layers=4))
    refused = tuple(line for line in told if line.why_not)
    assert told[-len(refused) :] == refused
    of_two_chunks = {"interleaved", "looped_bfs", "interleaved_zb", "zb_v", "dualpipe_v"}
    assert {line.schedule for line in refused} == of_two_chunks
    assert all("layers(4) % stages(8) != 0" in line.why_not for line in refused)
    assert all(line.step_seconds is None for line in refused)


def test_shares_are_means_over_all_stages_times_the_chunks() -> None:
    schedule = make_schedule("interleaved_zb", ranks=2, microbatches=4, chunks=2)
    times = {"F": 1.0, "I": 2.0, "W": 3.0, "B": 5.0}
    timeline = simulate(schedule, lambda action: times[action.kind] * (1 + action.stage % 2))
    shares = shares_of((timeline, timeline), 2)
    assert (shares.f, shares.i, shares.w) == pytest.approx((3.0, 6.0, 9.0))
    assert not shares.assumed_halves
    # a whole backward is taken for two halves, and says so
    timeline = simulate(make_schedule("gpipe", ranks=2, microbatches=2), lambda a: 4.0 if a.kind == "B" else 1.5)
    assert shares_of((timeline,), 1) == Shares(f=1.5, i=2.0, w=2.0, assumed_halves=True)
    assert (mean_latency({(0, 1): 0.25, (1, 0): 0.75}), mean_latency({})) == (0.5, 0.0)
