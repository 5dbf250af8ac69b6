"""What is said of a pipeline's time adds up, what slows it is called by its name, and memory's three sources agree."""

from collections.abc import Mapping
from itertools import pairwise
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mesh_steps import Params, small_pipeline
from ranks import Ranks

from parbench.bench.results.details import CAUSES, Action
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.stats import t_quantile
from parbench.bench.world.benchmark import Explanation
from parbench.bench.world.world import Clock, World
from parbench.workloads.pipeline_parallel.bubbles import facts_of, link_latency
from parbench.workloads.pipeline_parallel.pipeline_probe import (
    Taken,
    bubble_of,
    claims_bubble,
    of_order,
    steps_of,
    with_timelines,
)
from parbench.workloads.pipeline_parallel.schedules import make_schedule
from parbench.workloads.pipeline_parallel.simulation import Timeline, simulate

SECONDS = 0.05
SOURCES = ("memory", "memory_counted", "memory_formula")


def values(metrics: Mapping[str, MetricValue]) -> dict[str, float]:
    return {name: metric.value for name, metric in metrics.items() if metric.value is not None}


def told_of(timelines: list[Timeline], wall: float) -> list[Taken]:
    """What two ranks would tell of these steps, of which each took ``wall`` seconds more than its pipeline."""

    def ns(seconds: float) -> int:
        return round(seconds * 1e9) + 77

    return [
        Taken(
            stamps=[[(str(ran.action), ns(ran.start), ns(ran.stop)) for ran in of.of(rank)] for of in timelines],
            walls=[timeline.makespan + wall - rank for timeline in timelines],
        )
        for rank in range(2)
    ]


def test_the_bubble_is_the_mean_of_all_steps_and_idle_by_cause_of_that_of_median_makespan() -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)

    def seconds(action: Action) -> float:
        return (2.0 if action.kind == "B" else 1.0) * (1.5 - action.stage)

    ideal, slow = simulate(schedule, lambda a: 2.0 if a.kind == "B" else 1.0), simulate(schedule, seconds)
    far = simulate(schedule, seconds, {(0, 1): 0.5, (1, 0): 0.5})
    steps = steps_of(told_of([far, slow, simulate(schedule, lambda a: 3 * seconds(a))], 0.25), schedule)
    assert steps.middle.makespan == pytest.approx(far.makespan)
    assert steps.outside_seconds == pytest.approx([0.25] * 3)
    latency = link_latency([far], schedule)
    found = bubble_of(steps, latency, None) | of_order(schedule)
    seen = values(found)
    idle = [each.idle / 2 for each in (ideal, slow, far)]
    expected = {"schedule": idle[0], "imbalance": idle[1] - idle[0], "p2p": idle[2] - idle[1], "rest": 0.0}
    assert {cause: seen[f"idle_{cause}"] for cause in CAUSES} == pytest.approx(expected, abs=1e-6)
    assert min(expected["imbalance"], expected["p2p"]) > 0.1
    whole = {"idle": idle[2], "compute": 12.0, "makespan": far.makespan, "non_pipeline_time": 0.25, "in_flight": 2.0}
    assert {name: seen[name] for name in whole} == pytest.approx(whole)
    fractions = [each.idle / 2 / each.makespan for each in (far, slow, slow)]  # the third three times as slow in all
    mean, reach = fmean(fractions), t_quantile(0.975, 2) * stdev(fractions) / 3**0.5
    bubble = found["bubble_fraction"]
    assert [bubble.value, bubble.low, bubble.high] == pytest.approx([mean, max(0.0, mean - reach), mean + reach])
    assert bubble.method == "idle / (ranks x makespan), mean of 3 steps, Student's t interval, 2 degrees of freedom"
    assert seen["bubble_fraction_simulated"] == seen["bubble_fraction_formula"] == pytest.approx(1 / 5)
    assert seen["bubble_overhead_formula"] == pytest.approx(1 / 4)
    assert seen["bubble_fraction_schedule"] == pytest.approx(1 / 5), "of the schedule, however long its actions take"
    # timed compute is taken as it was asked for: ZB-V has a form at equal times alone
    v = make_schedule("zb_v", ranks=2, microbatches=4)
    uneven = steps_of(told_of([simulate(v, lambda a: 1.0 + a.microbatch + (a.kind == "I"))], 0.0), v)
    assert "bubble_fraction_formula" not in bubble_of(uneven, {}, None)
    by_request = values(bubble_of(uneven, {}, 2.0))
    assert by_request["bubble_fraction_formula"] == pytest.approx(1 / (1 + 4 * 6))
    assert by_request["bubble_fraction_span_formula"] == 0


def explained(world: World, params: dict[str, Any], budget: float = 0.0, cores: str = "two") -> Explanation:
    step = small_pipeline(world, {"schedule": "1f1b", "microbatches": 4, **params})
    step.step()

    def begin() -> None:
        step.reset()
        world.barrier()

    with pytest.MonkeyPatch.context() as patch:
        may_use = {"two": {0, 1}, "one": {0}, "own": {world.rank}}[cores]
        patch.setattr("os.sched_getaffinity", lambda pid: may_use)
        found = step.explain(begin, budget)
    step.close()
    return found


def timed(seconds: float = SECONDS, **params: Any) -> dict[str, Any]:
    return {"compute": f"timed:{seconds}s", **params}


def test_what_is_told_of_a_step_adds_up(two_ranks: Ranks) -> None:
    [found, _] = two_ranks.call("test_pipeline_probe:explained", params=timed(0.01))
    seen, told = values(found.metrics), found.details["pipeline"]
    assert sum(seen[f"idle_{cause}"] for cause in CAUSES) == pytest.approx(seen["idle"], abs=1e-12)
    assert seen["bubble_overhead"] == pytest.approx(seen["idle"] / seen["compute"], rel=1e-9)
    assert (seen["bubble_fraction_formula"], seen["bubble_overhead_formula"]) == pytest.approx((1 / 5, 1 / 4))
    # what is sent and held is told of every rank
    assert seen["bytes_ratio.pp"] == 1.0
    for boundary, link in zip(told["boundaries"], ((0, 1), (1, 0)), strict=True):
        assert (boundary["from"], boundary["to"]) == link
        assert boundary["sent_bytes"] == boundary["expected_bytes"] == seen["bytes_sent.pp"]
    assert (told["in_flight_by_rank"], seen["in_flight"]) == ([2.0, 1.0], 2.0)
    assert all(seen[f"{source}.activations"] > 0 for source in SOURCES)
    assert [len(told["memory_by_rank"][name]) for name in ("parameters", "activations")] == [2, 2]
    # the timeline has every action in its order, and its gaps have causes
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    orders = [[str(action) for action in row] for row in schedule.order]
    for name in ("measured", "predicted"):
        assert [[action for action, _, _ in row] for row in told[name]] == orders
        assert all(a[2] <= b[1] for row in told[name] for a, b in pairwise(row))
    end = max(stop for row in told["measured"] for _, _, stop in row)
    for rank, row in enumerate(told["measured"]):
        filled = sum(stop - start for _, start, stop in row) + sum(b - a for r, a, b, _ in told["idle"] if r == rank)
        assert filled == pytest.approx(end, abs=100)
    assert {cause for *_, cause in told["idle"]} <= set(CAUSES)
    assert told["clock"]
    # other schedules are compared, and the halves are owned up to
    lines = {line["schedule"]: line for line in told["comparison"]}
    assert len(lines) == 10
    assert lines["zb_h1"]["step_seconds"] < lines["1f1b"]["step_seconds"] < lines["naive"]["step_seconds"]
    assert all(line["activation_bytes"] for line in lines.values() if "why_not" not in line)
    assert any("half of the backward pass" in note for note in found.notes)


def test_ranks_that_share_cores_claim_no_bubble_of_real_compute(two_ranks: Ranks) -> None:
    selective = {"checkpointing": "selective"}
    waiting = timed(0.005, **selective)
    for cores, params in (("two", {}), ("own", {}), ("one", {}), ("one", selective), ("one", waiting)):
        [found, _] = two_ranks.call("test_pipeline_probe:explained", params=params, cores=cores)
        timed_ones = found.metrics.keys() - {"bubble_fraction_schedule"}
        claims = any(name.startswith(("bubble", "idle")) for name in timed_ones)
        assert claims == ("measured" in found.details["pipeline"]) == (cores != "one" or "compute" in params)
        assert any(note.startswith("functional only") for note in found.notes) == (not claims)
        assert values(found.metrics)["bytes_ratio.pp"] == 1.0
        assert {"memory_counted.activations", "memory.activations"} <= set(found.metrics)
        assert bool(found.details["pipeline"].get("comparison")) == claims


def looks(world: World, cases: list[Params]) -> list[dict[str, Any]]:
    """Return this rank's memory from three sources, and its parameters."""
    found = []
    for params in cases:
        step = small_pipeline(world, {"microbatches": 4, **params})
        step.step()
        [probe] = step.probes()
        seen = probe.observe(step.step, step.reset, 0.0)
        found.append({**seen.held, "parameters": sum(one.numel() for one in step.layout.model.parameters())})
        step.close()
    return found


def test_three_sources_agree(two_ranks: Ranks) -> None:
    schedules = (("gpipe", "llama"), ("1f1b", "gpt"), ("zb_v", "llama"), ("zb_v", "gpt"))
    cases: list[Params] = [
        {"schedule": name, "recipe": recipe, "hidden": 64, "sequence": 32} for name, recipe in schedules
    ]
    cases += [{**cases[0], "checkpointing": how} for how in ("full", "selective")]
    for looks_of_rank in two_ranks.call("test_pipeline_probe:looks", cases=cases):
        for case, found in zip(cases, looks_of_rank, strict=True):
            for name in ("parameters", "gradients"):
                assert {found[source][name] for source in SOURCES} == {4 * found["parameters"]}, (case, name)
            assert found["memory_counted"]["optimizer"] == pytest.approx(8 * found["parameters"], rel=0.01)
            assert found["memory_counted"]["activations"] == found["memory_formula"]["activations"], case
            assert found["memory"]["activations"] > 0.9 * found["memory_counted"]["activations"], case
        gpipe, one_f_one_b, *_, full, selective = (found["memory_counted"]["activations"] for found in looks_of_rank)
        assert gpipe > one_f_one_b
        assert gpipe > selective > full


def test_a_timeline_is_as_uncertain_as_the_ranks_clocks_and_the_places_of_their_stamps_on_them() -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    told = told_of([simulate(schedule, lambda _: 1.0)] * 2, 0.25)
    for one, seconds in zip(told, ([1e-6, 2e-6], [3e-6, 0.0]), strict=True):
        one.uncertainty_seconds.extend(seconds)
    steps = steps_of(told, schedule)
    clock = Clock(offsets_ns=(0, 0), uncertainty_ns=500, method="ping-pong")
    facts = with_timelines(facts_of(schedule), steps, link_latency(steps.timelines, schedule), clock)
    assert facts.clock == "ping-pong"
    assert facts.clock_uncertainty_seconds == pytest.approx(3.5e-6)


@pytest.mark.parametrize("others", ["GPU-1", "GPU-2"])
def test_no_bubble_is_claimed_where_ranks_share_a_gpu_even_of_waits(
    monkeypatch: pytest.MonkeyPatch, others: str
) -> None:
    world: Any = SimpleNamespace(device=torch.device("cuda", 0), gather=lambda mine: [mine, others])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1"))
    assert claims_bubble(world, None) == claims_bubble(world, 0.01) == (others != "GPU-1")
