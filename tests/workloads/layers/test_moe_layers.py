"""A MoE layer and its dispatch match one process, and report what their routes cost."""

from collections.abc import Callable
from typing import Any

import pytest

from parbench.bench.world.benchmark import Description
from parbench.bench.world.world import World
from parbench.workloads.expert_parallel.dispatchers import DISPATCHERS
from parbench.workloads.mesh.mesh import get_local_tensor
from tests.support.ranks import Ranks
from tests.support.workloads.ep_steps import (
    BFLOAT16,
    DROPS,
    build_dispatch,
    build_layer,
)
from tests.support.workloads.training_steps import Params, count_wrong_after_step

PAIRS = 64  # of a rank: 32 tokens take two experts each
HIDDEN = 32
COUNTS = 4 * 8  # dispatch also sends the number of rows of four experts
ZIPF: Params = {"routing": "zipf", **DROPS}


def count_wrong(world: World, params: Params) -> list[int]:
    step = build_layer(world, params)
    counts = [count_wrong_after_step(step) for _ in range(2)]
    step.close()
    return counts


@pytest.mark.parametrize(
    "params",
    [
        {"variant": "all_to_all", **ZIPF},
        {"variant": "allgather", **ZIPF},
        {"recipe": "llama", "routing": "router"},
        {"routing": "zipf", **BFLOAT16},
    ],
)
def test_layer_matches_one_process(two_ranks: Ranks, params: Params) -> None:
    assert two_ranks.call(f"{__name__}:count_wrong", params=params) == [[0, 0]] * 2


def check_dispatch(world: World, variant: str) -> tuple[int, int]:
    """Return the counts of a check before any step, and after a step."""
    params = {"variant": variant, "routing": "router", "capacity": 1.0, **BFLOAT16}
    step = build_dispatch(world, params)
    counts = step.check(), count_wrong_after_step(step)
    step.close()
    return counts


@pytest.mark.parametrize("variant", DISPATCHERS)
def test_dispatch_matches_one_process(two_ranks: Ranks, variant: str) -> None:
    for unset, wrong in two_ranks.call(f"{__name__}:check_dispatch", variant=variant):
        assert unset == PAIRS // 2 * HIDDEN
        assert wrong == 0


LAYER_CORRUPTIONS: list[Callable[[Any], object]] = [
    lambda step: step.output.data.mul_(1.001),
    lambda step: step.x.grad.mul_(1.001),
    lambda step: setattr(step.layer.router.weight, "grad", None),
    lambda step: get_local_tensor(step.layer.experts.up.grad)[-1].mul_(1.001),
]
DISPATCH_CORRUPTIONS: list[Callable[[Any], object]] = [
    lambda step: step.output[3, 5].add_(0.01),
    lambda step: step.output[7].zero_(),
]


def check_corrupted(world: World) -> tuple[list[int], list[int]]:
    """Return the counts of a layer and of a dispatch that rank 1 corrupts."""

    def check(step: Any, corrupt: Callable[[Any], object]) -> int:
        step.reset()
        step.step()
        if world.rank == 1:
            corrupt(step)
        wrong: int = step.check()
        step.close()
        return wrong

    layer = [check(build_layer(world, ZIPF), corrupt) for corrupt in LAYER_CORRUPTIONS]
    dispatch = [check(build_dispatch(world, {}), corrupt) for corrupt in DISPATCH_CORRUPTIONS]
    return layer, dispatch


def test_corrupted_layer_and_dispatch_are_detected(two_ranks: Ranks) -> None:
    _, (layer, dispatch) = two_ranks.call(f"{__name__}:check_corrupted")
    assert min(layer) > 0
    assert dispatch == [1, HIDDEN]


def explain_layer(world: World, params: Params) -> dict[str, float | None]:
    step = build_layer(world, params)
    metrics = step.explain_step(step.reset, 0.0).metrics
    step.close()
    return {name: metric.value for name, metric in metrics.items()}


def explain(ranks: Ranks, params: Params) -> dict[str, Any]:
    metrics: dict[str, Any] = ranks.call(f"{__name__}:explain_layer", params=params)[0]
    return metrics


def test_explanation_of_balanced_routing(two_ranks: Ranks) -> None:
    metrics = explain(two_ranks, {"routing": "balanced"})
    assert metrics["imbalance.rank"] == 1.0
    sent = PAIRS * HIDDEN * 4 / 2 + COUNTS
    num_bytes = metrics["dispatch_time"] * metrics["dispatch_bandwidth.wire"]
    assert num_bytes == pytest.approx(sent, rel=0.5)


def test_explanation_of_uneven_routing(two_ranks: Ranks) -> None:
    metrics = explain(two_ranks, {"routing": "zipf", "capacity": 1.0})
    assert metrics["imbalance.rank"] > 1
    assert metrics["drop_rate"] > 0
    assert metrics["combine_time"] > 0
    for phase in ("packing", "transfer"):
        assert 0 < metrics[f"dispatch_{phase}_time"] < 2 * metrics["dispatch_time"]


def describe_dispatch(world: World) -> tuple[Description, float | None]:
    step = build_dispatch(world, {"routing": "zipf", "variant": "allgather"})
    step.reset()
    step.step()
    ratio = step.explain_step(step.reset, 0.0).metrics["bytes_ratio.ep"].value
    step.close()
    return step.describe(), ratio


def test_dispatch_counts_forward_only(two_ranks: Ranks) -> None:
    description, ratio = two_ranks.call(f"{__name__}:describe_dispatch")[0]
    assert ratio == 1.0
    [rate] = description.work
    assert rate.name == "pairs_per_second"
    assert rate.amount == 2 * PAIRS
