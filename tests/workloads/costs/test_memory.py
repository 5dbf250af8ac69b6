"""What a rank holds: state by strategy, microbatches in flight by schedule, activations by axis and checkpointing."""

from dataclasses import replace
from typing import Any

import pytest

from parbench.bench.text import UserError
from parbench.workloads.catalogue import STRATEGIES
from parbench.workloads.costs.memory import (
    RankMemory,
    activations_of,
    buffers_equation,
    in_flight,
    layer_equation,
    schedule_of,
    stage_equation,
    state_bytes,
    state_equation,
    state_of,
)
from parbench.workloads.costs.parameter_table import (
    Kind,
    elements_of,
    layer_elements,
    num_parameters,
)
from parbench.workloads.costs.step_spec import Position
from parbench.workloads.model.shapes import MIXED, SHAPES, Widths
from parbench.workloads.pipeline_parallel.schedules import NAMES, make_schedule, peak_held
from tests.support.planner_asks import make_spec
from tests.support.training_steps import DEFINITION_BY_NAME

PSI = num_parameters(SHAPES["llama3-8b"])
TOKENS, HIDDEN, VOCABULARY = 8192, 4096, 128256  # of llama3-8b


def measured(name: str, ranks: int, rank: int = 0, **params: Any) -> Position:
    case = DEFINITION_BY_NAME[name].whole({"shape": "tiny", "microbatch": 4, **params})
    return STRATEGIES[name](case, ranks, "cpu").at(rank)


def state(at: Position) -> tuple[float, float, float]:
    held = state_of(at)
    return held.parameters, held.gradients, held.optimizer


def test_each_strategy_splits_its_own_part_of_the_state() -> None:
    """As of arXiv 1910.02054; 70 billion parameters are 1120 GB."""
    psi = num_parameters(SHAPES["tiny"])
    splits: list[tuple[str, dict[str, Any], tuple[int, int, int]]] = [
        ("ddp", {}, (1, 1, 1)),
        ("zero1", {}, (1, 1, 4)),
        ("zero1", {"optimizer": "distributed"}, (1, 1, 4)),
        ("fsdp", {"reshard": False}, (1, 4, 4)),
        ("fsdp", {}, (4, 4, 4)),
    ]
    for name, params, split in splits:
        for precision, widths in (("bfloat16", (2, 2, 12)), ("float32", (4, 4, 8))):
            expected = tuple(
                psi * width / parts for width, parts in zip(widths, split, strict=True)
            )
            assert state(measured(name, 4, precision=precision, **params)) == pytest.approx(
                expected
            ), (name, params)
    at = measured("hsdp", 4, shard=2)
    root = elements_of(at) - at.layers * layer_elements(at)  # which stays gathered
    assert state(at) == pytest.approx((4 * (root + (psi - root) / 2), 4 * psi / 2, 8 * psi / 2))
    assert state_bytes(70e9).state == 1120e9
    for text, widths, moved in (
        ("moments=bfloat16", (2, 2, 8), 20),
        ("parameters=float32,gradients=float32,master=none", (4, 4, 8), 28),
        ("moments=float8,master=float32", (2, 2, 6), 16),
        ("gradients=float32", (2, 4, 12), 30),
    ):
        spec = make_spec("dp=8", "llama3-8b", state=Widths.parse(text, MIXED))
        assert state(spec.at(0)) == tuple(width * PSI for width in widths), text
        assert state_equation(spec.at(0)).value == sum(widths) * PSI, text
        assert spec.widths.updated == moved, text
    for text, told in (
        ("moment=bfloat16", "'moment' is not parameters, .*did you mean 'moments'"),
        ("moments=bf16", "'bf16' is not float32, bfloat16"),
        ("moments=none", "'none' is not float32"),
    ):
        with pytest.raises(UserError, match=told):
            Widths.parse(text, MIXED)
    assert state_equation(make_spec("dp=8", "llama3-70b").at(0)).value == pytest.approx(
        1128.9e9, rel=1e-4
    )


def test_axes_leave_a_rank_its_part_of_sixteen_bytes_a_parameter() -> None:
    assert state(make_spec("dp=8", "llama3-8b").at(0)) == (2 * PSI, 2 * PSI, 12 * PSI)
    assert state(make_spec("dp=8", "llama3-8b", element_bytes=4).at(0)) == (
        4 * PSI,
        4 * PSI,
        8 * PSI,
    )
    for mesh, parts, tolerance in (
        ("cp=4", 1, 0),
        ("fsdp=64", 64, 1e-9),
        ("tp=4", 4, 1e-3),
        ("pp=4", 4, 0.25),
    ):
        at = make_spec(mesh, "llama3-8b", microbatches=4).at(0)
        assert state_of(at).state == pytest.approx(16 * PSI / parts, rel=tolerance), mesh
        assert state_equation(at).value == pytest.approx(state_of(at).state), mesh
    sharded: tuple[tuple[str, str, dict[str, Any], int, float], ...] = (
        ("dp=8", "llama3-8b", {"zero1": "reduce_scatter"}, 1, 4 + 12 / 8),
        ("dp=2,cp=4", "llama3-8b", {"zero1": "reduce_scatter"}, 1, 4 + 12 / 8),
        ("fsdp=8", "llama3-8b", {"reshard": False}, 2, 2 + 14 / 8),
        ("fsdp=8", "llama3-8b", {}, 3, 16 / 8),
    )
    for mesh, model, how, stage, a_parameter in sharded:
        at = make_spec(mesh, model, **how).at(0)
        assert at.spec.zero == stage
        assert state_of(at).state == pytest.approx(a_parameter * PSI, rel=1e-6), mesh
    for mesh, model, how, _, _ in (
        *sharded,
        ("dp=8,ep=4", "mixtral-8x7b", {"zero1": "reduce_scatter"}, 1, 0),
    ):
        at = make_spec(mesh, model, **how).at(0)
        assert state_equation(at).value == pytest.approx(state_of(at).state), mesh
    here, there = (make_spec(mesh, "mixtral-8x7b").at(0) for mesh in ("fsdp=8", "fsdp=8,ep=4"))
    assert elements_of(there, "routed") == elements_of(here, "routed") / 4
    for at in (here, there):  # what ep deals out, fsdp shards the less
        assert state_of(at).state == pytest.approx(
            16 * num_parameters(at.spec.shape, here.spec.moe) / 8, rel=1e-6
        )
    found = RankMemory(parameters=1, gradients=2, optimizer=3, activations=4, buffers=5)
    assert (found.state, found.total) == (6, 15)


def test_gathered_are_two_layers_and_a_gradient_or_a_whole_stage() -> None:
    every: tuple[Kind, ...] = ("whole", "split", "routed")
    for mesh, model, layers, kinds in (
        ("dp=8", "llama3-8b", 0.0, every),
        ("fsdp=8", "llama3-8b", 3 / 32, every),
        ("fsdp=4,pp=2", "llama3-8b", 2.0, every),
        ("fsdp=16,ep=8", "mixtral-8x7b", 3 / 32, every),
        (
            "fsdp=8,ep=8",
            "mixtral-8x7b",
            3 / 32,
            every[:2],
        ),  # experts that are not sharded are there already
    ):
        at = make_spec(mesh, model, microbatches=4).at(0)
        assert buffers_equation(at).value == pytest.approx(layers * elements_of(at, *kinds) * 2), (
            mesh
        )


def test_in_flight_is_what_the_order_of_actions_holds_and_no_more_than_there_is() -> None:
    for schedule in NAMES:
        for ranks, microbatches in ((2, 4), (4, 16)):
            order = make_schedule(schedule, ranks=ranks, microbatches=microbatches)
            spec = make_spec(f"pp={ranks}", schedule=schedule, microbatches=microbatches)
            for rank in range(ranks):
                held = peak_held(order, rank, lambda stage: 1) / order.chunks
                assert in_flight(spec.at_stage(rank)) == pytest.approx(held), (
                    schedule,
                    ranks,
                    rank,
                )
    assert in_flight(make_spec("pp=8", microbatches=3).at(0)) == 3
    assert in_flight(make_spec("dp=2", microbatches=3).at(0)) == 1


def test_a_pipelines_first_rank_holds_most_and_only_the_last_logits() -> None:
    spec = make_spec("pp=4", "llama3-8b", microbatches=8)
    each = 8 * layer_equation(spec.at(0), "none").value
    head = TOKENS * HIDDEN * 4 + TOKENS * VOCABULARY * 6
    expected = [4 * each, 3 * each, 2 * each, each + head]
    assert [activations_of(spec.at_stage(rank)) for rank in range(4)] == pytest.approx(
        expected, rel=1e-3
    )
    for schedule in ("gpipe", "looped_bfs"):  # which hold every microbatch and all logits
        last = replace(make_spec("pp=2", "llama3-8b", microbatches=8), schedule=schedule).at_stage(
            1
        )
        assert activations_of(last) == pytest.approx(8 * (2 * each + head), rel=1e-3), schedule
    for schedule in ("1f1b", "gpipe", "zb_v"):  # a measured one adds up its own stages
        at = measured("pp", 2, schedule=schedule, microbatches=8)
        each_stage = [stage_equation(at, stage).value for stage in range(len(at.layers_by_stage))]
        assert activations_of(at) == peak_held(schedule_of(at.spec), 0, each_stage.__getitem__), (
            schedule
        )
