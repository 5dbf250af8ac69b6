"""The simulator is a clock: no action before what it needs, no rank twice at once, none idle without reason."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal

from bench.results.details import Action
from workloads.pipeline_parallel.schedules import NAMES, Schedule, make_schedule, needs, result, schedule_from_csv
from workloads.pipeline_parallel.simulate import Ran, Timeline, simulate


def second(action: Action) -> float:
    return 1.0


def ran(rank: int, action: str, start: float, stop: float) -> Ran:
    return Ran(rank=rank, action=Action.parse(action), start=start, stop=stop)


def times(timeline: Timeline, rank: int) -> list[tuple[str, float, float]]:
    return [(str(each.action), each.start, each.stop) for each in timeline.of(rank)]


def test_a_small_pipeline_runs_as_drawn() -> None:
    """1F1B on two ranks with two microbatches, a forward 1 s, a backward 2 s."""
    timeline = simulate(make_schedule("1f1b", ranks=2, microbatches=2), lambda action: 1 + (action.kind == "B"))
    assert times(timeline, 0) == [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 4, 6), ("0B1", 7, 9)]
    assert times(timeline, 1) == [("1F0", 1, 2), ("1B0", 2, 4), ("1F1", 4, 5), ("1B1", 5, 7)]
    assert timeline.makespan == 9
    assert (timeline.busy(0), timeline.busy(1)) == (6, 6)
    assert (timeline.span(0), timeline.span(1)) == (9, 6)
    assert timeline.idle == 6


TWO = "0F0,0B0\n1F0,1B0\n"


def test_a_message_between_ranks_takes_its_latency_and_the_turn_of_a_v_none() -> None:
    timeline = simulate(schedule_from_csv(TWO), second, lambda source, target: 0.5 if source < target else 0.25)
    assert times(timeline, 1) == [("1F0", 1.5, 2.5), ("1B0", 2.5, 3.5)]
    assert times(timeline, 0) == [("0F0", 0, 1), ("0B0", 3.75, 4.75)]
    # a table of those known says the same, and what it does not know takes none
    assert simulate(schedule_from_csv(TWO), second, {(0, 1): 0.5, (1, 0): 0.25}) == timeline
    assert times(simulate(schedule_from_csv(TWO), second, {}), 1)[0] == ("1F0", 1, 2)
    v = simulate(schedule_from_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n"), second, lambda source, target: 10)
    assert times(v, 1)[:2] == [("1F0", 11, 12), ("2F0", 12, 13)]
    # steps without work take no time
    with_steps = schedule_from_csv("0F0,,,0B0\n,1F0,1B0\n")
    assert simulate(with_steps, second).ran == simulate(schedule_from_csv(TWO), second).ran


def test_at_a_rendezvous_a_message_sets_out_once_its_receiver_is_free() -> None:
    schedule = make_schedule("gpipe", ranks=2, microbatches=3)
    at_once, asked_for = (
        simulate(schedule, second, {(0, 1): 0.25, (1, 0): 0.25}, rendezvous=rendezvous) for rendezvous in (False, True)
    )
    forwards = [[ran.start for ran in timeline.of(1)[:3]] for timeline in (at_once, asked_for)]
    assert forwards == [[1.25, 2.25, 3.25], [1.25, 2.5, 3.75]]
    assert asked_for.makespan == pytest.approx(at_once.makespan + 2 * 2 * 0.25)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(NAMES), st.integers(2, 4), st.integers(0, 2**31))
def test_every_action_starts_as_soon_as_it_can_and_no_sooner(name: str, ranks: int, seed: int) -> None:
    """Against the definition: start = max(rank free, all that it needs + latency), for times of any length."""
    draw = random.Random(seed).uniform
    schedule = make_schedule(name, ranks=ranks, microbatches=2 * ranks)
    seconds = {action: draw(0.0, 3.0) for rank in range(ranks) for action in schedule.actions_of(rank)}
    latency = {(source, target): draw(0.0, 2.0) for source in range(ranks) for target in range(ranks)}
    timeline = simulate(schedule, seconds.__getitem__, latency)
    made = {result(each.action): each for each in timeline.ran}
    for rank in range(ranks):
        assert tuple(each.action for each in timeline.of(rank)) == schedule.actions_of(rank)
        free_at = 0.0
        for each in timeline.of(rank):
            sources = [made[need] for need in needs(each.action, schedule.num_stages)]
            arrivals = [source.stop + (latency[source.rank, rank] if source.rank != rank else 0) for source in sources]
            assert each.start == max([free_at, *arrivals])
            assert each.stop == each.start + seconds[each.action]
            free_at = each.stop
    assert timeline.idle == pytest.approx(ranks * timeline.makespan - sum(seconds.values()))


def test_a_measured_timeline_may_start_anywhere_overlap_and_be_out_of_order() -> None:
    timeline = Timeline(ranks=2, ran=(ran(1, "1F0", 103, 104), ran(0, "0B0", 107, 109), ran(0, "0F0", 100, 102)))
    assert [str(each.action) for each in timeline.of(0)] == ["0F0", "0B0"]
    assert (timeline.first_start, timeline.makespan, timeline.span(0)) == (100, 9, 9)
    assert timeline.idle == 18 - 4 - 1
    # what overlaps is busy once
    timeline = Timeline(ranks=1, ran=(ran(0, "0F0", 0, 5), ran(0, "0F1", 1, 2), ran(0, "0B0", 4, 7)))
    assert timeline.busy(0) == timeline.span(0) == 7
    assert timeline.idle == 0
    # a rank that ran nothing is idle all along
    timeline = Timeline(ranks=2, ran=(ran(0, "0F0", 0, 5),))
    assert (timeline.busy(1), timeline.span(1), timeline.idle, timeline.of(1)) == (0, 0, 5, ())
    empty = Timeline(ranks=2, ran=())
    assert (empty.makespan, empty.idle) == (0, 0)


def test_an_order_that_waits_for_what_nobody_runs_is_refused() -> None:
    short = Schedule(name="mine", order=((Action(0, "F", 0),), (Action(1, "B", 0),)), ranks=2, microbatches=1, chunks=1)
    assert refusal(simulate, short, second) == "mine deadlocks: rank 1 waits with 1B0 for 1F0, which nobody runs"


@pytest.mark.full
@pytest.mark.measures
def test_sixty_four_ranks_of_two_chunks_and_256_microbatches_take_about_a_second() -> None:
    schedule = make_schedule("interleaved", ranks=64, microbatches=256, chunks=2)
    started = time.process_time()
    timeline = simulate(schedule, second)
    assert time.process_time() - started < 2.0  # half a second where nobody else is at work
    assert len(timeline.ran) == 64 * 2 * 256 * 2
