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
    of_order,
    steps_of,
)
from parbench.workloads.pipeline_parallel.schedules import make_schedule
from parbench.workloads.pipeline_parallel.simulation import Timeline, simulate
from tests.support.mesh_steps import Params, build_small_pipeline
from tests.support.ranks import Ranks

SOURCES = ("memory", "memory_counted", "memory_formula")


def values(metrics: Mapping[str, MetricValue]) -> dict[str, float]:
    return {name: metric.value for name, metric in metrics.items() if metric.value is not None}


def make_records(timelines: list[Timeline], outside: float) -> list[Taken]:
    """Return the records of two ranks, whose steps take seconds outside of the pipeline."""

    def ns(seconds: float) -> int:
        return round(seconds * 1e9) + 77

    records = []
    for rank in range(2):
        stamps = [
            [(str(ran.action), ns(ran.start), ns(ran.stop)) for ran in timeline.of(rank)]
            for timeline in timelines
        ]
        walls = [timeline.makespan + outside - rank for timeline in timelines]
        records.append(Taken(stamps=stamps, walls=walls))
    return records


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
    steps = steps_of(make_records([median, imbalanced, slowest], 0.25), schedule)
    metrics = bubble_of(steps, link_latency([median], schedule), None)
    value = values(metrics | of_order(schedule))
    assert value["makespan"] == pytest.approx(median.makespan)
    assert value["non_pipeline_time"] == pytest.approx(0.25)
    assert value["compute"] == pytest.approx(12.0)
    idle = [timeline.idle / 2 for timeline in (ideal, imbalanced, median)]
    expected = {"schedule": idle[0], "imbalance": idle[1] - idle[0], "p2p": idle[2] - idle[1]}
    assert min(expected.values()) > 0.1
    for cause, seconds in (expected | {"rest": 0.0}).items():
        assert value[f"idle_{cause}"] == pytest.approx(seconds, abs=1e-6)
    mean = fmean(step.idle / 2 / step.makespan for step in (median, imbalanced, slowest))
    bubble = metrics["bubble_fraction"]
    assert bubble.value == pytest.approx(mean)
    assert (bubble.low or 0) < mean < (bubble.high or 0)
    for source in ("simulated", "formula", "schedule"):
        assert value[f"bubble_fraction_{source}"] == pytest.approx(1 / 5)
    assert value["bubble_overhead_formula"] == pytest.approx(1 / 4)


def test_bubble_formula_of_requested_times() -> None:
    """ZB-V has a formula only for equal times, which timed compute requests."""
    schedule = make_schedule("zb_v", ranks=2, microbatches=4)
    timeline = simulate(schedule, lambda action: 1.0 + action.microbatch + (action.kind == "I"))
    steps = steps_of(make_records([timeline], 0.0), schedule)
    assert "bubble_fraction_formula" not in bubble_of(steps, {}, None)
    value = values(bubble_of(steps, {}, 2.0))
    assert value["bubble_fraction_formula"] == pytest.approx(1 / (1 + 4 * 6))
    assert value["bubble_fraction_span_formula"] == 0


def explain(world: World, params: Params, cores: str = "own") -> Explanation:
    step = build_small_pipeline(world, {"schedule": "1f1b", "microbatches": 4, **params})
    step.step()

    def begin() -> None:
        step.reset()
        world.barrier()

    affinity = {"shared": {0}, "own": {world.rank}}[cores]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.sched_getaffinity", lambda pid: affinity)
        explanation = step.explain(begin, 0.0)
    step.close()
    return explanation


def test_explanation_of_pipeline_adds_up(two_ranks: Ranks) -> None:
    params = {"compute": "timed:10ms"}
    [explanation, _] = two_ranks.call(
        "tests.workloads.pipeline_parallel.test_pipeline_probe:explain", params=params
    )
    value, details = values(explanation.metrics), explanation.details["pipeline"]
    idle = sum(value[f"idle_{cause}"] for cause in CAUSES)
    assert idle == pytest.approx(value["idle"], abs=1e-12)
    assert value["bubble_overhead"] == pytest.approx(value["idle"] / value["compute"])
    assert value["bubble_fraction_formula"] == pytest.approx(1 / 5)
    assert value["bytes_ratio.pp"] == 1.0
    links = [(boundary["from"], boundary["to"]) for boundary in details["boundaries"]]
    assert links == [(0, 1), (1, 0)]
    for boundary in details["boundaries"]:
        sent, expected = boundary["sent_bytes"], boundary["expected_bytes"]
        assert sent == expected == value["bytes_sent.pp"]
    assert (details["in_flight_by_rank"], value["in_flight"]) == ([2.0, 1.0], 2.0)
    assert len(details["memory_by_rank"]["activations"]) == 2
    lines = {line["schedule"]: line for line in details["comparison"]}
    assert lines["zb_h1"]["step_seconds"] < lines["naive"]["step_seconds"]


def test_timeline_of_pipeline_has_no_gaps(two_ranks: Ranks) -> None:
    params = {"compute": "timed:10ms"}
    [explanation, _] = two_ranks.call(
        "tests.workloads.pipeline_parallel.test_pipeline_probe:explain", params=params
    )
    details = explanation.details["pipeline"]
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    for source in ("measured", "predicted"):
        for rank, row in enumerate(details[source]):
            actions = [str(action) for action in schedule.actions_of(rank)]
            assert [action for action, _, _ in row] == actions
            assert all(before[2] <= after[1] for before, after in pairwise(row))
    end = max(stop for row in details["measured"] for _, _, stop in row)
    for rank, row in enumerate(details["measured"]):
        busy = sum(stop - start for _, start, stop in row)
        idle = sum(
            stop - start for idle_rank, start, stop, _ in details["idle"] if idle_rank == rank
        )
        assert busy + idle == pytest.approx(end, abs=100)


@pytest.mark.parametrize(
    ("cores", "params", "claims"),
    [("own", {}, True), ("shared", {}, False), ("shared", {"compute": "timed:5ms"}, True)],
)
def test_bubble_needs_own_cores(two_ranks: Ranks, cores: str, params: Params, claims: bool) -> None:
    arguments = {"params": {"checkpointing": "selective", **params}, "cores": cores}
    [explanation, _] = two_ranks.call(
        "tests.workloads.pipeline_parallel.test_pipeline_probe:explain", **arguments
    )
    assert ("bubble_fraction" in explanation.metrics) == claims
    assert ("measured" in explanation.details["pipeline"]) == claims
    assert any("functional only" in note for note in explanation.notes) == (not claims)
    assert values(explanation.metrics)["bytes_ratio.pp"] == 1.0


@pytest.mark.parametrize("other", ["GPU-1", "GPU-2"])
def test_bubble_needs_own_gpu(monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    world: Any = SimpleNamespace(device=torch.device("cuda", 0), gather=lambda uuid: [uuid, other])
    properties = SimpleNamespace(uuid="GPU-1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert claims_bubble(world, None) == claims_bubble(world, 0.01) == (other == "GPU-2")


def measure_memory(world: World, cases: list[Params]) -> list[tuple[int, dict[str, Any]]]:
    """Return this rank's number of parameters and its memory by source for each case."""
    results = []
    for params in cases:
        step = build_small_pipeline(world, {"microbatches": 4, **params})
        step.step()
        [probe] = step.probes()
        held = probe.observe(step.step, step.reset, 0.0).held
        results.append((sum(p.numel() for p in step.layout.model.parameters()), dict(held)))
        step.close()
    return results


def test_memory_sources_agree(two_ranks: Ranks) -> None:
    gpipe: Params = {"schedule": "gpipe", "recipe": "llama", "hidden": 64, "sequence": 32}
    cases = [gpipe, {**gpipe, "checkpointing": "full"}, {**gpipe, "schedule": "zb_v"}]
    cases.append({**gpipe, "schedule": "1f1b", "recipe": "gpt"})
    for results in two_ranks.call(
        "tests.workloads.pipeline_parallel.test_pipeline_probe:measure_memory", cases=cases
    ):
        for params, (num_parameters, held) in zip(cases, results, strict=True):
            for name in ("parameters", "gradients"):
                assert {held[source][name] for source in SOURCES} == {4 * num_parameters}, params
            counted = held["memory_counted"]
            assert counted["optimizer"] == pytest.approx(8 * num_parameters, rel=0.01)
            assert counted["activations"] == held["memory_formula"]["activations"], params
            assert held["memory"]["activations"] > 0.9 * counted["activations"], params
        none, full, *_ = (held["memory_counted"]["activations"] for _, held in results)
        assert full < none
