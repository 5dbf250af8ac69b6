"""A gate that cannot fail would say nothing: what goes wrong in a step with experts on other ranks is caught."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from parbench.bench.world.world import World
from parbench.workloads.expert_parallel.expert_step import EpStep
from parbench.workloads.expert_parallel.moe_layer import MoeLayer, mixtures
from tests.support.ep_steps import DROPS, build_step
from tests.support.ranks import Ranks
from tests.support.training_steps import MUTANTS


def _scale_gradient(name: str) -> Callable[[Any], object]:
    return lambda step: step.layout.model.get_parameter(name).register_hook(
        lambda gradient: gradient * 1.001
    )


def _capacity_is_one_more(step: EpStep) -> None:
    for mixture in mixtures(step.layout.model):
        mixture.moe = replace(mixture.moe, capacity=0.9)


def _balance_is_not_asked_for(step: EpStep) -> None:
    for mixture in mixtures(step.layout.model):
        mixture.register_forward_hook(lambda module, args, out: setattr(module, "aux", None))


WRONGS: dict[str, tuple[int, Callable[[Any], object]]] = {
    "nothing": (1, lambda step: None),
    "nothing of split attention": (2, lambda step: None),
    "an expert's gradient is a thousandth larger": (
        1,
        _scale_gradient("layers.0.ffn.experts.down"),
    ),
    "a router's gradient is a thousandth larger": (
        1,
        _scale_gradient("layers.1.ffn.router.weight"),
    ),
    "capacity is larger": (1, _capacity_is_one_more),
    "balance is not asked for": (1, _balance_is_not_asked_for),
    "attention's gradients stay sums": (2, lambda step: step._copies.update(adp=[])),
    "all take the first tokens": (
        2,
        lambda step: setattr(step, "_positions", range(len(step._positions))),
    ),
}
COMMON = ["one rank has other tokens", "every loss is a thousandth larger", "targets are not moved"]


def wrong_of(world: World, wrongs: list[str]) -> list[int]:
    """Return how much is wrong after a step that goes on wrong in its check."""
    found = []
    for wrong in wrongs:
        tp, mutate = WRONGS.get(wrong, (1, None))
        step = build_step(world, {"aux": 0.5, "routing": "zipf", "tp": tp, **DROPS})
        step.reset()
        step.step()
        if mutate is None:
            MUTANTS[wrong](step, world)
        else:
            mutate(step)
        found.append(step.check())
        step.close()
    return found


def test_wrong_steps_are_caught(two_ranks: Ranks) -> None:
    wrongs = [*WRONGS, *COMMON]
    for wrong, *found in zip(
        wrongs,
        *two_ranks.call(
            "tests.workloads.expert_parallel.test_expert_step_gate:wrong_of", wrongs=wrongs
        ),
        strict=True,
    ):
        assert (max(found) > 0) == (not wrong.startswith("nothing")), wrong


def wrong_without_averages(world: World) -> list[int]:
    """Return how much is wrong where copies of experts are not averaged, and where their sum is not divided."""
    step = build_step(world, {"ep": 1})
    step.reset()
    step.step()
    found = [step.check()]
    axes = step._axes
    step._axes = replace(axes, groups={})
    found.append(step.check())
    step._axes, step._copies["edp"] = axes, []
    found.append(step.check())
    step.close()
    return found


def test_copies_that_are_not_averaged_are_caught(two_ranks: Ranks) -> None:
    right, *wrongs = zip(
        *two_ranks.call(
            "tests.workloads.expert_parallel.test_expert_step_gate:wrong_without_averages"
        ),
        strict=True,
    )
    assert right == (0, 0)
    assert all(max(found) > 0 for found in wrongs)


def wrong_of_a_router(world: World) -> list[int]:
    """Return what the first check finds where a rank's router is followed and where a token goes elsewhere, by tp."""
    found = []
    for tp, elsewhere in ((1, False), (1, True), (2, False), (2, True)):
        step = build_step(world, {"tp": tp})
        step.reset()
        if elsewhere and world.rank == 1:
            given = MoeLayer.forward

            def forward(layer: MoeLayer, x: Tensor, given: Any = given) -> Any:
                if layer.given is None:
                    scores = layer.router(x.flatten(0, 1))
                    routes = scores.topk(2).indices
                    routes[3] = (-scores[3]).topk(2).indices
                    layer.given = routes
                return given(layer, x)

            for mixture in mixtures(step.layout.model):
                mixture.forward = forward.__get__(mixture)  # type: ignore[method-assign]
        step.step()
        found.append(step.check())
        step.close()
    return found


def test_a_token_that_its_router_would_send_elsewhere_is_caught(two_ranks: Ranks) -> None:
    """Two layers each have one; results are computed with the routes taken, and are right."""
    assert (
        two_ranks.call("tests.workloads.expert_parallel.test_expert_step_gate:wrong_of_a_router")
        == [[0, 2, 0, 2]] * 2
    )
