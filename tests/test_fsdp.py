"""FSDP2 gathers as often and as early as each name says, and stays right however it does."""

from typing import Any, cast

import pytest
from ranks import Ranks
from test_training import small
from torch import nn
from torch.distributed.fsdp import FSDPModule

from bench.world import World
from workloads.communication import Counted, counted
from workloads.fsdp import what_stays_exposed

NAMES = ("zero2", "zero3", "hsdp")


def counts_by_call(world: World, name: str, params: dict[str, Any]) -> dict[tuple[str, str], int]:
    """Return how often a step makes each call, by axis and operation."""
    step = small(world, name, params)
    step.step()
    calls = [(call.axis, call.op) for call in counted(step.step, step.layout.axes)]
    step.close()
    return {key: calls.count(key) for key in calls}


def gathers_before_each_layer(world: World, name: str, params: dict[str, Any]) -> list[int]:
    """Return how many gathers have been issued when each layer of a forward pass begins to compute."""
    step = small(world, name, {**params, "layers": 3})
    step.step()
    issued: list[int] = []
    with Counted(step.layout.axes) as mode:

        def note(module: nn.Module, args: object) -> None:
            issued.append(len([call for call in mode.calls if call.op == "all_gather"]))

        for layer in cast(nn.ModuleList, step.layout.model.layers):
            layer.get_submodule("attention_norm").register_forward_pre_hook(note)
        step._forward()
    step.close()
    return issued


def wrong_without_sync(world: World, name: str) -> int:
    """Return how much is wrong in a check alone whose gradients are not reduced."""
    step = small(world, name, {})
    step.reset()
    step.step()
    assert step.check() == 0
    cast(FSDPModule, step.layout.model).set_requires_gradient_sync(False)
    wrong = step.check()
    step.close()
    return wrong


@pytest.mark.parametrize(("name", "how"), [("zero2", "none"), ("zero3", "full"), ("hsdp", "none")])
def test_layers_gathered_ahead_are_right_too(two_ranks: Ranks, name: str, how: str) -> None:
    params = {"prefetch": "explicit", "accumulation": 2, "checkpointing": how}
    assert two_ranks.call("test_training:wrong_after", name=name, params=params, steps=2) == [[0, 0]] * 2


@pytest.mark.parametrize(("name", "precision"), [("zero2", "bfloat16"), ("zero3", "float32")])
def test_gradients_reduced_once_are_right_too(two_ranks: Ranks, name: str, precision: str) -> None:
    params = {"no_sync": True, "accumulation": 3, "precision": precision}
    assert two_ranks.call("test_training:wrong_after", name=name, params=params, steps=2) == [[0, 0]] * 2


@pytest.mark.parametrize("prefetch", ["default", "explicit"])
@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_of_the_closed_form(two_ranks: Ranks, name: str, prefetch: str) -> None:
    variants = [
        {"prefetch": prefetch, "precision": "float32", "vocabulary": 61},
        {"prefetch": prefetch, "precision": "bfloat16", "accumulation": 2, "no_sync": name != "hsdp"},
    ]
    for found in two_ranks.call("test_training:sent_and_expected", name=name, variants=variants):
        for given, (sent, expected) in zip(variants, found, strict=True):
            assert sent == {axis: value for axis, value in expected.items() if value}, given


@pytest.mark.parametrize(
    ("name", "gathers"),
    [("zero2", 3), ("zero3", 6), ("hsdp", 5)],  # two layers and the root; hsdp's root stays gathered
)
def test_parameters_are_gathered_as_often_as_the_name_says(two_ranks: Ranks, name: str, gathers: int) -> None:
    axis = "shard" if name == "hsdp" else "dp"
    for found in two_ranks.call("test_fsdp:counts_by_call", name=name, params={}):
        assert found[axis, "all_gather"] == gathers
        assert found[axis, "reduce_scatter"] == 3


def test_without_sync_gradients_are_reduced_once(two_ranks: Ranks) -> None:
    params = {"accumulation": 3, "no_sync": True}
    for found in two_ranks.call("test_fsdp:counts_by_call", name="zero3", params=params):
        assert found["dp", "all_gather"] == 18
        assert found["dp", "reduce_scatter"] == 3


@pytest.mark.parametrize("name", NAMES)
def test_explicit_prefetch_gathers_one_layer_ahead(two_ranks: Ranks, name: str) -> None:
    late, early = (
        two_ranks.call("test_fsdp:gathers_before_each_layer", name=name, params={"prefetch": prefetch})
        for prefetch in ("default", "explicit")
    )
    assert late == [[2, 3, 4]] * 2  # the root's and its own
    assert early == [[3, 4, 4]] * 2


@pytest.mark.parametrize("name", NAMES)
def test_gradients_that_are_not_reduced_are_caught(two_ranks: Ranks, name: str) -> None:
    assert max(two_ranks.call("test_fsdp:wrong_without_sync", name=name)) > 0


class Gloo:
    backend = "gloo"


class Nccl:
    backend = "nccl"


def test_a_row_names_what_stays_exposed_on_gloo_and_says_nothing_elsewhere() -> None:
    gloo, nccl = cast(World, Gloo()), cast(World, Nccl())
    (default,), (explicit,) = (what_stays_exposed(gloo, prefetch) for prefetch in ("default", "explicit"))
    assert "reduce_scatter blocks" in default
    assert "prefetches no all_gather" in default
    assert "the first all_gather" in explicit
    assert what_stays_exposed(nccl, "default") == ()
