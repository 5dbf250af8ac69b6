"""The simulator agrees with the analytical bubbles, and idle time is the sum of its causes."""

from collections.abc import Mapping
from typing import get_args

import pytest

from parbench.bench.results.details import Action, IdleCause
from parbench.workloads.pipeline_parallel.bubbles import simulate_mean_actions, split_idle
from parbench.workloads.pipeline_parallel.order import PipelineSize
from parbench.workloads.pipeline_parallel.schedule import PassSeconds, omit_bubble
from parbench.workloads.pipeline_parallel.schedules import SCHEDULES
from parbench.workloads.pipeline_parallel.simulation import (
    SimulatedAction,
    SimulatedTimeline,
    simulate,
)

EQUAL = PassSeconds(1.0, 1.0, 1.0)
SLOW_WEIGHTS = PassSeconds(0.5, 1.0, 2.0)
SLOW_INPUTS = PassSeconds(0.3, 3.0, 0.6)


def run(
    name: str,
    ranks: int,
    microbatches: int,
    virtual_stages: int = 0,
    passes: PassSeconds = EQUAL,
) -> SimulatedTimeline:
    size = SCHEDULES[name].size(ranks, microbatches, virtual_stages)
    seconds = {
        "F": passes.forward,
        "I": passes.input_gradient,
        "W": passes.weight_gradient,
        "B": passes.backward,
    }
    return simulate(
        SCHEDULES[name].make_order(size),
        lambda action: seconds[action.kind] / size.stages_per_rank,
    )


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8)])
@pytest.mark.parametrize("passes", [EQUAL, SLOW_WEIGHTS, SLOW_INPUTS])
def test_simulated_bubble_equals_analytical(
    name: str, ranks: int, microbatches: int, passes: PassSeconds
) -> None:
    size = SCHEDULES[name].size(ranks, microbatches)
    bubble = SCHEDULES[name].compute_bubble(size, passes)
    timeline = run(name, ranks, microbatches, passes=passes)
    work = microbatches * passes.total
    if bubble is None:
        assert passes is not EQUAL or SCHEDULES[name].compute_bubble is omit_bubble
        return
    fraction = bubble.seconds / (bubble.seconds + work)
    assert timeline.makespan == pytest.approx(work + bubble.seconds)
    assert timeline.bubble_fraction == pytest.approx(fraction, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "virtual_stages", "fraction"),
    [
        ("1f1b", 1, 3 / 11),
        ("interleaved", 4, 3 / 35),
        ("zb_v", 2, 1 / 17),
    ],
)
def test_bubble_fraction_of_papers(name: str, virtual_stages: int, fraction: float) -> None:
    timeline = run(name, 4, 8, virtual_stages)
    assert timeline.bubble_fraction == pytest.approx(fraction)


def make_timeline(times: Mapping[str, tuple[float, float]]) -> SimulatedTimeline:
    """Return a timeline of two ranks, each of which has the stage of its number."""
    rows = []
    for name, (start, stop) in times.items():
        action = Action.parse(name)
        rows.append(SimulatedAction(rank=action.stage, action=action, start=start, stop=stop))
    return SimulatedTimeline(ranks=2, actions=tuple(rows))


def test_idle_time_by_cause() -> None:
    """Messages and jitter delay the ranks by 1.25 s."""
    order = SCHEDULES["1f1b"].make_order(PipelineSize(2, 1))
    measured = make_timeline(
        {"0F0": (0.0, 1.0), "1F0": (1.75, 2.75), "1B0": (2.75, 4.75), "0B0": (5.25, 7.25)}
    )
    causes = split_idle(measured, simulate_mean_actions(measured, order), order)
    assert [causes[cause] for cause in get_args(IdleCause)] == pytest.approx([3.0, 0.0, 1.25])
