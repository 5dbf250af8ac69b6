"""The simulator agrees with the analytical bubbles, and idle time is the sum of its causes."""

import random
from collections.abc import Callable, Mapping
from itertools import pairwise

import pytest

from parbench.bench.results.details import IDLE_CAUSES, Action, SimulatedSchedule
from parbench.workloads.pipeline_parallel.bubbles import (
    ClosedForm,
    Shares,
    bubble_fraction,
    bubble_overhead,
    closed_form,
    compare,
    fraction_of,
    link_latency,
    shade,
    split_idle,
)
from parbench.workloads.pipeline_parallel.schedules import (
    NAMES,
    make_schedule,
    schedule_from_csv,
)
from parbench.workloads.pipeline_parallel.simulation import Ran, Timeline, simulate

EQUAL = Shares(f=1.0, i=1.0, w=1.0)
"""Seconds of a forward pass, and of the gradients of inputs and of weights."""
SLOW_WEIGHTS = Shares(f=0.5, i=1.0, w=2.0)
SLOW_INPUTS = Shares(f=0.3, i=3.0, w=0.6)


def action_seconds(chunks: int, times: Shares) -> Callable[[Action], float]:
    seconds = {"F": times.f, "I": times.i, "W": times.w, "B": times.i + times.w}
    return lambda action: seconds[action.kind] / chunks


def run(
    name: str, ranks: int, microbatches: int, chunks: int = 0, times: Shares = EQUAL
) -> Timeline:
    schedule = make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
    return simulate(schedule, action_seconds(schedule.chunks, times))


def compute_form(name: str, ranks: int, microbatches: int, times: Shares = EQUAL) -> ClosedForm:
    seconds = {"f": times.f, "i": times.i, "w": times.w}
    return closed_form(name, ranks=ranks, microbatches=microbatches, chunks=0, **seconds)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8)])
@pytest.mark.parametrize("times", [EQUAL, SLOW_WEIGHTS, SLOW_INPUTS])
def test_simulated_bubble_equals_closed_form(
    name: str, ranks: int, microbatches: int, times: Shares
) -> None:
    form = compute_form(name, ranks, microbatches, times)
    bubble = form.makespan_bubble_seconds
    timeline = run(name, ranks, microbatches, times=times)
    work = microbatches * (times.f + times.i + times.w)
    if bubble is None:
        assert times is not EQUAL
        return
    fraction = fraction_of(bubble, microbatches, times.f, times.i, times.w)
    idle_spans = [timeline.span(rank) - timeline.busy(rank) for rank in range(ranks)]
    assert timeline.makespan == pytest.approx(work + bubble)
    assert bubble_fraction(timeline) == pytest.approx(fraction, abs=1e-12)
    assert max(idle_spans) == pytest.approx(form.span_bubble_seconds, abs=1e-9 * work)


@pytest.mark.parametrize(
    ("name", "chunks", "fraction"),
    [
        ("naive", 1, 3 / 4),
        ("1f1b", 1, 3 / 11),
        ("zb_h1", 1, 1 / 9),
        ("interleaved", 4, 3 / 35),
        ("interleaved_zb", 2, 1 / 17),
        ("zb_v", 2, 1 / 17),
    ],
)
def test_bubble_fraction_of_papers(name: str, chunks: int, fraction: float) -> None:
    timeline = run(name, 4, 8, chunks)
    assert bubble_fraction(timeline) == pytest.approx(fraction)
    assert bubble_overhead(timeline) == pytest.approx(fraction / (1 - fraction))


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb_v"])
def test_causes_sum_to_idle_time(name: str) -> None:
    schedule = make_schedule(name, ranks=4, microbatches=8)
    uniform = random.Random(1).uniform
    measured = simulate(
        schedule, lambda action: uniform(0.7, 1.5), lambda *link: uniform(0, 0.3)
    )
    latency = link_latency([measured], schedule)
    causes = split_idle(measured, schedule, latency)
    assert sum(causes.values()) == pytest.approx(measured.idle / 4)
    shades = shade(measured, schedule, latency)
    for rank in range(4):
        spans = [(ran.start, ran.stop) for ran in measured.of(rank)]
        spans += [
            (start, stop) for shaded_rank, start, stop, _ in shades if shaded_rank == rank
        ]
        spans.sort()
        assert spans[-1][1] == measured.makespan
        assert all(before[1] == after[0] for before, after in pairwise(spans))


def make_timeline(times: Mapping[str, tuple[float, float]]) -> Timeline:
    """Return a timeline of two ranks, each of which has the stage of its number."""
    rows = []
    for name, (start, stop) in times.items():
        action = Action.parse(name)
        rows.append(Ran(rank=action.stage, action=action, start=start, stop=stop))
    return Timeline(ranks=2, ran=tuple(rows))


def half_second(source: int, target: int) -> float:
    return 0.5


def test_shade_orders_causes_in_a_gap() -> None:
    """Rank 1 waits 1 s for the schedule, 0.5 s for a link and 0.25 s for the host."""
    schedule = schedule_from_csv("0F0,0B0\n1F0,1B0\n")
    measured = make_timeline(
        {"0F0": (0.0, 1.0), "1F0": (1.75, 2.75), "1B0": (2.75, 4.75), "0B0": (5.25, 7.25)}
    )
    assert shade(measured, schedule, half_second) == [
        (0, 1.0, 4.0, "schedule"),
        (0, 4.0, 5.0, "p2p"),
        (0, 5.0, 5.25, "rest"),
        (1, 0.0, 1.0, "schedule"),
        (1, 1.0, 1.5, "p2p"),
        (1, 1.5, 1.75, "rest"),
        (1, 4.75, 6.75, "schedule"),
        (1, 6.75, 7.25, "p2p"),
    ]
    causes = split_idle(measured, schedule, half_second)
    assert [causes[cause] for cause in IDLE_CAUSES] == pytest.approx([3.0, 0.0, 1.0, 0.25])


# Rank 1 waits 0.5 s for 0F0 and not for 0F1. Rank 0 waits 0.5 s for 1B0 and 1.5 s for 1B1.
WAITING = {
    "0F0": (0, 1), "0F1": (1, 2), "0B0": (4, 5), "0B1": (7, 8),
    "1F0": (1.5, 2.5), "1B0": (2.5, 3.5), "1F1": (3.5, 4.5), "1B1": (4.5, 5.5),
}  # fmt: skip


def test_link_latency_is_median_of_waits() -> None:
    schedule = schedule_from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    normal = make_timeline(WAITING)
    slow = make_timeline(WAITING | {"0B1": (9, 10)})
    # The waits of rank 0 are 0.5, 0.5, 0.5, 1.5, 3.5 and 3.5 s.
    latency = link_latency([normal, slow, slow], schedule)
    assert latency == {(0, 1): 0.5, (1, 0): 1.0}


def compare_all(layers: int) -> dict[str, SimulatedSchedule]:
    schedule = make_schedule("gpipe", ranks=4, microbatches=8)
    rows = compare(schedule, EQUAL, layers=layers, layer_bytes=100.0, latency=0.0, outside=0.5)
    return {row.schedule: row for row in rows}


def test_compare_sorts_schedules_by_time() -> None:
    rows = compare_all(layers=8)
    assert set(rows) == set(NAMES)
    seconds = [row.step_seconds or 0.0 for row in rows.values()]
    assert seconds == sorted(seconds)
    assert rows["1f1b"].step_seconds == pytest.approx(run("1f1b", 4, 8).makespan + 0.5)
    assert rows["1f1b"].bubble_fraction == pytest.approx(3 / 11)
    assert rows["1f1b"].activation_bytes == 4 * 2 * 100.0
    assert rows["interleaved"].in_flight == 5.5
