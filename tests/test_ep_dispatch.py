"""Dispatch and combine alone: right under every variant and routing, and caught where they are not."""

from collections.abc import Callable
from typing import Any

import pytest
from ranks import Ranks
from test_ep_layer import params_of
from test_training import OF_NAME

from bench.runner import load_target
from bench.subject import Description
from bench.world import World
from workloads.experts.ep_dispatch import DispatchStep
from workloads.experts.moe_case import VARIANTS
from workloads.experts.routing import NAMES

Params = dict[str, Any]


def step_of(world: World, params: Params) -> DispatchStep:
    step = load_target(OF_NAME["ep_dispatch"].target)(world, **params_of("ep_dispatch", params))
    assert isinstance(step, DispatchStep)
    return step


def wrong_in(world: World, cases: list[Params]) -> list[list[int]]:
    """Return for each case how much is wrong before the first step, and after two."""
    found = []
    for params in cases:
        step = step_of(world, params)
        wrong = [step.check()]
        for _ in range(2):
            step.reset()
            step.step()
            wrong.append(step.check())
        step.close()
        found.append(wrong)
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_token_comes_back_times_its_weights(two_ranks: Ranks, variant: str) -> None:
    cases: list[Params] = [
        {"variant": variant, "routing": name, "capacity": 0.75, "precision": precision}
        for name in NAMES
        for precision in ("float32", "bfloat16")
    ]
    for found in two_ranks.call("test_ep_dispatch:wrong_in", cases=cases):
        for params, (unset, *after) in zip(cases, found, strict=True):
            assert unset == 2 * 16 * 32, params  # nothing has come back yet
            assert after == [0, 0], params


def test_chunks_and_four_ranks_bring_the_same(four_ranks: Ranks) -> None:
    cases: list[Params] = [{"chunks": 5, "routing": "zipf"}, {"ep": 2, "variant": "dedup"}, {"variant": "allgather"}]
    cases += [{"etp": 2, "routing": "zipf"}, {"etp": 4, "capacity": 0.75}]
    for found in four_ranks.call("test_ep_dispatch:wrong_in", cases=cases):
        assert [after for _, *after in found] == [[0, 0]] * len(cases)


def _one_element(step: DispatchStep) -> None:
    step._out[3, 5] += 0.01


def _weights_of_another(step: DispatchStep) -> None:
    step._out[3] = step._out[3] * 1.01


def _not_received(step: DispatchStep) -> None:
    step._out[7] = 0


WRONGS: dict[str, tuple[Callable[[DispatchStep], None], int]] = {
    "one element": (_one_element, 1),
    "weights of another": (_weights_of_another, 32),
    "not received": (_not_received, 32),
}


def wrong_of(world: World, wrong: str) -> int:
    step = step_of(world, {})
    step.reset()
    step.step()
    if world.rank == 1:
        WRONGS[wrong][0](step)
    found = step.check()
    step.close()
    return found


@pytest.mark.parametrize("wrong", WRONGS)
def test_each_wrong_is_counted_where_it_is(two_ranks: Ranks, wrong: str) -> None:
    assert two_ranks.call("test_ep_dispatch:wrong_of", wrong=wrong) == [0, WRONGS[wrong][1]]


def told(world: World) -> tuple[Description, dict[str, float | None]]:
    step = step_of(world, {"routing": "zipf", "variant": "dedup"})
    step.reset()
    step.step()
    found = step.explain(step.reset, 0.0)
    step.close()
    return step.describe(), {name: metric.value for name, metric in found.metrics.items()}


def test_a_row_counts_forward_bytes_alone_and_claims_nothing_else(two_ranks: Ranks) -> None:
    for description, metrics in two_ranks.call("test_ep_dispatch:told"):
        assert metrics["bytes_ratio.ep"] == 1.0
        assert description.headline == "step_time"
        assert [(work.name, work.amount) for work in description.work] == [("pairs_per_second", 2 * 32 * 2)]
        assert description.notes[0].startswith("ep_dispatch: forward dispatch and combine alone; no claim")
