"""A pipeline's time adds up, and its idle time has causes."""

from collections.abc import Mapping
from itertools import pairwise
from statistics import fmean
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from parbench.bench.results.details import Action, IdleCause
from parbench.bench.results.metrics import MetricValue
from parbench.bench.world.benchmark import Explanation
from parbench.bench.world.world import World
from parbench.workloads.pipeline_parallel.pipeline_case import PipelineOptions
from parbench.workloads.pipeline_parallel.simulation import SimulatedAction, simulate
from parbench.workloads.step.pipeline_probe import (
    BubbleProbe,
    merge_steps,
    summarize_bubble,
)
from tests.support.ranks import Ranks
from tests.support.workloads.training_steps import Params, build_small_step

MODULE = "tests.workloads.step.test_pipeline_probe"


def values_of(metrics: Mapping[str, MetricValue]) -> dict[str, float]:
    return {name: metric.value for name, metric in metrics.items() if metric.value is not None}


def balanced_seconds(action: Action) -> float:
    return 2.0 if action.kind == "B" else 1.0


def imbalanced_seconds(action: Action) -> float:
    return balanced_seconds(action) * (1.5 - action.stage)


def test_bubble_metrics_of_simulated_steps() -> None:
    """The bubble is a mean over all steps, idle causes are those of the median makespan."""
    pipeline = PipelineOptions().build(ranks=2, microbatches=4, layers=2)
    order = pipeline.order
    ideal = simulate(order, balanced_seconds)
    imbalanced = simulate(order, imbalanced_seconds)
    median = simulate(order, imbalanced_seconds, 0.5)
    slowest = simulate(order, lambda action: 3 * imbalanced_seconds(action))
    timelines = [median, imbalanced, slowest]
    by_rank = [[timeline.select_actions(rank) for timeline in timelines] for rank in range(2)]

    values = values_of(summarize_bubble(merge_steps(by_rank), pipeline, None))

    assert values["idle_schedule"] == pytest.approx(ideal.idle / 2)
    assert values["idle_imbalance"] == pytest.approx((imbalanced.idle - ideal.idle) / 2)
    assert values["idle_rest"] == pytest.approx((median.idle - imbalanced.idle) / 2)
    mean_bubble = fmean(step.idle / 2 / step.makespan for step in timelines)
    assert values["bubble_fraction"] == pytest.approx(mean_bubble)
    assert values["bubble_fraction_simulated"] == pytest.approx(1 / 5)
    assert values["bubble_fraction_formula"] == pytest.approx(1 / 5)


def test_measured_actions_are_on_clock_of_rank_0() -> None:
    clock = SimpleNamespace(offsets_ns=[0, 10_000_000_000])
    world: Any = SimpleNamespace(
        device=torch.device("cpu"),
        global_rank=1,
        clock=clock,
        broadcast_from_rank_0=lambda values: values,
    )
    recorder: Any = SimpleNamespace(read=lambda: [(Action(1, "F", 0), 11.0, 12.0)])
    probe = BubbleProbe(
        world=world,
        pipeline=PipelineOptions().build(ranks=2, microbatches=4, layers=2),
        pipeline_ranks=[[0, 1]],
        recorder=recorder,
        simulated_seconds=1.0,
    )
    steps = probe.observe(lambda: None, lambda: None, 0.0)
    assert steps == [[SimulatedAction(rank=1, action=Action(1, "F", 0), start=1.0, stop=2.0)]]


def explain(world: World, params: Params, own_cores: bool) -> Explanation:
    sizes = {"schedule": "1f1b", "microbatches": 4, "microbatch": 1, "layers": 2 * world.size}
    step = build_small_step(world, "pp", {**sizes, **params})
    step.step()
    affinity = {world.rank} if own_cores else {0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.sched_getaffinity", lambda pid: affinity)
        explanation = step.explain_step(step.reset, 0.0)
    step.close()
    return explanation


def test_explanation_of_pipeline_adds_up(two_ranks: Ranks) -> None:
    """Simulated compute needs no cores of its own."""
    params = {"compute": "simulated:5ms"}
    [explanation, _] = two_ranks.call(f"{MODULE}:explain", params=params, own_cores=False)
    values = values_of(explanation.metrics)
    details = explanation.details["pipeline"]
    idle = sum(values[f"idle_{cause}"] for cause in get_args(IdleCause))
    assert values["in_flight"] == 2.0
    makespan_us = max(row[-1][2] for row in details["measured"])
    busy_us = 0
    for row in details["measured"]:
        assert all(before[2] <= after[1] for before, after in pairwise(row))
        busy_us += sum(stop - start for _, start, stop in row)
    assert busy_us / 2 + 1e6 * idle == pytest.approx(makespan_us, abs=100)


@pytest.mark.parametrize("own_cores", [pytest.param(True, marks=pytest.mark.full), False])
def test_bubble_needs_own_cores(two_ranks: Ranks, own_cores: bool) -> None:
    params = {"checkpointing": "selective"}
    [explanation, _] = two_ranks.call(f"{MODULE}:explain", params=params, own_cores=own_cores)
    assert ("bubble_fraction" in explanation.metrics) == own_cores
    assert ("measured" in explanation.details["pipeline"]) == own_cores
    assert explanation.metrics["bytes_ratio.pp"].value == 1.0
