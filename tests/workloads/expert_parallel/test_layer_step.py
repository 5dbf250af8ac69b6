"""A layer and its dispatch alone give what one process does, see what is wrong, and tell what their routes cost."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from ep_steps import DROPS, NARROW, dispatch_of, layer_of, params_of, step_of, wrong_after
from ranks import Ranks
from training_steps import OF_NAME, Params

from parbench.bench.launch.control_channel import Outcome
from parbench.bench.plan.cases import make_case
from parbench.bench.plan.plan import Measure
from parbench.bench.rank.runner import CaseRun
from parbench.bench.rank.timing import Progress
from parbench.bench.world.benchmark import Description
from parbench.bench.world.world import Subgroups, World
from parbench.workloads.expert_parallel.expert_probe import routed_by
from parbench.workloads.expert_parallel.layer_step import LayerStep
from parbench.workloads.expert_parallel.moe_case import VARIANTS, moe_of
from parbench.workloads.expert_parallel.moe_layer import MoeLayer
from parbench.workloads.expert_parallel.routing import NOWHERE
from parbench.workloads.model.shapes import Shape
from parbench.workloads.step.layout import local
from parbench.workloads.step.probe import run_probes


def wrong_in(world: World, cases: Sequence[Params], steps: int = 2) -> list[tuple[Params, list[int]]]:
    found = [(params, wrong_after(layer_of(world, params), steps)) for params in cases]
    return [(params, wrong) for params, wrong in found if any(wrong)]


def wrong_dispatch_in(world: World, cases: Sequence[Params]) -> list[tuple[Params, int, list[int]]]:
    """Return the cases of a dispatch that are wrong after two steps, or right before anything has come back."""
    found = []
    for params in cases:
        step = dispatch_of(world, params)
        unset, wrong = step.check(), wrong_after(step, 2)
        if unset != 2 * 16 * 32 or any(wrong):
            found.append((params, unset, wrong))
    return found


def test_two_ranks_give_what_one_process_does(two_ranks: Ranks) -> None:
    cases: list[Params] = [{"variant": variant, "routing": "zipf", **DROPS} for variant in VARIANTS]
    cases += [
        {"recipe": "llama", "scores": "sigmoid", "routing": "router"},
        {"routing": "hot_rank", **NARROW},
        {"chunks": 4, "routing": "zipf", **DROPS},
        {"ep": 1, "routing": "balanced"},
        {"shared": 0, "top_k": 1, "routing": "router"},
    ]
    cases.append({"etp": 2, "routing": "zipf", **DROPS})
    assert two_ranks.call("test_layer_step:wrong_in", cases=cases) == [[], []]
    cases = [{"variant": variant, "routing": "router", "capacity": 1.0, **NARROW} for variant in VARIANTS]
    assert two_ranks.call("test_layer_step:wrong_dispatch_in", cases=cases) == [[], []]


WRONGS: list[Callable[[Any], object]] = [
    lambda step: step._out.data.mul_(1.001),
    lambda step: step.x.grad.mul_(1.001),
    lambda step: local(step.layer.experts.up.grad)[-1].mul_(1.001),
    lambda step: setattr(step.layer.router.weight, "grad", None),
]
WRONG_TRIPS: dict[Callable[[Any], object], int] = {
    lambda step: step._out[3, 5].add_(0.01): 1,
    lambda step: step._out[7].zero_(): 32,
}


def wrong_of(world: World) -> list[list[int]]:
    """Return how much is wrong where the last rank's layer is, and where its dispatch is, each in turn."""

    def wrong(step: Any, spoil: Callable[[Any], object]) -> int:
        step.reset()
        step.step()
        if world.rank == world.size - 1:
            spoil(step)
        found: int = step.check()
        step.close()
        return found

    of_layer = [wrong(layer_of(world, {"routing": "zipf", **DROPS}), spoil) for spoil in WRONGS]
    return [of_layer, [wrong(dispatch_of(world, {}), spoil) for spoil in WRONG_TRIPS]]


def test_each_wrong_is_caught_where_it_is(two_ranks: Ranks) -> None:
    (layer, dispatch), (wrong_layer, wrong_dispatch) = two_ranks.call("test_layer_step:wrong_of")
    del layer[2]  # experts' gradients are gathered from all ranks
    assert (layer, dispatch) == ([0] * 3, [0] * 2)
    assert min(wrong_layer) > 0
    assert wrong_dispatch == list(WRONG_TRIPS.values())


def misplaced(world: World) -> list[int]:
    """Return what is counted as misplaced: right ones, experts that count from another number on, and other routes."""
    found = []
    for wrong in (False, True):
        step = layer_of(world, {"routing": "zipf", **DROPS})
        step.reset()
        if wrong and world.rank == 1:
            numbers = step._numbers
            step._numbers = lambda rows, numbers=numbers: numbers(rows) + 1  # type: ignore[misc,method-assign]
        found.append(step.count_misplaced())
        step.close()
    step = layer_of(world, {"compute": "timed:1ms", "routing": "zipf"})
    step.reset()
    step.step()
    found.append(step.check())
    step._kept = lambda routes: routes % 2 == 0  # type: ignore[method-assign]
    found.append(step.check())
    step.close()
    return found


def test_rows_that_come_to_another_expert_are_counted_where_experts_wait_too(two_ranks: Ranks) -> None:
    for found in two_ranks.call("test_layer_step:misplaced"):
        assert [wrong > 0 for wrong in found] == [False, True, False, True]


def loads(world: World) -> list[list[int]]:
    """Return the loads of this rank's tokens by expert: as asked, balanced, and as asked again."""
    step, found = layer_of(world, {"routing": "hot_rank:9"}), []
    for balanced in (False, True, False):
        step._routes.balance(balanced)
        step.reset()
        assert step.layer.given is not None
        found.append(torch.bincount(step.layer.given.flatten(), minlength=8).tolist())
    step.close()
    return found


def test_balanced_routes_come_and_go(two_ranks: Ranks) -> None:
    for before, balanced, after in two_ranks.call("test_layer_step:loads"):
        assert balanced == [8] * 8
        assert min(min(loads[:4]) - max(loads[4:]) for loads in (before, after)) > 4


def test_routed_by_counts_asked_and_kept_pairs() -> None:
    shape = Shape(recipe="gpt", layers=1, hidden=32, heads=4, kv_heads=2, ffn=64, sequence=4, vocabulary=64)
    mixture = MoeLayer(shape, moe_of({"microbatch": 1, "ep": 2, "experts": 4, "capacity": 1.0}, shape, 2))
    mixture.chosen[5] = torch.tensor([[0, 1], [0, 2], [0, 3], [NOWHERE, NOWHERE]])
    asked, kept = routed_by([mixture], 4)
    assert (asked.tolist(), kept.tolist()) == ([[[3, 1, 1, 1]]], [[[2, 1, 1, 1]]])


def measured(world: World, params: Params, seconds: float = 3.0) -> Outcome:
    definition = OF_NAME["ep_layer"]
    case = make_case(definition.name, definition.target, params_of("ep_layer", params))
    return CaseRun(case, Subgroups(world), Measure(warmup=1, max_iterations=6), Progress(), None).visit(seconds)


def test_a_row_has_all_that_routes_cost(two_ranks: Ranks) -> None:
    outcome, _ = two_ranks.call("test_layer_step:measured", params={"routing": "hot_rank", "capacity": 1.0})
    assert (outcome.status, outcome.headline) == ("ok", "step_time"), outcome.reason
    value = {name: metric.value for name, metric in outcome.explained.items()}
    assert value["imbalance.rank"] == 4 / 3  # capacity takes off the hot rank what it has too much
    assert value["drop_rate"] == value["drop_rate_expected"] == 0.25
    assert (value["imbalance_slowdown"] or 0) > 0
    assert "imbalance_time" in value
    assert outcome.details["rank_load"] == [[64, 32]]
    assert outcome.details["expert_load"] == [[24, 24, 24, 24, 8, 8, 8, 8]]


def explained(world: World, cases: list[Params]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    found = []
    for params in cases:
        step = layer_of(world, params)

        def begin(step: LayerStep = step) -> None:
            step.reset()
            world.barrier()

        told = step.explain(begin, 0.0)
        step.close()
        found.append((told.metrics, told.details))
    return found


def test_loads_bytes_and_bandwidths_are_told_where_there_are_any(two_ranks: Ranks) -> None:
    cases: list[Params] = [{"routing": "balanced"}, {"routing": "hot_rank"}, {"ep": 1, "routing": "hot_rank"}]
    cases.append({"routing": "router", "capacity": 0.5})
    [(balanced, details), (hot, _), (alone, _), (router, _)] = two_ranks.call("test_layer_step:explained", cases=cases)[
        0
    ]
    assert balanced["imbalance_time"].value == 0.0
    assert "imbalance_slowdown" not in balanced
    assert [hot[name].value for name in ("imbalance_time", "imbalance_slowdown")] == [None, None]
    assert hot["imbalance_time"].method.endswith("one turn tells none")
    assert balanced["imbalance.rank"].value == balanced["imbalance.expert"].value == 1.0
    assert balanced["dispatch_bytes"].value == balanced["dispatch_bytes_even"].value == 32 * 2 * 32 * 4 / 2
    assert details == {"expert_load": [[16] * 8], "rank_load": [[64, 64]]}
    for way in ("dispatch", "combine"):
        seconds, logical = hot[f"{way}_time"].value, hot[f"{way}_bandwidth.logical"]
        assert logical.value * seconds == pytest.approx(64 * 32 * 4)
        assert logical.better == "higher"
        # a quarter of rank 0's pairs leave it, three quarters of rank 1's come, and go back
        wire = hot[f"{way}_bandwidth.wire"].value * seconds
        assert wire == pytest.approx(48 * 32 * 4 + (4 * 8 if way == "dispatch" else 0))
    assert alone["imbalance.rank"].value == 1.0  # each rank computes its own tokens
    assert not any(name.startswith(("bytes", "dispatch", "exposed")) for name in alone)
    assert "drop_rate_expected" not in router
    assert router["drop_rate"].value >= 0.5
    assert router["bytes_ratio.ep"].value == 1.0


def told(world: World) -> tuple[Description, dict[str, float | None]]:
    step = dispatch_of(world, {"routing": "zipf", "variant": "allgather"})
    step.reset()
    step.step()
    found = step.explain(step.reset, 0.0)
    step.close()
    return step.describe(), {name: metric.value for name, metric in found.metrics.items()}


def test_a_row_of_a_dispatch_counts_forward_bytes_alone_and_claims_nothing_else(two_ranks: Ranks) -> None:
    for description, metrics in two_ranks.call("test_layer_step:told"):
        assert metrics["bytes_ratio.ep"] == 1.0
        assert description.headline == "step_time"
        assert [(work.name, work.amount) for work in description.work] == [("pairs_per_second", 2 * 32 * 2)]
        assert description.notes[0].startswith("ep_dispatch: forward dispatch and combine alone; no claim")


def drops(world: World) -> list[tuple[float, float | None]]:
    sizes: Params = {"capacity": 0.5, "sequence": 64, "experts": 4, "expert_ffn": 8}
    found = []
    for tp in (1, 2):
        step = step_of(world, {"routing": "hot_rank", "tp": tp, **sizes})
        step.reset()
        metrics = run_probes(world, [step.expert_probe()], step.step, step.reset, 0.0).metrics
        step.close()
        expected = metrics.get("drop_rate_expected")
        found.append((metrics["drop_rate"].value or 0.0, None if expected is None else expected.value))
    return found


def test_drop_rate_agrees_with_the_analytical_rate(two_ranks: Ranks) -> None:
    for by_tp in two_ranks.call("test_layer_step:drops"):
        for dropped, expected in by_tp:
            assert 0 < dropped == pytest.approx(expected, abs=0.03)
