"""A MoE layer and its dispatch give what one process does, and report what their routes cost."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from parbench.bench.launch.control_channel import Outcome
from parbench.bench.plan.cases import make_case
from parbench.bench.plan.plan import Measure
from parbench.bench.rank.runner import CaseRun
from parbench.bench.rank.timing import Progress
from parbench.bench.world.benchmark import Description, Explanation
from parbench.bench.world.world import Subgroups, World
from parbench.workloads.expert_parallel.expert_probe import routed_by
from parbench.workloads.expert_parallel.moe_case import VARIANTS, moe_of
from parbench.workloads.expert_parallel.moe_layer import MoeLayer
from parbench.workloads.expert_parallel.routing import NOWHERE
from parbench.workloads.model.shapes import Shape
from parbench.workloads.step.layout import local
from parbench.workloads.step.probe import run_probes
from tests.support.ep_steps import (
    DROPS,
    NARROW,
    build_dispatch,
    build_layer,
    build_step,
    count_wrong_after_steps,
    make_params,
)
from tests.support.ranks import Ranks
from tests.support.training_steps import DEFINITION_BY_NAME, Params

PAIRS, HIDDEN = 64, 32  # of a rank: 32 tokens take two experts each


def wrong_layers(world: World, cases: list[Params]) -> list[list[int]]:
    return [count_wrong_after_steps(build_layer(world, params), 2) for params in cases]


def test_layer_matches_one_process(two_ranks: Ranks) -> None:
    cases: list[Params] = [{"variant": name, "routing": "zipf", **DROPS} for name in VARIANTS]
    cases += [
        {"recipe": "llama", "scores": "sigmoid", "routing": "router"},
        {"routing": "hot_rank", **NARROW},
        {"chunks": 4, "routing": "zipf", **DROPS},
        {"ep": 1, "routing": "balanced"},
        {"shared": 0, "top_k": 1, "routing": "router"},
        {"etp": 2, "routing": "zipf", **DROPS},
    ]
    for wrong in two_ranks.call(
        "tests.workloads.expert_parallel.test_layer_step:wrong_layers", cases=cases
    ):
        assert wrong == [[0, 0]] * len(cases)


def check_dispatch(world: World, variant: str) -> tuple[int, list[int]]:
    """Return the counts of a check before any step, and after each of two steps."""
    params = {"variant": variant, "routing": "router", "capacity": 1.0, **NARROW}
    step = build_dispatch(world, params)
    return step.check(), count_wrong_after_steps(step, 2)


@pytest.mark.parametrize("variant", VARIANTS)
def test_dispatch_matches_one_process(two_ranks: Ranks, variant: str) -> None:
    results = two_ranks.call(
        "tests.workloads.expert_parallel.test_layer_step:check_dispatch", variant=variant
    )
    assert results == [(PAIRS // 2 * HIDDEN, [0, 0])] * 2


LAYER_CORRUPTIONS: list[Callable[[Any], object]] = [
    lambda step: step._out.data.mul_(1.001),
    lambda step: step.x.grad.mul_(1.001),
    lambda step: setattr(step.layer.router.weight, "grad", None),
    lambda step: local(step.layer.experts.up.grad)[-1].mul_(1.001),  # gathered from all ranks
]
DISPATCH_CORRUPTIONS: list[Callable[[Any], object]] = [
    lambda step: step._out[3, 5].add_(0.01),
    lambda step: step._out[7].zero_(),
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

    params = {"routing": "zipf", **DROPS}
    layer = [check(build_layer(world, params), corrupt) for corrupt in LAYER_CORRUPTIONS]
    dispatch = [check(build_dispatch(world, {}), corrupt) for corrupt in DISPATCH_CORRUPTIONS]
    return layer, dispatch


def test_corrupted_layer_and_dispatch_detected(two_ranks: Ranks) -> None:
    first, second = two_ranks.call(
        "tests.workloads.expert_parallel.test_layer_step:check_corrupted"
    )
    assert (first[0][:3], first[1]) == ([0, 0, 0], [0, 0])
    assert min(second[0]) > 0
    assert second[1] == [1, HIDDEN]


def count_misplaced(world: World) -> list[int]:
    """Return counts of misplaced rows: right, with other expert numbers, and of timed experts."""
    step = build_layer(world, {"routing": "zipf", **DROPS})
    step.reset()
    counts = [step.count_misplaced()]
    numbers = step._numbers
    if world.rank == 1:
        step._numbers = lambda rows: numbers(rows) + 1  # type: ignore[method-assign]
    counts.append(step.count_misplaced())
    step.close()
    step = build_layer(world, {"compute": "timed:1ms", "routing": "zipf"})
    step.reset()
    step.step()
    counts.append(step.check())
    step._kept = lambda routes: routes % 2 == 0  # type: ignore[method-assign]
    counts.append(step.check())
    step.close()
    return counts


def test_misplaced_rows_are_counted(two_ranks: Ranks) -> None:
    for counts in two_ranks.call("tests.workloads.expert_parallel.test_layer_step:count_misplaced"):
        assert [count > 0 for count in counts] == [False, True, False, True]


def expert_loads(world: World) -> list[list[int]]:
    """Return this rank's tokens by expert with hot, balanced and hot routes."""
    step, loads = build_layer(world, {"routing": "hot_rank:9"}), []
    for balanced in (False, True, False):
        step._routes.balance(balanced)
        step.reset()
        assert step.layer.given is not None
        loads.append(torch.bincount(step.layer.given.flatten(), minlength=8).tolist())
    step.close()
    return loads


def test_routes_balance_temporarily(two_ranks: Ranks) -> None:
    for before, balanced, after in two_ranks.call(
        "tests.workloads.expert_parallel.test_layer_step:expert_loads"
    ):
        assert balanced == [8] * 8
        assert min(before[:4]) > max(before[4:]) + 4
        assert min(after[:4]) > max(after[4:]) + 4


def test_routed_by_counts_asked_and_kept_pairs() -> None:
    shape = Shape(
        recipe="gpt", layers=1, hidden=32, heads=4, kv_heads=2, ffn=64, sequence=4, vocabulary=64
    )
    params = {"microbatch": 1, "ep": 2, "experts": 4, "capacity": 1.0}
    layer = MoeLayer(shape, moe_of(params, shape, 2))
    layer.chosen[5] = torch.tensor([[0, 1], [0, 2], [0, 3], [NOWHERE, NOWHERE]])
    asked, kept = routed_by([layer], 4)
    assert asked.tolist() == [[[3, 1, 1, 1]]]
    assert kept.tolist() == [[[2, 1, 1, 1]]]


def run_case(world: World, params: Params) -> Outcome:
    definition = DEFINITION_BY_NAME["ep_layer"]
    case = make_case(definition.name, definition.target, make_params("ep_layer", params))
    measure = Measure(warmup=1, max_iterations=6)
    return CaseRun(case, Subgroups(world), measure, Progress(), None).visit(3.0)


def test_result_row_of_hot_rank(two_ranks: Ranks) -> None:
    params = {"routing": "hot_rank", "capacity": 1.0}
    outcome, _ = two_ranks.call(
        "tests.workloads.expert_parallel.test_layer_step:run_case", params=params
    )
    assert (outcome.status, outcome.headline) == ("ok", "step_time"), outcome.reason
    value = {name: metric.value for name, metric in outcome.explained.items()}
    assert value["imbalance.rank"] == 4 / 3
    assert value["drop_rate"] == value["drop_rate_expected"] == 0.25
    assert (value["imbalance_slowdown"] or 0) > 0
    assert outcome.details["rank_load"] == [[64, 32]]
    assert outcome.details["expert_load"] == [[24, 24, 24, 24, 8, 8, 8, 8]]


def explain_layer(world: World, params: Params) -> Explanation:
    step = build_layer(world, params)

    def begin() -> None:
        step.reset()
        world.barrier()

    explanation = step.explain(begin, 0.0)
    step.close()
    return explanation


def values(ranks: Ranks, **params: Any) -> dict[str, float | None]:
    explanation, _ = ranks.call(
        "tests.workloads.expert_parallel.test_layer_step:explain_layer", params=params
    )
    return {name: metric.value for name, metric in explanation.metrics.items()}


def test_explanation_of_balanced_routes(two_ranks: Ranks) -> None:
    value = values(two_ranks, routing="balanced")
    assert value["imbalance_time"] == 0.0
    assert "imbalance_slowdown" not in value
    assert value["imbalance.rank"] == value["imbalance.expert"] == 1.0
    sent = PAIRS * HIDDEN * 4 / 2
    assert value["dispatch_bytes"] == value["dispatch_bytes_even"] == sent


def test_explanation_of_hot_rank_has_bandwidths(two_ranks: Ranks) -> None:
    """A quarter of rank 0's pairs leave it, and three quarters of rank 1's come and return."""
    value = values(two_ranks, routing="hot_rank")
    for direction, counts in (("dispatch", 4 * 8), ("combine", 0)):
        seconds = value[f"{direction}_time"] or 0.0
        logical = seconds * (value[f"{direction}_bandwidth.logical"] or 0.0)
        wire = seconds * (value[f"{direction}_bandwidth.wire"] or 0.0)
        assert logical == pytest.approx(PAIRS * HIDDEN * 4)
        assert wire == pytest.approx(48 * HIDDEN * 4 + counts)


def test_explanation_without_exchange_has_no_bytes(two_ranks: Ranks) -> None:
    value = values(two_ranks, ep=1, routing="hot_rank")
    assert value["imbalance.rank"] == 1.0
    assert not any(name.startswith(("bytes", "dispatch", "exposed")) for name in value)


def test_explanation_of_router_has_no_expected_drops(two_ranks: Ranks) -> None:
    value = values(two_ranks, routing="router", capacity=0.5)
    assert "drop_rate_expected" not in value
    assert (value["drop_rate"] or 0) >= 0.5
    assert value["bytes_ratio.ep"] == 1.0


def describe_dispatch(world: World) -> tuple[Description, float | None]:
    step = build_dispatch(world, {"routing": "zipf", "variant": "allgather"})
    step.reset()
    step.step()
    ratio = step.explain(step.reset, 0.0).metrics["bytes_ratio.ep"].value
    step.close()
    return step.describe(), ratio


def test_dispatch_counts_forward_only(two_ranks: Ranks) -> None:
    for description, ratio in two_ranks.call(
        "tests.workloads.expert_parallel.test_layer_step:describe_dispatch"
    ):
        assert ratio == 1.0
        assert description.headline == "step_time"
        [rate] = description.work
        assert (rate.name, rate.amount) == ("pairs_per_second", 2 * PAIRS)


def drop_rates(world: World, tp: int) -> list[float | None]:
    params = {"routing": "hot_rank", "tp": tp, "capacity": 0.5, "sequence": 64, "experts": 4}
    step = build_step(world, params)
    step.reset()
    metrics = run_probes(world, [step.expert_probe()], step.step, step.reset, 0.0).metrics
    step.close()
    return [metrics[name].value for name in ("drop_rate", "drop_rate_expected")]


@pytest.mark.parametrize("tp", [1, 2])
def test_drop_rate_is_analytical(two_ranks: Ranks, tp: int) -> None:
    for measured, expected in two_ranks.call(
        "tests.workloads.expert_parallel.test_layer_step:drop_rates", tp=tp
    ):
        assert 0 < measured == pytest.approx(expected, abs=0.03)
