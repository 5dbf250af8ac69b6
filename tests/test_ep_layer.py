"""The layer alone gives output and gradients of one process, and with waiting experts follows the load of ranks."""

from collections.abc import Callable
from typing import Any

import pytest
from ranks import Ranks
from test_training import OF_NAME, SMALL

from bench.cases import make_case
from bench.messages import Outcome
from bench.plan import Measure
from bench.progress import Progress
from bench.runner import load_target, run_case
from bench.world import World
from workloads.experts.ep_layer import LayerStep
from workloads.experts.moe_case import VARIANTS
from workloads.experts.routing import GENERATORS
from workloads.layout import local

Params = dict[str, Any]

KINDS: list[Params] = [
    {"recipe": "llama", "scores": "sigmoid", "routing": "router"},
    {"precision": "bfloat16", "routing": "zipf"},
    {"chunks": 4, "routing": "lognormal", "capacity": 0.75},
    {"ep": 1, "routing": "ragged"},
    {"shared": 0, "top_k": 1, "routing": "router"},
]


def params_of(name: str, params: Params) -> Params:
    """Return small parameters; what is not given has the default of its definition."""
    definition = OF_NAME[name]
    defaults = {param.name: param.default for param in definition.params if not param.optional}
    known = {param.name for param in definition.params}
    return {**defaults, **{key: value for key, value in SMALL.items() if key in known}, **params}


def layer_of(world: World, params: Params) -> LayerStep:
    step = load_target(OF_NAME["ep_layer"].target)(world, **params_of("ep_layer", params))
    assert isinstance(step, LayerStep)
    return step


def wrong_in(world: World, cases: list[Params], steps: int = 2) -> list[list[int]]:
    """Return for each case how much is wrong after each step."""
    found = []
    for params in cases:
        step, wrong = layer_of(world, params), []
        for _ in range(steps):
            step.reset()
            step.step()
            wrong.append(step.check())
        step.close()
        found.append(wrong)
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_and_routing_gives_what_one_process_does(two_ranks: Ranks, variant: str) -> None:
    cases: list[Params] = [
        {"variant": variant, "routing": name, "capacity": capacity}
        for name in GENERATORS
        for capacity in (0.75, *(() if variant == "padded" else (0.0,)))
    ]
    assert two_ranks.call("test_ep_layer:wrong_in", cases=cases) == [[[0, 0]] * len(cases)] * 2


def test_every_kind_of_layer_gives_what_one_process_does(two_ranks: Ranks) -> None:
    assert two_ranks.call("test_ep_layer:wrong_in", cases=KINDS) == [[[0, 0]] * len(KINDS)] * 2


def test_copies_among_four_ranks_give_what_one_process_does(four_ranks: Ranks) -> None:
    cases: list[Params] = [
        *({"variant": variant, "routing": name, "capacity": 0.75} for variant in VARIANTS for name in GENERATORS),
        *({"ep": ep, "variant": variant, "routing": "zipf", "capacity": 0.75} for ep in (1, 2) for variant in VARIANTS),
    ]
    cases += [{"etp": 2, "variant": variant, "routing": "zipf", "capacity": 0.75} for variant in VARIANTS]
    cases.append({"etp": 4, "routing": "router", "chunks": 2})
    assert four_ranks.call("test_ep_layer:wrong_in", cases=cases, steps=1) == [[[0]] * len(cases)] * 4


# ---- what is wrong is caught


def _output(step: LayerStep) -> None:
    step._out = step._out.detach() * 1.001


def _input_gradient(step: LayerStep) -> None:
    assert step.x.grad is not None
    step.x.grad *= 1.001


def _experts_gradient(step: LayerStep) -> None:
    gradient = step.layer.experts.up.grad
    assert gradient is not None
    local(gradient)[-1] *= 1.001


def _router_gradient(step: LayerStep) -> None:
    assert step.layer.router.weight.grad is not None
    step.layer.router.weight.grad *= 1.001


def _missing(step: LayerStep) -> None:
    step.layer.router.weight.grad = None


WRONGS: dict[str, Callable[[LayerStep], None]] = {
    "output": _output,
    "input's gradient": _input_gradient,
    "experts' gradient": _experts_gradient,
    "router's gradient": _router_gradient,
    "a gradient is missing": _missing,
}


def wrong_of(world: World, wrongs: list[str]) -> list[tuple[int, int]]:
    """Return how much is wrong before and after each wrong, on the last rank alone."""
    found = []
    for wrong in wrongs:
        step = layer_of(world, {"capacity": 0.75, "routing": "zipf"})
        step.reset()
        step.step()
        before = step.check()
        if world.rank == world.size - 1:
            WRONGS[wrong](step)
        found.append((before, step.check()))
        step.close()
    return found


def test_each_wrong_is_caught(two_ranks: Ranks) -> None:
    first, second = two_ranks.call("test_ep_layer:wrong_of", wrongs=list(WRONGS))
    for wrong, (before, _), (too, after) in zip(WRONGS, first, second, strict=True):
        assert before == too == 0, wrong
        assert after > 0, wrong


def idle(world: World) -> tuple[int, list[float]]:
    """Return how much is wrong where the last rank gets no token, and the size of its experts' gradients."""
    step = layer_of(world, {"routing": "idle_rank"})
    step.step()
    sizes = [float(local(p.grad).abs().sum()) for p in step.layer.experts.parameters() if p.grad is not None]
    wrong = step.check()
    step.close()
    return wrong, sizes


def test_a_rank_without_tokens_works_and_has_zero_gradients(two_ranks: Ranks) -> None:
    (wrong, busy), (too, free) = two_ranks.call("test_ep_layer:idle")
    assert wrong == too == 0
    assert min(busy) > 0
    assert free == [0.0, 0.0]


# ---- what it costs


def measured(world: World, params: Params, seconds: float = 3.0) -> Outcome:
    definition = OF_NAME["ep_layer"]
    case = make_case(definition.name, definition.target, params_of("ep_layer", params))
    return run_case(case, world, Measure(warmup=1, max_iterations=6), seconds, Progress())


def test_a_row_has_all_that_routes_cost(two_ranks: Ranks) -> None:
    outcome, _ = two_ranks.call("test_ep_layer:measured", params={"routing": "hot_rank", "capacity": 1.0})
    assert outcome.status == "ok", outcome.reason
    assert outcome.headline == "step_time"
    value = {name: metric.value for name, metric in outcome.explained.items()}
    assert value["imbalance.rank"] == 4 / 3  # capacity takes off the hot rank what it has too much
    assert value["bytes_ratio.ep"] == 1.0
    assert value["drop_rate"] == value["drop_rate_expected"] == 0.25
    for name in ("dispatch_bandwidth.logical", "combine_bandwidth.wire", "exposed_comm.ep", "imbalance_slowdown"):
        assert value[name] is not None
        assert value[name] > 0
    assert {"imbalance_lost", "dedup_ratio", "dispatched", "dispatched_even", "imbalance.expert"} <= value.keys()
    assert outcome.details["rank_load"] == [[64, 32]]
    assert outcome.details["expert_load"] == [[24, 24, 24, 24, 8, 8, 8, 8]]
    assert any(note.startswith("ep_layer: one layer, forward and backward") for note in outcome.notes)


@pytest.mark.measures
def test_waiting_experts_slow_a_layer_down_by_the_load_of_the_hottest_rank(four_ranks: Ranks) -> None:
    """max / mean is 2, within 15 %: what does not wait takes its time beside 180 ms and 360 ms."""
    outcome, *_ = four_ranks.call(
        "test_ep_layer:measured", params={"routing": "hot_rank", "compute": "timed:60ms"}, seconds=8.0
    )
    assert outcome.status == "ok", outcome.reason
    slowdown, imbalance = (outcome.explained[name].value for name in ("imbalance_slowdown", "imbalance.rank"))
    assert imbalance == 2.0
    assert slowdown == pytest.approx(imbalance, rel=0.15)
    lost = outcome.explained["imbalance_lost"].value
    assert lost == pytest.approx(0.18, rel=0.15)
    assert any("timed experts" in note for note in outcome.notes)


def misplaced(world: World) -> list[int]:
    """Return what a check of waiting experts finds, right and where rows go to the next rank's experts."""
    step = layer_of(world, {"compute": "timed:1ms", "routing": "zipf"})
    step.reset()
    step.step()
    found = [step.check()]
    assert step.layer.given is not None
    given = step.layer.given
    step._sum_of_numbers = lambda routes: LayerStep._sum_of_numbers(step, (given + 1) % 8)  # type: ignore[method-assign]
    found.append(step.check())
    step.close()
    return found


def test_where_experts_wait_the_places_of_rows_are_checked(two_ranks: Ranks) -> None:
    for right, wrong in two_ranks.call("test_ep_layer:misplaced"):
        assert right == 0
        assert wrong > 0
