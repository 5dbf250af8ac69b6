"""A pipeline's time adds up, its idle time has causes, and the sources of its memory agree."""

from collections.abc import Mapping
from itertools import pairwise
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parbench.bench.results.details import CAUSES, Action
from parbench.bench.results.metrics import MetricValue
from parbench.bench.world.benchmark import Explanation
from parbench.bench.world.world import World
from parbench.workloads.pipeline_parallel.bubbles import link_latency
from parbench.workloads.pipeline_parallel.pipeline_probe import (
    Taken,
    bubble_of,
    claims_bubble,
    steps_of,
)
from parbench.workloads.pipeline_parallel.schedules import make_schedule
from parbench.workloads.pipeline_parallel.simulation import Timeline, simulate
from tests.support.mesh_steps import Params, build_small_pipeline
from tests.support.ranks import Ranks

MODULE = "tests.workloads.pipeline_parallel.test_pipeline_probe"
SOURCES = ("memory", "memory_counted", "memory_formula")


def values_of(metrics: Mapping[str, MetricValue]) -> dict[str, float]:
    return {name: metric.value for name, metric in metrics.items() if metric.value is not None}


def make_record(timelines: list[Timeline], rank: int, outside: float) -> Taken:
    """Return a rank's record of steps that take some seconds outside of the pipeline."""
    stamps = []
    for timeline in timelines:
        rows = [(str(ran.action), ran.start * 1e9, ran.stop * 1e9) for ran in timeline.of(rank)]
        stamps.append([(action, round(start), round(stop)) for action, start, stop in rows])
    walls = [timeline.makespan + outside - rank for timeline in timelines]
    return Taken(stamps=stamps, walls=walls)


def test_bubble_metrics_of_simulated_steps() -> None:
    """The bubble is a mean over all steps, idle causes are those of the median makespan."""
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)

    def even(action: Action) -> float:
        return 2.0 if action.kind == "B" else 1.0

    def uneven(action: Action) -> float:
        return even(action) * (1.5 - action.stage)

    ideal = simulate(schedule, even)
    imbalanced = simulate(schedule, uneven)
    median = simulate(schedule, uneven, {(0, 1): 0.5, (1, 0): 0.5})
    slowest = simulate(schedule, lambda action: 3 * uneven(action))
    timelines = [median, imbalanced, slowest]
    records = [make_record(timelines, rank, outside=0.25) for rank in range(2)]
    steps = steps_of(records, schedule)
    metrics = bubble_of(steps, link_latency([median], schedule), None)
    values = values_of(metrics)
    assert values["makespan"] == pytest.approx(median.makespan)
    assert values["non_pipeline_time"] == pytest.approx(0.25)
    assert values["compute"] == pytest.approx(12.0)
    assert values["idle_schedule"] == pytest.approx(ideal.idle / 2)
    assert values["idle_imbalance"] == pytest.approx((imbalanced.idle - ideal.idle) / 2)
    assert values["idle_p2p"] == pytest.approx((median.idle - imbalanced.idle) / 2)
    assert values["idle_rest"] == pytest.approx(0.0, abs=1e-6)
    mean = fmean(step.idle / 2 / step.makespan for step in timelines)
    assert values["bubble_fraction"] == pytest.approx(mean)
    assert values["bubble_fraction_simulated"] == pytest.approx(1 / 5)
    assert values["bubble_fraction_formula"] == pytest.approx(1 / 5)
    assert values["bubble_overhead_formula"] == pytest.approx(1 / 4)


def explain(world: World, params: Params, own_cores: bool = True) -> Explanation:
    step = build_small_pipeline(world, {"schedule": "1f1b", "microbatches": 4, **params})
    step.step()

    def begin() -> None:
        step.reset()
        world.barrier()

    affinity = {world.rank} if own_cores else {0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.sched_getaffinity", lambda pid: affinity)
        explanation = step.explain(begin, 0.0)
    step.close()
    return explanation


def test_explanation_of_pipeline_adds_up(two_ranks: Ranks) -> None:
    [explanation, _] = two_ranks.call(f"{MODULE}:explain", params={"compute": "timed:5ms"})
    values = values_of(explanation.metrics)
    details = explanation.details["pipeline"]
    idle = sum(values[f"idle_{cause}"] for cause in CAUSES)
    assert idle == pytest.approx(values["idle"], abs=1e-12)
    assert values["bubble_overhead"] == pytest.approx(values["idle"] / values["compute"])
    assert values["bubble_fraction_formula"] == pytest.approx(1 / 5)
    for boundary in details["boundaries"]:
        assert boundary["sent_bytes"] == boundary["expected_bytes"] == values["bytes_sent.pp"]
    assert details["in_flight_by_rank"] == [2.0, 1.0]
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    end = max(stop for row in details["measured"] for _, _, stop in row)
    for rank, row in enumerate(details["measured"]):
        assert [action for action, _, _ in row] == [str(a) for a in schedule.actions_of(rank)]
        assert all(before[2] <= after[1] for before, after in pairwise(row))
        busy_us = sum(stop - start for _, start, stop in row)
        idle_us = sum(stop - start for owner, start, stop, _ in details["idle"] if owner == rank)
        assert busy_us + idle_us == pytest.approx(end, abs=100)


@pytest.mark.parametrize(
    ("compute", "own_cores", "claims"),
    [("real", True, True), ("real", False, False), ("timed:5ms", False, True)],
)
def test_bubble_needs_own_cores(
    two_ranks: Ranks, compute: str, own_cores: bool, claims: bool
) -> None:
    params = {"compute": compute, "checkpointing": "selective"}
    [explanation, _] = two_ranks.call(f"{MODULE}:explain", params=params, own_cores=own_cores)
    assert ("bubble_fraction" in explanation.metrics) == claims
    assert ("measured" in explanation.details["pipeline"]) == claims
    assert values_of(explanation.metrics)["bytes_ratio.pp"] == 1.0


@pytest.mark.parametrize(("peer", "claims"), [("GPU-1", False), ("GPU-2", True)])
def test_bubble_needs_own_gpu(monkeypatch: pytest.MonkeyPatch, peer: str, claims: bool) -> None:
    world: Any = SimpleNamespace(device=torch.device("cuda", 0), gather=lambda uuid: [uuid, peer])
    properties = SimpleNamespace(uuid="GPU-1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert claims_bubble(world, None) == claims


def measure_memory(world: World, cases: list[Params]) -> list[tuple[int, dict[str, Any]]]:
    """Return this rank's number of parameters and its memory by source for each case."""
    results = []
    for params in cases:
        step = build_small_pipeline(world, {"microbatches": 4, **params})
        step.step()
        [probe] = step.probes()
        memory = probe.observe(step.step, step.reset, 0.0).held
        num_parameters = sum(parameter.numel() for parameter in step.layout.model.parameters())
        results.append((num_parameters, dict(memory)))
        step.close()
    return results


def test_memory_sources_agree(two_ranks: Ranks) -> None:
    cases: list[Params] = [
        {"schedule": "gpipe", "recipe": "llama"},
        {"schedule": "gpipe", "recipe": "llama", "checkpointing": "full"},
        {"schedule": "zb_v", "recipe": "gpt"},
    ]
    for results in two_ranks.call(f"{MODULE}:measure_memory", cases=cases):
        for params, (num_parameters, memory) in zip(cases, results, strict=True):
            for source in SOURCES:
                assert memory[source]["parameters"] == 4 * num_parameters, params
                assert memory[source]["gradients"] == 4 * num_parameters, params
            counted = memory["memory_counted"]
            assert counted["optimizer"] == pytest.approx(8 * num_parameters, rel=0.01)
            assert counted["activations"] == memory["memory_formula"]["activations"], params
