"""Tensor-parallel layers hold their part alone, and make the calls that the closed form counts."""

from collections import Counter
from typing import Any

import pytest
from ranks import Ranks
from test_training import small
from torch.distributed.tensor import DTensor

from bench.world import World
from workloads.communication import counted
from workloads.layout import local


def counts_by_call(world: World, name: str, params: dict[str, Any]) -> dict[tuple[str, str, int], int]:
    """Return how often a step's forward and backward pass make each call, by axis, operation and bytes."""
    step = small(world, name, params)
    step.step()
    step.layout.optimizer.zero_grad()
    calls = counted(step._forward_backward, step.layout.axes)
    step.close()
    return dict(Counter((call.axis, call.op, call.num_bytes) for call in calls))


def parts_held(world: World, name: str) -> dict[str, tuple[int, int]]:
    """Return of each parameter the elements in all and those on this rank."""
    step = small(world, name, {})
    found = {key: (p.numel(), local(p).numel()) for key, p in step.layout.model.named_parameters()}
    split = [key for key, p in step.layout.model.named_parameters() if isinstance(p, DTensor)]
    step.close()
    return {key: found[key] for key in split}


def test_whole_activations_are_summed_four_times_a_layer(two_ranks: Ranks) -> None:
    activation = 2 * 16 * 32 * 4
    for found in two_ranks.call("test_tp:counts_by_call", name="tp", params={}):
        assert found == {("tp", "all_reduce", activation): 8}


def test_sharded_activations_are_gathered_and_scattered_four_times_a_layer(two_ranks: Ranks) -> None:
    activation = 2 * 16 * 32 * 4
    for found in two_ranks.call("test_tp:counts_by_call", name="tp_sp", params={}):
        assert found["tp", "all_gather", activation] == 8 + 2  # and one at each end
        assert found["tp", "reduce_scatter", activation] == 8


@pytest.mark.parametrize("name", ["tp", "tp_sp"])
def test_each_rank_holds_half_of_every_matrix_of_a_layer(two_ranks: Ranks, name: str) -> None:
    for held in two_ranks.call("test_tp:parts_held", name=name):
        matrices = [key for key in held if key.startswith("layers.") and "norm" not in key and "weight" in key]
        assert len(matrices) == 2 * 6
        assert all(mine * 2 == all_of_it for all_of_it, mine in (held[key] for key in matrices))
