"""A schedule on paper: no action before what it needs, none idle without reason; what cannot run says why and where."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal

from parbench.bench.results.details import Action
from parbench.workloads.pipeline_parallel.schedules import (
    NAMES,
    Result,
    Schedule,
    make_schedule,
    needs,
    peak_held,
    result,
    schedule_from_csv,
)
from parbench.workloads.pipeline_parallel.simulation import Ran, Timeline, check, simulate


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


GOOD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def replace_row(schedule: Schedule, rank: int, row: list[Action]) -> Schedule:
    return replace(schedule, order=(*schedule.order[:rank], tuple(row), *schedule.order[rank + 1 :]))


def test_check_refuses_orders_that_cannot_run() -> None:
    rule = "it needs F and B, or F, I and W, once each"
    for order, message in (
        ("0F0,0F1,0B0,0B1\n1B0,1F0,1F1,1B1\n", "mine deadlocks: rank 0 waits with 0B0 for 1B0, rank 1 waits with 1B0"),
        ("0F0,0W0,0I0\n1F0,1B0\n", "mine deadlocks: rank 0 waits with 0W0 for 0I0"),
        ("0F0,3F0,3B0,0B0\n2F0,1F0,2B0,1B0\n", "mine deadlocks: rank 0 waits with 3F0 for 2F0, rank 1 waits with 2F0"),
        (f"{GOOD.strip()},1B0\n", f"mine: microbatch 0 of stage 1 has B B F: {rule}"),
        ("0F0,0B0,0I0\n1F0,1B0\n", f"mine: microbatch 0 of stage 0 has B F I: {rule}"),
        ("0F0,0B0\n1F0,1I0\n", f"mine: microbatch 0 of stage 1 has F I: {rule}"),
        ("0F0,0B0,0F1\n1F0,1B0,1F1,1B1\n", f"mine: microbatch 1 of stage 0 has F: {rule}"),
        ("0F0,0B0,0F1,0B1\n1F0,1B0\n", f"mine: microbatch 1 of stage 1 has nothing: {rule}"),
    ):
        assert refusal(check, schedule_from_csv(order, "mine")).startswith(message), order


def test_check_refuses_actions_out_of_range_or_on_two_ranks() -> None:
    made = schedule_from_csv(GOOD, "mine")
    size = "stages(2) x microbatches(2)"
    for action, message in (
        (Action(2, "F", 0), f"mine: 2F0 on rank 1 is outside of {size}"),
        (Action(1, "F", 2), f"mine: 1F2 on rank 1 is outside of {size}"),
        (Action(0, "F", 1), "mine: 0F1 is on rank 1, and stage 0 lies on rank 0"),
    ):
        assert refusal(check, replace_row(made, 1, [*made.order[1], action])) == message
    wrong = Schedule(name="mine", order=((Action(0, "F", 0),),), ranks=2, microbatches=1, chunks=1)
    assert refusal(check, wrong) == "mine has rows(1) != ranks(2)"


def test_check_names_the_ranks_of_a_deadlock() -> None:
    """Rank 0 wants a gradient before it sends the microbatch that rank 1 begins with."""
    crossed = "0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n"
    expected = "mine deadlocks: rank 0 waits with 0B0 for 1B0, rank 1 waits with 1F1 for 0F1"
    assert refusal(check, schedule_from_csv(crossed, "mine")) == expected
    rows = "\n".join(f"{stage}B0,{stage}F0" for stage in range(6))
    assert refusal(check, schedule_from_csv(rows, "mine")).endswith(", and 2 more ranks wait")


def test_check_refuses_any_missing_or_repeated_action() -> None:
    for name in NAMES:
        schedule = make_schedule(name, ranks=2, microbatches=4)
        for rank, row in enumerate(schedule.order):
            for step, action in enumerate(row):
                for copies in ([], [action, action]):
                    words = refusal(check, replace_row(schedule, rank, [*row[:step], *copies, *row[step + 1 :]]))
                    assert f"microbatch {action.microbatch} of stage {action.stage} has" in words, name


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(NAMES), st.integers(0, 2**31))
def test_a_shuffled_rank_is_refused_or_still_respects_every_need(name: str, seed: int) -> None:
    """What the check lets pass, a rank-by-rank replay of its own can run."""
    schedule = make_schedule(name, ranks=2, microbatches=4)
    swapped = list(schedule.order[1])
    step = random.Random(seed).randrange(len(swapped) - 1)
    swapped[step : step + 2] = reversed(swapped[step : step + 2])
    candidate = replace_row(schedule, 1, swapped)
    # the slow way: over and over, each rank's first action if what it needs was ever seen
    rows = [list(candidate.actions_of(rank)) for rank in range(2)]
    seen: set[Result] = set()
    for row in rows * sum(map(len, rows)):
        if row and seen.issuperset(needs(row[0], candidate.num_stages)):
            seen.add(result(row.pop(0)))
    if any(rows):
        refusal(check, candidate)
    else:
        check(candidate)


def chunks_held(name: str, ranks: int, microbatches: int, chunks: int = 0) -> list[float]:
    schedule = make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
    return [peak_held(schedule, rank, lambda stage: 1) for rank in range(ranks)]


def test_chunks_in_flight_are_the_tables() -> None:
    """P=4, M=8: GPipe M, 1F1B P-r, ZB-H1 P, ZB-H2 2P-1, LoopedBFS M v, ZB-V P (2P chunks), DualPipeV 2P+1 chunks."""
    for name, expected in {"naive": 1, "gpipe": 8, "zb_h1": 4, "zb_h2": 7, "looped_bfs": 16, "zb_v": 8}.items():
        assert chunks_held(name, 4, 8) == [expected] * 4, name
    assert chunks_held("1f1b", 4, 8) == [4, 3, 2, 1]
    assert chunks_held("dualpipe_v", 4, 8) == [9] * 4
    # fewer microbatches hold no more than there are
    assert chunks_held("1f1b", 4, 2) == [2, 2, 2, 1]
    assert chunks_held("zb_h2", 4, 3) == [3] * 4
    # interleaved, P (1 + (P-1)/(P v)) microbatches of all chunks (arXiv 2205.05198): P v + P - 1 chunks; less behind
    for ranks, chunks in ((2, 2), (4, 2), (4, 3), (8, 2)):
        held = chunks_held("interleaved", ranks, 4 * ranks, chunks)
        assert held[0] == ranks * chunks + ranks - 1
        assert all(one == other + 2 for one, other in pairwise(held))


def test_stages_weigh_what_they_are_said_to_until_their_weight_gradient() -> None:
    schedule = schedule_from_csv("0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0\n")
    assert peak_held(schedule, 0, lambda stage: [1.0, 0, 10.0, 0][stage]) == 11.0
    assert peak_held(schedule, 1, lambda stage: [0, 2.0, 0, 0.5][stage]) == 2.5
    late = schedule_from_csv("0F0,0I0,0F1,0I1,0W0,0W1\n1F0,1I0,1W0,1F1,1I1,1W1\n")
    assert [peak_held(late, rank, lambda stage: 1) for rank in range(2)] == [2, 1]
