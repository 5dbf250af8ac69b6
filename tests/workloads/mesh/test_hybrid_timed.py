"""Waits of a hybrid step add up to what was asked for, whatever the mesh, and each part has its share."""

import pytest
import torch
from mesh_steps import EXPERTS, Params, assert_calibrated, small_hybrid, tell_waits
from ranks import Ranks

from bench.world.world import World
from workloads.expert_parallel.moe_case import moe_of
from workloads.expert_parallel.moe_layer import exchange_ffns, let_experts_wait
from workloads.mesh import mesh_step as hybrid
from workloads.mesh.mesh_stages import count_wrong_fills, shares_of
from workloads.model.shapes import SHAPES
from workloads.model.timed_compute import TimedCompute, TimedLinear, fill_distinct_gradients, make_timed
from workloads.model.transformer import build

TINY = SHAPES["tiny"]
CPU = torch.device("cpu")
MOE = moe_of({"ep": 1, "experts": 8, "top_k": 2}, TINY, 1)


def test_linear_layers_attention_under_cp_and_experts_share_by_multiply_adds() -> None:
    dense = shares_of(TINY, None, cp=1)
    assert (dense.linear, dense.experts, dense.attention) == (1.0, 0.0, 0.0)
    cut = shares_of(TINY, None, cp=2)
    weights, pairs = 4 * 128 * 128 + 2 * 128 * 512, 128 * 65  # h (s + 1)
    assert cut.attention == pytest.approx(pairs / (weights + pairs))
    assert shares_of(TINY, None, cp=4) == cut
    mixed = shares_of(TINY, MOE, cp=1)  # a token meets k experts and the shared one
    each = 2 * 128 * 256
    assert mixed.experts == pytest.approx(2 * each / (4 * 128 * 128 + each + 2 * each))
    all_three = shares_of(TINY, MOE, cp=2)
    assert all_three.experts < mixed.experts
    for found in (cut, mixed, all_three):
        assert found.linear + found.experts + found.attention == pytest.approx(1)


def test_a_gradient_that_is_not_what_was_filled_in_is_counted() -> None:
    model = build(TINY, 0, CPU)
    exchange_ffns(model, TINY, MOE, 0)
    let_experts_wait(model, 0.5, 64, TimedCompute(CPU), others=0.5)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, TimedLinear)}
    assert count_wrong_fills(model, 3.0, tp=2, num_ranks=2) == len(linears)
    for name, linear in linears.items():
        whole = name == "head" or "shared" in name
        linear.weight.grad = torch.full_like(linear.weight, 6.0 if whole else 3.0)
    assert count_wrong_fills(model, 3.0, tp=2, num_ranks=2) == 0
    linears["layers.1.attention.q"].weight.grad = torch.full((128, 128), 6.0)
    assert count_wrong_fills(model, 3.0, tp=2, num_ranks=2) == 128 * 128


@pytest.mark.parametrize(("dtype", "left"), [(torch.float32, 0.999), (torch.bfloat16, 0.75)])
def test_a_gradient_may_be_rounded_but_no_rank_may_be_missing(dtype: torch.dtype, left: float) -> None:
    """Of three ranks each adds a quarter at least."""
    model = build(TINY, 0, CPU, dtype)
    make_timed(model, 1.0, TimedCompute(CPU))
    fill_distinct_gradients(model, 0, 3, 3)
    for linear in (module for module in model.modules() if isinstance(module, TimedLinear)):
        linear.weight.grad = torch.full_like(linear.weight, 2 * linear.mean_fill * (1 + torch.finfo(dtype).eps))
    assert count_wrong_fills(model, 2, tp=1, num_ranks=3) == 0
    head = model.get_submodule("head")
    assert isinstance(head, TimedLinear)
    head.weight.grad = torch.full_like(head.weight, 2 * head.mean_fill * left)
    assert count_wrong_fills(model, 2, tp=1, num_ranks=3) == head.weight.numel()


def asked_for(world: World, params: Params) -> float:
    """Return how long this rank waits in a step, in microbatches' forward passes of T."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hybrid, "calibrate", assert_calibrated)
        step = small_hybrid(world, {"compute": "timed:2ms", **params})
    waits = [tell_waits(waiter) for waiter in (step._waiter, step._block_waiter)]
    step.reset()
    step.step()
    step.close()
    return sum(map(sum, waits)) / 2e-3 / step._options.accumulation


@pytest.mark.full
def test_the_mean_rank_waits_for_forward_and_twice_for_backward(two_ranks: Ranks) -> None:
    meshes: list[Params] = [{"mesh": mesh} for mesh in ("dp=2", "pp=2", "tp=2")]
    cases = (
        *meshes,
        {"mesh": "cp=2", "cp_method": "ulysses"},
        {"mesh": "dp=2,ep=2", **EXPERTS},
        {"mesh": "tp=2,etp=2", **EXPERTS},
        {"mesh": "cp=2,ep=2", **EXPERTS, "routing": "zipf"},
    )
    for params in cases:
        assert sum(two_ranks.call("test_hybrid_timed:asked_for", params=params)) / 2 == pytest.approx(3), params
    # contiguous parts leave the first rank less to attend to, zigzag as much
    first, last = two_ranks.call("test_hybrid_timed:asked_for", params={"mesh": "cp=2", "sequence": 64})
    assert first < 2.9 < 3.1 < last
    assert first + last == pytest.approx(6)
    even = two_ranks.call("test_hybrid_timed:asked_for", params={"mesh": "cp=2", "sequence": 64, "cp_method": "zigzag"})
    assert even == pytest.approx([3, 3], rel=1e-9)
    # an uneven router's rank waits longer
    hot = two_ranks.call("test_hybrid_timed:asked_for", params={"mesh": "dp=2,ep=2", **EXPERTS, "routing": "hot_rank"})
    assert max(hot) > 1.2 * min(hot)


@pytest.mark.full
def test_the_mean_rank_waits_so_where_axes_meet(four_ranks: Ranks) -> None:
    for params in ({"mesh": "pp=2,cp=2"}, {"mesh": "cp=2,tp=2"}, {"mesh": "pp=2,dp=2,ep=2", **EXPERTS}):
        found = four_ranks.call("test_hybrid_timed:asked_for", params=params)
        assert sum(found) / 4 == pytest.approx(3), params
