"""What is left of gradients: each kind is summed over the axes whose ranks hold the same parameter, and no others."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import nn

from bench.world import World
from workloads.hybrid.hybrid_gradients import Sums, by_kind, gradients_of, sum_together


class Named(nn.Module):
    """A module with parameters of these names, each a few ones."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self._parameters = {name: nn.Parameter(torch.ones(2)) for name in names}


WHOLE = ["tokens.weight", "layers.0.attention_norm.weight", "layers.0.ffn_norm.bias", "norm.weight", "head.weight"]
SPLIT = ["layers.0.attention.q.weight", "layers.0.attention.out.bias", "layers.0.ffn.up.weight"]
MIXTURE = ["layers.0.ffn.router.weight", "layers.0.ffn.shared.up.weight"]
ROUTED = ["layers.1.ffn.experts.up"]


def names(model: nn.Module, *, split: bool) -> dict[str, set[str]]:
    of = {id(parameter): name for name, parameter in model.named_parameters()}
    return {kind: {of[id(p)] for p in found} for kind, found in by_kind(model, split=split).items()}


def test_parameters_are_told_apart_by_what_their_gradients_are_of() -> None:
    model = Named([*WHOLE, *SPLIT, *MIXTURE, *ROUTED])
    assert names(model, split=True) == {"whole": {*WHOLE, *MIXTURE}, "split": set(SPLIT), "routed": set(ROUTED)}


def test_without_tp_nothing_is_split() -> None:
    found = names(Named([*WHOLE, *SPLIT, *ROUTED]), split=False)
    assert found == {"whole": {*WHOLE, *SPLIT}, "split": set(), "routed": set(ROUTED)}


def test_a_parameter_that_no_step_used_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="every parameter is used"):
        gradients_of([nn.Parameter(torch.ones(2))])


def summed(world: World, axes: list[str], shards: int) -> dict[str, float]:
    """Return the first gradient of each kind after sums over these axes, which were rank + 1 before."""
    model = Named([WHOLE[0], SPLIT[0], ROUTED[0]])
    for parameter in model.parameters():
        parameter.grad = torch.full((2,), world.rank + 1.0)
    parameters = by_kind(model, split=True)
    Sums(parameters=parameters, groups=dict.fromkeys(axes, world.group), shards=shards).take()
    return {kind: float(gradients_of(found)[0][1]) for kind, found in parameters.items()}


@pytest.mark.parametrize(
    ("axes", "shards", "expected"),
    [
        ([], 1, {"whole": 1.0, "split": 1.0, "routed": 1.0}),
        (["tp"], 1, {"whole": 3.0, "split": 1.0, "routed": 1.0}),
        (["dp"], 1, {"whole": 3.0, "split": 3.0, "routed": 1.0}),
        (["edp"], 1, {"whole": 1.0, "split": 1.0, "routed": 3.0}),
        (["edp"], 2, {"whole": 1.0, "split": 1.0, "routed": 1.5}),
        (["cp", "pp", "fsdp", "ep"], 1, {"whole": 1.0, "split": 1.0, "routed": 1.0}),
    ],
    ids=str,
)
def test_each_axis_sums_its_own_kinds(two_ranks: Ranks, axes: list[str], shards: int, expected: dict[str, Any]) -> None:
    [first, _] = two_ranks.call("test_hybrid_gradients:summed", axes=axes, shards=shards)
    assert first == expected


def shapes_kept(world: World) -> list[list[float]]:
    """Return tensors of several sizes, one of none, after they were summed as one."""
    tensors = [torch.full((2, 3), world.rank + 1.0), torch.empty(0), torch.arange(4.0).view(2, 2).t()]
    sum_together(tensors, world.group)
    return [tensor.flatten().tolist() for tensor in tensors]


def test_tensors_of_any_shape_are_summed_as_one(two_ranks: Ranks) -> None:
    for found in two_ranks.call("test_hybrid_gradients:shapes_kept"):
        assert found == [[3.0] * 6, [], [0.0, 4.0, 2.0, 6.0]]


def calls_made(world: World) -> int:
    """Return how many all_reduces summing three tensors takes."""
    from workloads.communication import counted

    tensors = [torch.ones(2) for _ in range(3)]
    groups: dict[str, dist.ProcessGroup] = {"dp": world.group}
    return len(counted(lambda: sum_together(tensors, world.group), groups))


def test_tensors_are_summed_in_one_call(two_ranks: Ranks) -> None:
    assert two_ranks.call("test_hybrid_gradients:calls_made") == [1, 1]
