"""What is around experts leaves them alone, averages the rest, and says what that sends."""

from typing import Any

import pytest
from ranks import Ranks
from test_ep import step_of
from torch import Tensor
from torch.distributed.tensor import DTensor

from bench.world import World
from workloads.costs import sent_bytes
from workloads.layout import local, whole

Params = dict[str, Any]


def held(world: World, params: Params) -> dict[str, Any]:
    """Return which parameters are distributed, the dense and padded sizes, and the closed form of bytes."""
    step = step_of(world, {"ep": 1, **params})
    rest = {name: p for name, p in step.layout.model.named_parameters() if ".experts." not in name}
    routed = {name: p for name, p in step.layout.model.named_parameters() if ".experts." in name}
    found = {
        "sharded": sum(isinstance(p, DTensor) for p in rest.values()),
        "rest": len(rest),
        "routed sharded": sum(isinstance(p, DTensor) for p in routed.values()),
        "psi": sum(p.numel() for p in rest.values()),
        "mine": sum(local(p).numel() for p in rest.values()),
        "expected": step.layout.expected_bytes["dp"],
        "notes": step.layout.notes,
    }
    step.close()
    return found


def test_ddp_holds_the_rest_whole(two_ranks: Ranks) -> None:
    for found in two_ranks.call("test_expert_rest:held", params={}):
        assert found["sharded"] == found["routed sharded"] == 0
        assert found["mine"] == found["psi"]
        assert found["expected"] == sent_bytes("all_reduce", found["psi"] * 4, 2)


def test_fsdp_shards_all_but_the_experts(two_ranks: Ranks) -> None:
    for found in two_ranks.call("test_expert_rest:held", params={"fsdp": True}):
        assert found["sharded"] == found["rest"]
        assert found["routed sharded"] == 0
        assert found["mine"] * 2 == found["psi"]
        gathered = 2 * sent_bytes("all_gather", found["psi"] * 4, 2)
        assert found["expected"] == gathered + sent_bytes("reduce_scatter", found["psi"] * 4, 2)
        assert any("exposed on gloo" in note for note in found["notes"])


def gradients(world: World, params: Params) -> tuple[list[float], list[float]]:
    """Return the sums of gradients of a dense parameter after each of two microbatches, and of the whole step."""
    step = step_of(world, {"accumulation": 2, **params})
    seen: list[Tensor] = []
    step.step()
    step.layout.optimizer.zero_grad()
    step._forward_backward()
    gradient = step.layout.model.get_parameter("layers.0.attention.q.weight").grad
    assert gradient is not None
    seen.append(whole(gradient))
    step.close()
    return [float(one.sum()) for one in seen], [float(one.abs().sum()) for one in seen]


@pytest.mark.parametrize("params", [{}, {"fsdp": True}], ids=str)
def test_after_the_last_microbatch_all_ranks_have_the_same_mean(two_ranks: Ranks, params: Params) -> None:
    first, second = two_ranks.call("test_expert_rest:gradients", params=params)
    assert first == second
    plain = two_ranks.call("test_expert_rest:gradients", params={})[0]
    assert first[1] == pytest.approx(plain[1], rel=1e-4)
