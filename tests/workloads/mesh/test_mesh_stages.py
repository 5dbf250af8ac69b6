"""A rank's share of the simulated compute of a step on a mesh."""

import pytest
import torch

from parbench.workloads.expert_parallel.moe_case import make_moe
from parbench.workloads.expert_parallel.moe_layer import replace_ffns_with_moe, simulate_experts
from parbench.workloads.mesh.mesh_stages import (
    count_wrong_fills,
    shares_of,
)
from parbench.workloads.model.shapes import SHAPES
from parbench.workloads.model.timed_compute import TimedCompute, TimedLinear
from parbench.workloads.model.transformer import build

TINY = SHAPES["tiny"]
MOE = make_moe({"ep": 1, "experts": 8, "top_k": 2}, TINY, 1)


def test_shares_of_compute_are_multiply_adds() -> None:
    """Only attention over ranks and experts wait apart from the linear layers."""
    assert shares_of(TINY, None, cp=1).linear == 1.0
    attention = shares_of(TINY, None, cp=2).attention
    weights = 4 * 128 * 128 + 2 * 128 * 512
    pairs = 128 * 65  # h (s + 1)
    assert attention == pytest.approx(pairs / (weights + pairs))
    experts = shares_of(TINY, MOE, cp=1).experts
    expert = 2 * 128 * 256  # a token meets two of them and the shared one
    assert experts == pytest.approx(2 * expert / (4 * 128 * 128 + 3 * expert))


def test_wrong_fill_of_timed_gradient_is_counted() -> None:
    cpu = torch.device("cpu")
    model = build(TINY, 0, cpu)
    replace_ffns_with_moe(model, TINY, MOE, 0)
    simulate_experts(model, 0.5, 64, TimedCompute(cpu), linear_seconds=0.5)
    for name, module in model.named_modules():
        if isinstance(module, TimedLinear):
            is_replicated = name == "head" or "shared" in name
            fill = 6.0 if is_replicated else 3.0
            module.weight.grad = torch.full_like(module.weight, fill)
    assert count_wrong_fills(model, 3.0, tp=2, num_ranks=2) == 0
    query = model.get_parameter("layers.1.attention.q.weight")
    query.grad = torch.full_like(query, 6.0)
    assert count_wrong_fills(model, 3.0, tp=2, num_ranks=2) == 128 * 128
