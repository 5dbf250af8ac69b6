"""A rank's share of the simulated compute of a step on a mesh."""

import torch

from parbench.workloads.expert_parallel.moe_case import make_moe
from parbench.workloads.expert_parallel.moe_layer import exchange_ffns, let_experts_wait
from parbench.workloads.mesh.mesh_stages import count_wrong_fills
from parbench.workloads.model.shapes import SHAPES
from parbench.workloads.model.simulated_compute import SimulatedCompute, SimulatedLinear
from parbench.workloads.model.transformer import build

TINY = SHAPES["tiny"]
MOE = make_moe({"ep": 1, "experts": 8, "top_k": 2}, TINY, 1)


def test_wrong_fill_of_timed_gradient_is_counted() -> None:
    cpu = torch.device("cpu")
    model = build(TINY, 0, cpu)
    exchange_ffns(model, TINY, MOE, 0)
    let_experts_wait(model, 0.5, 64, SimulatedCompute(cpu), others=0.5)
    for name, module in model.named_modules():
        if isinstance(module, SimulatedLinear):
            is_replicated = name == "head" or "shared" in name
            fill = 6.0 if is_replicated else 3.0
            module.weight.grad = torch.full_like(module.weight, fill)
    assert count_wrong_fills(model, 3.0, tp=2, num_ranks=2) == 0
    query = model.get_parameter("layers.1.attention.q.weight")
    query.grad = torch.full_like(query, 6.0)
    assert count_wrong_fills(model, 3.0, tp=2, num_ranks=2) == 128 * 128
