"""What routes cost is told of the step that was counted, and time lost against balanced routes of the same run."""

from typing import Any

import pytest
import torch
from ranks import Ranks
from test_ep import step_of
from test_ep_layer import layer_of

from bench.world import World
from workloads.experts.ep_explain import explain_experts, routed_by
from workloads.experts.expert_loads import Routed
from workloads.experts.moe import MoeLayer
from workloads.experts.moe_case import moe_of
from workloads.experts.routing import NOWHERE
from workloads.shapes import Shape

pytestmark = pytest.mark.measures

SHAPE = Shape(recipe="gpt", layers=1, hidden=32, heads=4, kv_heads=2, ffn=64, sequence=4, vocabulary=64)


def test_what_a_rank_routed_is_asked_kept_and_rows() -> None:
    """Two ranks of two experts: a token that takes both of a rank is one row."""
    moe = moe_of({"microbatch": 1, "ep": 2, "experts": 4, "capacity": 1.0}, SHAPE, 2)
    mixture = MoeLayer(SHAPE, moe)
    mixture.chosen[5] = torch.tensor([[0, 1], [0, 2], [0, 3], [NOWHERE, NOWHERE]])
    assert routed_by([mixture], 4) == [[Routed(asked=[3, 1, 1, 1], kept=[2, 1, 1, 1], rows=[2, 2])]]


def explained(world: World, params: dict[str, Any], budget: float = 0.0) -> tuple[dict[str, Any], dict[str, Any]]:
    step = layer_of(world, params)

    def begin() -> None:
        step.reset()
        world.barrier()

    found = step.explain(begin, budget)
    step.close()
    return found.metrics, found.details


def test_balanced_routes_lose_nothing(two_ranks: Ranks) -> None:
    for metrics, details in two_ranks.call("test_ep_explain:explained", params={"routing": "balanced"}):
        assert metrics["imbalance_lost"].value == 0.0
        assert "imbalance_slowdown" not in metrics
        assert metrics["imbalance.rank"].value == metrics["imbalance.expert"].value == 1.0
        assert metrics["dispatched"].value == metrics["dispatched_even"].value == 32 * 2 * 32 * 4 / 2
        assert details == {"expert_load": [[16] * 8], "rank_load": [[64, 64]]}


def test_time_lost_is_told_against_balanced_routes(two_ranks: Ranks) -> None:
    """20 ms a forward at the mean load and 40 ms a backward: the hot rank has half as much again, 30 ms."""
    params = {"routing": "hot_rank", "compute": "timed:20ms"}
    metrics, _ = two_ranks.call("test_ep_explain:explained", params=params, budget=2.0)[0]
    assert metrics["imbalance.rank"].value == 1.5
    assert metrics["imbalance_lost"].value == pytest.approx(0.03, rel=0.3)
    assert 1 < metrics["imbalance_slowdown"].value < 1.6
    assert "in turns, the slowest rank" in metrics["imbalance_lost"].method


def test_bandwidths_are_bytes_over_the_slowest_ranks_time(two_ranks: Ranks) -> None:
    metrics, _ = two_ranks.call("test_ep_explain:explained", params={"routing": "hot_rank"})[0]
    for way in ("dispatch", "combine"):
        seconds = metrics[f"{way}_time"].value
        logical = metrics[f"{way}_bandwidth.logical"]
        assert logical.value * seconds == pytest.approx(64 * 32 * 4)
        assert logical.better == "higher"
        wire = metrics[f"{way}_bandwidth.wire"].value * seconds
        # a quarter of rank 0's pairs leave it, three quarters of rank 1's come, and go back
        assert wire == pytest.approx(48 * 32 * 4 + (4 * 8 if way == "dispatch" else 0))


def test_a_rank_alone_has_loads_and_neither_bytes_nor_bandwidths(two_ranks: Ranks) -> None:
    metrics, _ = two_ranks.call("test_ep_explain:explained", params={"ep": 1, "routing": "ragged"})[0]
    assert metrics["imbalance.rank"].value == 1.6  # a quarter of the tokens, and all of them
    assert not any(name.startswith(("bytes", "dispatch", "exposed")) for name in metrics)


def test_a_router_has_no_closed_form_of_its_drops(two_ranks: Ranks) -> None:
    params = {"routing": "router", "capacity": 0.5}
    metrics, _ = two_ranks.call("test_ep_explain:explained", params=params)[0]
    assert "drop_rate_expected" not in metrics
    assert metrics["drop_rate"].value >= 0.5
    assert metrics["bytes_ratio.ep"].value == 1.0


def drops(world: World, routing: str, tp: int) -> tuple[float | None, float | None]:
    """Return the drop rate of a whole step, and its closed form."""
    params = {"routing": routing, "capacity": 0.5, "tp": tp, "sequence": 64, "experts": 4, "expert_ffn": 8}
    step = step_of(world, params)
    step.reset()
    found = explain_experts(step.seen(), step.step, step.reset, 0.0, step._balanced).metrics
    step.close()
    expected = found.get("drop_rate_expected")
    return found["drop_rate"].value, None if expected is None else expected.value


@pytest.mark.parametrize(("routing", "tp", "known"), [("hot_rank", 2, True), ("ragged", 2, False), ("ragged", 1, True)])
def test_drops_of_shared_sequences_have_a_closed_form_where_a_rank_is_one_source(
    two_ranks: Ranks, routing: str, tp: int, known: bool
) -> None:
    for rate, expected in two_ranks.call("test_ep_explain:drops", routing=routing, tp=tp):
        assert (expected is not None) == known
        assert rate == pytest.approx(expected, abs=0.03) if known else rate > 0
