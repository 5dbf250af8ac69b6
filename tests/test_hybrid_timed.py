"""Waits of a hybrid step add up to what was asked for, whatever the mesh, and each part has its share."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import Ranks
from test_hybrid import EXPERTS, small

from bench.world import World
from workloads.context.cp_plan import ContextPlan
from workloads.experts.moe import exchange_ffns, mixtures
from workloads.experts.moe_case import moe_of
from workloads.hybrid.constraints import CP_METHODS
from workloads.hybrid.hybrid_timed import count_wrong_fills, let_layers_wait, shares_of, waiting_kernel
from workloads.model import build
from workloads.shapes import SHAPES
from workloads.timed import TimedLinear, Waiter, tell_apart

TINY = SHAPES["tiny"]
CPU = torch.device("cpu")
MOE = moe_of({"ep": 1, "experts": 8, "top_k": 2}, TINY, 1)


def test_linear_layers_take_all_where_nothing_else_waits() -> None:
    found = shares_of(TINY, None, cp=1)
    assert (found.linear, found.experts, found.attention) == (1.0, 0.0, 0.0)


def test_attention_takes_its_multiply_adds_where_cp_cuts_it() -> None:
    found = shares_of(TINY, None, cp=2)
    weights, pairs = 4 * 128 * 128 + 2 * 128 * 512, 128 * 65  # h (s + 1)
    assert found.attention == pytest.approx(pairs / (weights + pairs))
    assert found.linear + found.attention == pytest.approx(1)
    assert shares_of(replace(TINY, sequence=4096), None, cp=2).attention > 0.5
    assert shares_of(TINY, None, cp=4) == found


def test_a_token_meets_k_experts_and_the_shared_one() -> None:
    found = shares_of(TINY, MOE, cp=1)
    each = 2 * 128 * 256
    assert found.experts == pytest.approx(2 * each / (4 * 128 * 128 + each + 2 * each))
    assert found.linear + found.experts == pytest.approx(1)
    all_three = shares_of(TINY, MOE, cp=2)
    assert all_three.linear + all_three.experts + all_three.attention == pytest.approx(1)
    assert all_three.experts < found.experts


def test_linear_layers_and_experts_wait_for_their_shares() -> None:
    model = build(TINY, 0, CPU)
    exchange_ffns(model, TINY, MOE, 0)
    let_layers_wait(model, 8.0, shares_of(TINY, MOE, cp=1), 64, Waiter(CPU))
    linear = sum(module.seconds for module in model.modules() if isinstance(module, TimedLinear))
    waits = [mixture.experts.wait_of for mixture in mixtures(model)]
    experts = sum(64 * 2 * wait.seconds_per_row for wait in waits if wait is not None)
    assert len(waits) == 4
    exchange_ffns(model, TINY, replace(MOE, etp=2), 0)
    let_layers_wait(model, 8.0, shares_of(TINY, MOE, cp=1), 64, Waiter(CPU))
    split = mixtures(model)[0].experts.wait_of
    assert split is not None
    assert waits[0] is not None
    assert split.seconds_per_row == pytest.approx(waits[0].seconds_per_row / 2)
    assert linear + experts == pytest.approx(8)
    assert experts == pytest.approx(8 * shares_of(TINY, MOE, cp=1).experts)


@pytest.mark.parametrize("method", CP_METHODS)
def test_the_mean_rank_of_cp_attends_for_so_long(method: str) -> None:
    plan = ContextPlan(method=method, mask="causal", sequence=64, ranks=4, ulysses=4 if method == "ulysses" else 1)
    kernel = waiting_kernel(0.5, plan, microbatch=2, heads=8, waiter=Waiter(CPU))
    heads = 2 if method == "ulysses" else 8
    pairs = [2 * heads * sum(plan.pairs(rank, step) for step in range(plan.num_steps)) for rank in range(4)]
    assert sum(pairs) / 4 * kernel._seconds_per_pair == pytest.approx(0.5)


def test_a_gradient_that_is_not_what_was_filled_in_is_counted() -> None:
    model = build(TINY, 0, CPU)
    exchange_ffns(model, TINY, MOE, 0)
    let_layers_wait(model, 1.0, shares_of(TINY, MOE, cp=1), 64, Waiter(CPU))
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
    let_layers_wait(model, 1.0, shares_of(TINY, None, cp=1), 64, Waiter(CPU))
    tell_apart(model, 0, 3, 3)
    for linear in (module for module in model.modules() if isinstance(module, TimedLinear)):
        linear.weight.grad = torch.full_like(linear.weight, 2 * linear.mean_fill * (1 + torch.finfo(dtype).eps))
    assert count_wrong_fills(model, 2, tp=1, num_ranks=3) == 0
    head = next(module for name, module in model.named_modules() if name == "head")
    assert isinstance(head, TimedLinear)
    head.weight.grad = torch.full_like(head.weight, 2 * head.mean_fill * left)
    assert count_wrong_fills(model, 2, tp=1, num_ranks=3) == head.weight.numel()


def asked_for(world: World, params: dict[str, Any]) -> float:
    """Return how long this rank waits in a step, in microbatches' forward passes of T."""
    step = small(world, {"compute": "timed:2ms", **params})
    step._waiter.forward_scale = step._waiter.backward_scale = 1.0
    asked: list[float] = []

    def counted(waiting: Callable[[float], AbstractContextManager[None]]) -> Any:
        @contextmanager
        def and_count(seconds: float) -> Iterator[None]:
            asked.append(seconds)
            with waiting(seconds):
                yield

        return and_count

    for waiter in (step._waiter, step._block_waiter):
        waiter.waiting = counted(waiter.waiting)  # type: ignore[method-assign]
    step.reset()
    step.step()
    step.close()
    return sum(asked) / 2e-3 / step._options.accumulation


ASKED: list[dict[str, Any]] = [
    {"mesh": "dp=2"},
    {"mesh": "pp=2"},
    {"mesh": "tp=2"},
    {"mesh": "cp=2"},
    {"mesh": "cp=2", "cp_method": "ulysses"},
    {"mesh": "cp=2", "cp_method": "zigzag", "sequence": 64},
    {"mesh": "dp=2,ep=2", **EXPERTS},
    {"mesh": "tp=2", **EXPERTS, "routing": "balanced"},
    {"mesh": "tp=2,etp=2", **EXPERTS},
    {"mesh": "cp=2,ep=2", **EXPERTS, "routing": "zipf"},
]


@pytest.mark.parametrize("params", ASKED, ids=str)
def test_the_mean_rank_waits_for_forward_and_twice_for_backward(two_ranks: Ranks, params: dict[str, Any]) -> None:
    found = two_ranks.call("test_hybrid_timed:asked_for", params=params)
    assert sum(found) / 2 == pytest.approx(3)


def test_contiguous_parts_leave_the_first_rank_less_to_attend_to(two_ranks: Ranks) -> None:
    first, last = two_ranks.call("test_hybrid_timed:asked_for", params={"mesh": "cp=2", "sequence": 64})
    assert first < 2.9 < 3.1 < last
    even = two_ranks.call("test_hybrid_timed:asked_for", params={"mesh": "cp=2", "sequence": 64, "cp_method": "zigzag"})
    assert even[0] == pytest.approx(even[1], rel=1e-9)


def test_an_uneven_router_s_rank_waits_longer(two_ranks: Ranks) -> None:
    params = {"mesh": "dp=2,ep=2", **EXPERTS, "routing": "hot_rank"}
    found = two_ranks.call("test_hybrid_timed:asked_for", params=params)
    assert max(found) > 1.2 * min(found)


@pytest.mark.slow
def test_the_mean_rank_waits_so_where_axes_meet(four_ranks: Ranks) -> None:
    for params in ({"mesh": "pp=2,cp=2"}, {"mesh": "cp=2,tp=2"}, {"mesh": "pp=2,dp=2,ep=2", **EXPERTS}):
        found = four_ranks.call("test_hybrid_timed:asked_for", params=params)
        assert sum(found) / 4 == pytest.approx(3), params
