"""A simulated action starts once its inputs have arrived, and orders that cannot run are refused."""

import random
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from tests.support.refusals import usage_error

TWO_RANKS = "0F0,0B0\n1F0,1B0\n"


def one_second(action: Action) -> float:
    return 1.0


def make_ran(rank: int, action: str, start: float, stop: float) -> Ran:
    return Ran(rank=rank, action=Action.parse(action), start=start, stop=stop)


def times(timeline: Timeline, rank: int) -> list[tuple[str, float, float]]:
    return [(str(ran.action), ran.start, ran.stop) for ran in timeline.of(rank)]


def test_simulate_1f1b() -> None:
    """A forward pass takes 1 s, a backward pass 2 s."""
    schedule = make_schedule("1f1b", ranks=2, microbatches=2)
    timeline = simulate(schedule, lambda action: 2 if action.kind == "B" else 1)
    assert times(timeline, 0) == [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 4, 6), ("0B1", 7, 9)]
    assert times(timeline, 1) == [("1F0", 1, 2), ("1B0", 2, 4), ("1F1", 4, 5), ("1B1", 5, 7)]
    assert (timeline.makespan, timeline.idle) == (9, 6)
    assert (timeline.busy(0), timeline.span(0)) == (6, 9)
    assert (timeline.busy(1), timeline.span(1)) == (6, 6)


def test_simulate_adds_latency_between_ranks() -> None:
    schedule = schedule_from_csv(TWO_RANKS)
    timeline = simulate(schedule, one_second, lambda source, target: 0.5 if source == 0 else 0.25)
    assert times(timeline, 1) == [("1F0", 1.5, 2.5), ("1B0", 2.5, 3.5)]
    assert times(timeline, 0) == [("0F0", 0, 1), ("0B0", 3.75, 4.75)]
    assert simulate(schedule, one_second, {(0, 1): 0.5, (1, 0): 0.25}) == timeline
    assert times(simulate(schedule, one_second, {}), 1)[0] == ("1F0", 1, 2)


def test_simulate_adds_no_latency_within_a_rank() -> None:
    schedule = schedule_from_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n")
    timeline = simulate(schedule, one_second, lambda source, target: 10)
    assert times(timeline, 1)[:2] == [("1F0", 11, 12), ("2F0", 12, 13)]


def test_simulate_rendezvous_waits_for_receiver() -> None:
    schedule = make_schedule("gpipe", ranks=2, microbatches=3)
    links = {(0, 1): 0.25, (1, 0): 0.25}
    eager = simulate(schedule, one_second, links, rendezvous=False)
    rendezvous = simulate(schedule, one_second, links, rendezvous=True)
    assert [ran.start for ran in eager.of(1)[:3]] == [1.25, 2.25, 3.25]
    assert [ran.start for ran in rendezvous.of(1)[:3]] == [1.25, 2.5, 3.75]
    assert rendezvous.makespan == pytest.approx(eager.makespan + 2 * 2 * 0.25)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(NAMES), st.integers(2, 4), st.integers(0, 2**31))
def test_simulate_starts_as_early_as_possible(name: str, ranks: int, seed: int) -> None:
    """An action starts when its rank is free and all that it needs has arrived."""
    draw = random.Random(seed).uniform
    schedule = make_schedule(name, ranks=ranks, microbatches=2 * ranks)
    actions = [action for rank in range(ranks) for action in schedule.actions_of(rank)]
    seconds = {action: draw(0.0, 3.0) for action in actions}
    latency = {link: draw(0.0, 2.0) for link in product(range(ranks), range(ranks))}
    timeline = simulate(schedule, seconds.__getitem__, latency)
    producers = {result(ran.action): ran for ran in timeline.ran}
    for rank in range(ranks):
        assert tuple(ran.action for ran in timeline.of(rank)) == schedule.actions_of(rank)
        start = 0.0
        for ran in timeline.of(rank):
            for need in needs(ran.action, schedule.num_stages):
                source = producers[need]
                delay = latency[source.rank, rank] if source.rank != rank else 0.0
                start = max(start, source.stop + delay)
            assert (ran.start, ran.stop) == (start, start + seconds[ran.action])
            start = ran.stop
    assert timeline.idle == pytest.approx(ranks * timeline.makespan - sum(seconds.values()))


def test_timeline_may_start_anywhere() -> None:
    rows = (
        make_ran(1, "1F0", 103, 104),
        make_ran(0, "0B0", 107, 109),
        make_ran(0, "0F0", 100, 102),
    )
    timeline = Timeline(ranks=2, ran=rows)
    assert [str(ran.action) for ran in timeline.of(0)] == ["0F0", "0B0"]
    assert (timeline.first_start, timeline.makespan, timeline.idle) == (100, 9, 18 - 4 - 1)


def test_timeline_counts_overlap_once() -> None:
    rows = (make_ran(0, "0F0", 0, 5), make_ran(0, "0F1", 1, 2), make_ran(0, "0B0", 4, 7))
    timeline = Timeline(ranks=1, ran=rows)
    assert (timeline.busy(0), timeline.idle) == (7, 0)


def test_timeline_of_rank_without_actions_is_idle() -> None:
    timeline = Timeline(ranks=2, ran=(make_ran(0, "0F0", 0, 5),))
    assert (timeline.busy(1), timeline.span(1), timeline.idle, timeline.of(1)) == (0, 0, 5, ())
    empty = Timeline(ranks=2, ran=())
    assert (empty.makespan, empty.idle) == (0, 0)


def test_simulate_refuses_missing_action() -> None:
    order = ((Action(0, "F", 0),), (Action(1, "B", 0),))
    schedule = Schedule(name="mine", order=order, ranks=2, microbatches=1, chunks=1)
    error = usage_error(simulate, schedule, one_second)
    assert "rank 1" in error
    assert "1F0" in error


@pytest.mark.parametrize(
    ("order", "waiting"),
    [
        ("0F0,0F1,0B0,0B1\n1B0,1F0,1F1,1B1\n", "1B0"),
        ("0F0,0W0,0I0\n1F0,1B0\n", "0W0"),
        ("0F0,3F0,3B0,0B0\n2F0,1F0,2B0,1B0\n", "3F0"),
        ("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n", "1F1"),
    ],
)
def test_check_refuses_deadlock(order: str, waiting: str) -> None:
    error = usage_error(check, schedule_from_csv(order, "mine"))
    assert "deadlock" in error
    assert waiting in error


@pytest.mark.parametrize(
    ("order", "microbatch", "stage"),
    [
        ("0F0,0B0,0I0\n1F0,1B0\n", 0, 0),
        ("0F0,0B0\n1F0,1I0\n", 0, 1),
        ("0F0,0B0,0F1\n1F0,1B0,1F1,1B1\n", 1, 0),
        ("0F0,0B0,0F1,0B1\n1F0,1B0\n", 1, 1),
    ],
)
def test_check_refuses_incomplete_microbatch(order: str, microbatch: int, stage: int) -> None:
    error = usage_error(check, schedule_from_csv(order, "mine"))
    assert f"microbatch {microbatch} of stage {stage}" in error


def replace_row(schedule: Schedule, rank: int, row: list[Action]) -> Schedule:
    rows = [*schedule.order]
    rows[rank] = tuple(row)
    return replace(schedule, order=tuple(rows))


def test_check_refuses_action_out_of_range() -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=2)
    for action in (Action(2, "F", 0), Action(1, "F", 2), Action(0, "F", 1)):
        row = [*schedule.order[1], action]
        assert str(action) in usage_error(check, replace_row(schedule, 1, row))


def test_check_refuses_wrong_number_of_rows() -> None:
    order = ((Action(0, "F", 0),),)
    schedule = Schedule(name="mine", order=order, ranks=2, microbatches=1, chunks=1)
    assert "rows(1) != ranks(2)" in usage_error(check, schedule)


@pytest.mark.parametrize("name", NAMES)
def test_check_refuses_missing_or_repeated_action(name: str) -> None:
    schedule = make_schedule(name, ranks=2, microbatches=4)
    for rank, row in enumerate(schedule.order):
        for step, action in enumerate(row):
            for copies in ([], [action, action]):
                changed = replace_row(schedule, rank, [*row[:step], *copies, *row[step + 1 :]])
                expected = f"microbatch {action.microbatch} of stage {action.stage}"
                assert expected in usage_error(check, changed)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(NAMES), st.integers(0, 2**31))
def test_check_agrees_with_replay(name: str, seed: int) -> None:
    """Two neighbors change places; a replay runs each rank's first action once it can."""
    schedule = make_schedule(name, ranks=2, microbatches=4)
    row = list(schedule.order[1])
    step = random.Random(seed).randrange(len(row) - 1)
    row[step : step + 2] = reversed(row[step : step + 2])
    changed = replace_row(schedule, 1, row)
    rows = [list(changed.actions_of(rank)) for rank in range(2)]
    results: set[Result] = set()
    for remaining in rows * sum(map(len, rows)):
        if remaining and results.issuperset(needs(remaining[0], changed.num_stages)):
            results.add(result(remaining.pop(0)))
    if any(rows):
        usage_error(check, changed)
    else:
        check(changed)


def chunks_held(name: str, ranks: int, microbatches: int, chunks: int = 0) -> list[float]:
    schedule = make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
    return [peak_held(schedule, rank, lambda stage: 1) for rank in range(ranks)]


def test_chunks_in_flight_of_papers() -> None:
    equal = {"naive": 1, "gpipe": 8, "zb_h1": 4, "zb_h2": 7, "looped_bfs": 16, "zb_v": 8}
    for name, expected in (equal | {"dualpipe_v": 9}).items():
        assert chunks_held(name, 4, 8) == [expected] * 4, name
    assert chunks_held("1f1b", 4, 8) == [4, 3, 2, 1]
    assert chunks_held("1f1b", 4, 2) == [2, 2, 2, 1]
    assert chunks_held("zb_h2", 4, 3) == [3] * 4


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 2), (4, 3), (8, 2)])
def test_chunks_in_flight_interleaved(ranks: int, chunks: int) -> None:
    """P v + P - 1 chunks on the first rank (arXiv 2205.05198), two fewer on each next one."""
    held = chunks_held("interleaved", ranks, 4 * ranks, chunks)
    assert held[0] == ranks * chunks + ranks - 1
    assert all(before == after + 2 for before, after in pairwise(held))


def test_peak_held_weighs_stages() -> None:
    schedule = schedule_from_csv("0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0\n")
    weights = [1.0, 2.0, 10.0, 0.5]
    assert [peak_held(schedule, rank, weights.__getitem__) for rank in range(2)] == [11.0, 2.5]


def test_peak_held_until_weight_gradient() -> None:
    schedule = schedule_from_csv("0F0,0I0,0F1,0I1,0W0,0W1\n1F0,1I0,1W0,1F1,1I1,1W1\n")
    assert [peak_held(schedule, rank, lambda stage: 1) for rank in range(2)] == [2, 1]
