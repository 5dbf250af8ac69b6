"""A rank holds state by strategy, microbatches in flight by schedule, and activations."""

from dataclasses import replace
from typing import Any

import pytest

from parbench.bench.text import UserError
from parbench.workloads.catalogue import STRATEGIES
from parbench.workloads.costs.memory import (
    activations_of,
    buffers_equation,
    in_flight,
    layer_equation,
    state_bytes,
    state_equation,
    state_of,
)
from parbench.workloads.costs.parameter_table import (
    Kind,
    elements_of,
    num_parameters,
)
from parbench.workloads.costs.step_spec import Position
from parbench.workloads.model.shapes import MIXED, SHAPES, Widths
from parbench.workloads.pipeline_parallel.schedules import NAMES, make_schedule, peak_held
from tests.support.planner_asks import make_spec
from tests.support.training_steps import DEFINITION_BY_NAME

PSI = num_parameters(SHAPES["llama3-8b"])
TINY_PSI = num_parameters(SHAPES["tiny"])


def position_of_case(name: str, ranks: int, **params: Any) -> Position:
    case = DEFINITION_BY_NAME[name].whole({"shape": "tiny", "microbatch": 4, **params})
    return STRATEGIES[name](case, ranks, "cpu").at(0)


@pytest.mark.parametrize(
    ("name", "params", "ranks_by_part"),
    [
        ("ddp", {}, (1, 1, 1)),
        ("zero1", {}, (1, 1, 4)),
        ("zero1", {"optimizer": "distributed"}, (1, 1, 4)),
        ("fsdp", {"reshard": False}, (1, 4, 4)),
        ("fsdp", {}, (4, 4, 4)),
    ],
)
@pytest.mark.parametrize(
    ("precision", "widths"), [("bfloat16", (2, 2, 12)), ("float32", (4, 4, 8))]
)
def test_strategies_divide_state(
    name: str,
    params: dict[str, Any],
    ranks_by_part: tuple[int, int, int],
    precision: str,
    widths: tuple[int, int, int],
) -> None:
    """ZeRO (arXiv 1910.02054) divides parameters, gradients and the optimizer's state."""
    state = state_of(position_of_case(name, 4, precision=precision, **params))
    parameters, gradients, optimizer = (
        TINY_PSI * width / ranks for width, ranks in zip(widths, ranks_by_part, strict=True)
    )
    assert state.parameters == pytest.approx(parameters)
    assert state.gradients == pytest.approx(gradients)
    assert state.optimizer == pytest.approx(optimizer)


def test_state_of_70_billion_parameters() -> None:
    assert state_bytes(70e9).state == 1120e9


@pytest.mark.parametrize(
    ("text", "widths"),
    [
        ("moments=bfloat16", (2, 2, 8)),
        ("parameters=float32,gradients=float32,master=none", (4, 4, 8)),
        ("moments=float8,master=float32", (2, 2, 6)),
    ],
)
def test_state_has_chosen_widths(text: str, widths: tuple[int, int, int]) -> None:
    position = make_spec("dp=8", "llama3-8b", state=Widths.parse(text, MIXED)).at(0)
    state = state_of(position)
    assert (state.parameters, state.gradients, state.optimizer) == tuple(
        width * PSI for width in widths
    )
    assert state_equation(position).value == sum(widths) * PSI


@pytest.mark.parametrize(
    ("text", "message"),
    [("moment=bfloat16", "'moments'"), ("moments=bf16", "'bf16'"), ("moments=none", "'none'")],
)
def test_wrong_widths_are_rejected(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Widths.parse(text, MIXED)


@pytest.mark.parametrize(
    ("mesh", "params", "bytes_per_parameter", "tolerance"),
    [
        ("dp=8", {}, 16, 0),
        ("cp=4", {}, 16, 0),
        ("tp=4", {}, 16 / 4, 1e-3),
        ("pp=4", {}, 16 / 4, 0.25),
        ("fsdp=64", {}, 16 / 64, 1e-6),
        ("dp=8", {"zero1": "reduce_scatter"}, 4 + 12 / 8, 1e-6),
        ("dp=2,cp=4", {"zero1": "reduce_scatter"}, 4 + 12 / 8, 1e-6),
        ("fsdp=8", {"reshard": False}, 2 + 14 / 8, 1e-6),
    ],
)
def test_axes_divide_state(
    mesh: str, params: dict[str, Any], bytes_per_parameter: float, tolerance: float
) -> None:
    position = make_spec(mesh, "llama3-8b", microbatches=4, **params).at(0)
    state = state_of(position).state
    assert state == pytest.approx(bytes_per_parameter * PSI, rel=tolerance)
    assert state_equation(position).value == pytest.approx(state)


@pytest.mark.parametrize("mesh", ["fsdp=8", "fsdp=8,ep=4"])
def test_experts_are_divided_once(mesh: str) -> None:
    """FSDP shards only the experts that expert parallelism leaves to a rank."""
    spec = make_spec(mesh, "mixtral-8x7b")
    expected = 16 * num_parameters(spec.shape, spec.moe) / 8
    assert state_of(spec.at(0)).state == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("mesh", "model", "layers", "kinds"),
    [
        ("dp=8", "llama3-8b", 0.0, ("whole", "split")),
        ("fsdp=8", "llama3-8b", 3 / 32, ("whole", "split")),
        ("fsdp=4,pp=2", "llama3-8b", 2.0, ("whole", "split")),
        ("fsdp=16,ep=8", "mixtral-8x7b", 3 / 32, ("whole", "split", "routed")),
        # Experts that are not sharded need no buffer.
        ("fsdp=8,ep=8", "mixtral-8x7b", 3 / 32, ("whole", "split")),
    ],
)
def test_buffers_are_gathered_parameters(
    mesh: str, model: str, layers: float, kinds: tuple[Kind, ...]
) -> None:
    """Two layers of parameters and one of gradients, or parameters and gradients of a stage."""
    position = make_spec(mesh, model, microbatches=4).at(0)
    expected = layers * elements_of(position, *kinds) * 2
    assert buffers_equation(position).value == pytest.approx(expected)


@pytest.mark.parametrize("schedule", NAMES)
def test_in_flight_follows_the_order_of_actions(schedule: str) -> None:
    order = make_schedule(schedule, ranks=4, microbatches=16)
    spec = make_spec("pp=4", schedule=schedule, microbatches=16)
    for rank in range(4):
        expected = peak_held(order, rank, lambda stage: 1) / order.chunks
        assert in_flight(spec.at_stage(rank)) == pytest.approx(expected), rank


def test_activations_of_pipeline_ranks() -> None:
    """The first rank holds most microbatches, and only the last one has logits."""
    spec = make_spec("pp=4", "llama3-8b", microbatches=8)
    stage = 8 * layer_equation(spec.at(0), "none").value
    head = 8192 * 4096 * 4 + 8192 * 128256 * 6
    activations = [activations_of(spec.at_stage(rank)) for rank in range(4)]
    expected = [4 * stage, 3 * stage, 2 * stage, stage + head]
    assert activations == pytest.approx(expected, rel=1e-3)
    last = activations_of(replace(spec, schedule="gpipe").at_stage(3))
    assert last == pytest.approx(8 * (stage + head), rel=1e-3)
