"""A step with experts on other ranks computes what one process does and sends analytical bytes."""

from typing import Any

from parbench.bench.world.benchmark import Description
from parbench.bench.world.world import World
from parbench.workloads.costs.flops import flops_per_token
from parbench.workloads.step.probe import run_probes
from tests.support.ep_steps import DROPS, NARROW, build_step, count_wrong_after_steps
from tests.support.ranks import Ranks
from tests.support.training_steps import Params


def wrong_steps(world: World, cases: list[Params], steps: int) -> list[list[int]]:
    return [count_wrong_after_steps(build_step(world, params), steps) for params in cases]


def test_expert_step_matches_one_process(two_ranks: Ranks) -> None:
    cases: list[Params] = [
        {"recipe": "llama", "aux": 0.1, "scores": "sigmoid"},
        {"variant": "allgather", "routing": "zipf", **DROPS},
        {"checkpointing": "full", "shared": 0, "routing": "hot_rank"},
        {"chunks": 3, "accumulation": 2, "routing": "hot_rank", **DROPS, **NARROW},
        {"ep": 1, "routing": "balanced", **DROPS},
        {"fsdp": True, "accumulation": 2, "vocabulary": 61},
        {"tp": 2, "recipe": "llama", "routing": "zipf", "aux": 0.1, "accumulation": 2, **DROPS},
        {"tp": 2, "etp": 2, "checkpointing": "full", "aux": 0.5, **DROPS},
        {"compute": "timed:4ms", "routing": "hot_rank"},
        {"compute": "timed:4ms", "tp": 2},
    ]
    for wrong in two_ranks.call(
        "tests.workloads.expert_parallel.test_expert_step:wrong_steps", cases=cases, steps=2
    ):
        assert wrong == [[0, 0]] * len(cases)


def test_expert_step_on_four_ranks(four_ranks: Ranks) -> None:
    cases: list[Params] = [
        {"ep": 2, "routing": "zipf", "accumulation": 2, **DROPS},
        {"etp": 2, "variant": "allgather", **DROPS},
        {"tp": 2, "ep": 2, "recipe": "llama", "aux": 0.1},
    ]
    for wrong in four_ranks.call(
        "tests.workloads.expert_parallel.test_expert_step:wrong_steps", cases=cases, steps=1
    ):
        assert wrong == [[0]] * len(cases)


def bytes_ratios(world: World, params: Params) -> dict[str, float | None]:
    """Return sent over analytical bytes of a step, by axis."""
    step = build_step(world, params)
    for _ in range(2):
        step.reset()
        step.step()
    probe = step.expert_probe()
    metrics = run_probes(world, [probe], step.step, step.reset, 0.0).metrics
    ratios = {axis: metrics[f"bytes_ratio.{axis}"].value for axis in step.layout.axes}
    step.close()
    return ratios


def assert_analytical_bytes(ranks: Ranks, axes: str, **params: Any) -> None:
    for ratios in ranks.call(
        "tests.workloads.expert_parallel.test_expert_step:bytes_ratios", params=params
    ):
        assert ratios == dict.fromkeys(axes.split(), 1.0), params


def test_expert_step_bytes(two_ranks: Ranks) -> None:
    all_gather: Params = {"variant": "allgather", "checkpointing": "full", "shared": 0}
    chunks: Params = {"chunks": 4, "routing": "zipf", "accumulation": 2, **NARROW}
    for params in (all_gather, chunks, {"routing": "hot_rank", "capacity": 1.0}):
        assert_analytical_bytes(two_ranks, "ep dp", **params)


def test_expert_step_bytes_on_four_ranks(four_ranks: Ranks) -> None:
    tp: Params = {"tp": 2, "ep": 2, "recipe": "llama", **NARROW}
    assert_analytical_bytes(four_ranks, "ep dp tp adp edp", **tp)
    etp: Params = {"etp": 2, "routing": "zipf", "fsdp": True, **DROPS}
    assert_analytical_bytes(four_ranks, "ep etp dp", **etp)
    etp = {"etp": 2, "variant": "allgather", "capacity": 0.5, "checkpointing": "full"}
    assert_analytical_bytes(four_ranks, "ep etp dp", **etp)


def explain(world: World, params: Params) -> dict[str, Any]:
    step = build_step(world, params)
    for _ in range(2):
        step.reset()
        step.step()
    metrics = step.explain(step.reset, 0.0).metrics
    step.close()
    return {name: metric.value for name, metric in metrics.items()}


def test_explanation_of_expert_step(two_ranks: Ranks) -> None:
    params = {"fsdp": True, "capacity": 1.0, **NARROW}
    value, _ = two_ranks.call(
        "tests.workloads.expert_parallel.test_expert_step:explain", params=params
    )
    assert {"exposed_comm.ep", "ect", "imbalance.rank", "imbalance_time", "drop_rate"} <= set(value)
    assert "memory_formula.activations" not in value
    for part in ("parameters", "gradients", "optimizer"):
        counted = value[f"memory_counted.{part}"]
        assert 0.99 * counted < value[f"memory_formula.{part}"] < 1.01 * counted


def describe(world: World, params: Params) -> tuple[Description, float]:
    step = build_step(world, {"capacity": 1.0, **params})
    step.close()
    return step.describe(), flops_per_token(step.spec.shape, step.moe)


def test_description_of_expert_step(two_ranks: Ranks) -> None:
    whole, per_token = two_ranks.call(
        "tests.workloads.expert_parallel.test_expert_step:describe", params={}
    )[0]
    split, _ = two_ranks.call(
        "tests.workloads.expert_parallel.test_expert_step:describe", params={"tp": 2}
    )[0]
    details = whole.details
    assert (details["slots"], split.details["slots"], details["expert_ffn"]) == (8, 4, 64)
    assert details["flops_per_rank"] == details["tokens_per_step"] * per_token / 2
    assert details["parameters"] > details["routed_parameters"] == 2 * 8 * 2 * 32 * 64
    assert split.details["tokens_per_step"] * 2 == details["tokens_per_step"]
    assert split.details["flops_per_rank"] * 2 == details["flops_per_rank"]
    assert split.details["axes"] == {axis: {"ranks": 2} for axis in ("dp", "tp", "ep")}
