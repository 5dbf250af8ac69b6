"""A simulated action starts once its inputs have arrived, and impossible orders are refused."""

from dataclasses import replace

import pytest

from parbench.bench.results.details import Action
from parbench.workloads.pipeline_parallel.order import PipelineSize, find_peak_held
from parbench.workloads.pipeline_parallel.schedules import SCHEDULES
from parbench.workloads.pipeline_parallel.simulation import SimulatedTimeline, simulate

GPIPE = SCHEDULES["gpipe"].make_order(PipelineSize(2, 3))


def one_second(action: Action) -> float:
    return 1.0


def list_times(timeline: SimulatedTimeline, rank: int) -> list[tuple[str, float, float]]:
    return [(str(a.action), a.start, a.stop) for a in timeline.select_actions(rank)]


def test_simulate_1f1b() -> None:
    """A forward pass takes 1 s, a backward pass 2 s."""
    order = SCHEDULES["1f1b"].make_order(PipelineSize(2, 2))
    timeline = simulate(order, lambda action: 2 if action.kind == "B" else 1)
    assert list_times(timeline, 0) == [
        ("0F0", 0, 1),
        ("0F1", 1, 2),
        ("0B0", 4, 6),
        ("0B1", 7, 9),
    ]
    assert list_times(timeline, 1) == [
        ("1F0", 1, 2),
        ("1B0", 2, 4),
        ("1F1", 4, 5),
        ("1B1", 5, 7),
    ]
    assert timeline.makespan == 9
    assert timeline.idle == 6


def test_simulate_adds_latency_of_messages() -> None:
    forward_passes = simulate(GPIPE, one_second, 0.25).select_actions(1)[:3]
    assert [timed.start for timed in forward_passes] == [1.25, 2.25, 3.25]


def test_simulate_refuses_deadlock() -> None:
    backwards = tuple(actions[::-1] for actions in GPIPE.actions_by_rank)
    with pytest.raises(ValueError, match="never arrive for 0B0, 1B0"):
        simulate(replace(GPIPE, actions_by_rank=backwards), one_second)


@pytest.mark.parametrize(
    ("name", "microbatches", "by_rank"),
    [
        ("gpipe", 8, [8, 8, 8, 8]),
        ("1f1b", 8, [4, 3, 2, 1]),
        ("zb_h1", 8, [4, 4, 4, 4]),
        ("zb_h2", 8, [7, 7, 7, 7]),
        ("looped_bfs", 8, [16, 16, 16, 16]),
        # P v + P - 1 on the first rank (arXiv 2205.05198), two fewer on each next one.
        ("interleaved", 16, [11, 9, 7, 5]),
        ("zb_v", 8, [8, 8, 8, 8]),
        ("dualpipe_v", 8, [9, 9, 9, 9]),
    ],
)
def test_microbatches_in_flight_of_papers(
    name: str, microbatches: int, by_rank: list[int]
) -> None:
    schedule = SCHEDULES[name]
    order = schedule.make_order(schedule.size(4, microbatches))
    assert [find_peak_held(row, lambda stage: 1) for row in order.actions_by_rank] == by_rank
